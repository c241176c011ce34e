"""What one call of `shoal.jobs.submit` was given, apart from the spec."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.jobs import credentials
from shoal.jobs.credentials import Secrets
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.tasks import EngineTask
from shoal.jobs.reconcile.target import Target
from shoal.jobs.specs.base import AnyJobSpec
from shoal.pool.endpoint import Endpoint
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.schema import Job


@dataclass(frozen=True)
class Call:
    """Arguments of a call of `submit`, or their defaults.

    Attributes:
        library: Library with which this process loads the trained model; None if it loads none.
        needs_lease: Whether the holder must still have its lease on the pool, if it has had one.
        team: Team for which the caller acts.
    """

    store: Store
    holder: str
    task: EngineTask | None
    pool: PoolSpec
    job_id: str
    orphan_after: float | None
    library: str | None
    needs_lease: bool
    connection_url: Callable[[str], str | None] | None
    secret_of: Callable[[str], str | None] | None
    environment: Mapping[str, str]
    endpoint_of: Callable[[str], Endpoint] | None
    clock: Callable[[], float]
    team: str | None = None

    def target(self, job: Job) -> Target:
        """Return an attempt as a target for rounds of reconciling. It may run on another pool than the call's."""
        key = Key(job.id, job.attempt)
        return Target(self.store, key, job.pool, actor=self.holder, find_endpoint=self.endpoint_of, clock=self.clock)

    def secrets(self, spec: AnyJobSpec, uris: Mapping[str, str]) -> Secrets:
        """Return the credentials for the driver of a job.

        Args:
            spec: Spec of the job.
            uris: URIs with credentials in the spec, from `credentials.hide`.
        """
        environment = {**os.environ, **self.environment}
        hidden = credentials.secrets_of(spec.run_config.secret_env, environment, self.secret_of)
        named = [dataset.connection for dataset in spec.datasets() if dataset.connection]
        databases = credentials.connections(named, environment, self.connection_url)
        return Secrets({**credentials.from_environment(environment), **databases, **hidden}, uris, frozenset(hidden))
