"""Context of an attempt in its driver: store, MLflow run, tags, environment."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from shoal.jobs.files import artifacts
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.retries import patiently
from shoal.jobs.mlflow.tracking import Run
from shoal.state import Store
from shoal.training.claims import Claim
from shoal.training.progress import OnProgress


@dataclass(frozen=True)
class Workplace:
    """Context of one attempt in its driver.

    Attributes:
        store: Store that has the attempt's row.
        key: The attempt.
        run: MLflow run of the attempt; None if the attempt is not tracked.
        tags: MLflow tags that name the job, attempt, pool and holder.
        environment: Environment variables for the workers, passed to them as actor arguments.
        on_progress: Keeps the progress of the training for the job's row.
        begun: Start of the attempt, in seconds of the monotonic clock.
    """

    store: Store
    key: Key
    run: Run | None
    tags: dict[str, str]
    environment: dict[str, str] = field(repr=False)
    on_progress: OnProgress
    begun: float = field(default_factory=time.monotonic)

    def claim(self) -> Claim:
        """Return the claim that marks folders as belonging to this attempt."""
        return artifacts.claim_of(self.store, self.key)

    def is_current(self) -> bool:
        """Return whether this attempt is running and the newest of its job; retry while the store cannot be used."""
        return patiently(self.store, lambda: attempts.is_current(self.store, self.key))
