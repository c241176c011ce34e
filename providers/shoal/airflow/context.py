"""A pool for the duration of a DAG run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shoal.airflow.operators import CleanupPoolOperator, LeasePoolOperator


@dataclass(frozen=True)
class PoolTasks:
    """The two tasks around those that use the pool, to be put before and after others (``prepare >> tasks.setup``).

    :param setup: Brings the pool up and leases its nodes.
    :param teardown: Cancels the run's jobs, releases its lease, sweeps; runs however the tasks between ended.
    """

    setup: LeasePoolOperator
    teardown: CleanupPoolOperator


@contextmanager
def pool_for_run(
    *,
    size: int,
    pool_name: str | None = None,
    compute_pool_conn_id: str | None = None,
    is_async: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Iterator[PoolTasks]:
    """Wrap the tasks of the block in a setup that leases nodes and a teardown that gives everything back.

    :param size: Nodes, the head among them.
    :param pool_name: Name of a pool, or its URI.
    :param compute_pool_conn_id: Connection of type ``compute_pool``, instead of the name.
    :param is_async: Let the setup return at once, for a ``NodesSensor`` in the block that waits for the nodes.
    :param options: As of ``ScaleClusterOperator``.
    """
    where = {"pool_name": pool_name, "compute_pool_conn_id": compute_pool_conn_id}
    setup = LeasePoolOperator(task_id="lease_pool", size=size, is_async=is_async, options=options, **where)
    teardown = CleanupPoolOperator(task_id="clean_up_pool", **where)
    with teardown.as_teardown(setups=setup):
        yield PoolTasks(setup, teardown)
