"""`pool_for_run`: lease a pool for the tasks of a DAG run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shoal.airflow.operators import CleanupPoolOperator, LeasePoolOperator


@dataclass(frozen=True)
class PoolTasks:
    """The setup and teardown tasks of a leased pool. Use them to order other tasks (``prepare >> tasks.setup``)."""

    setup: LeasePoolOperator
    """Task that brings the pool up and leases its nodes."""
    teardown: CleanupPoolOperator
    """Task that cancels the run's jobs, releases its lease and sweeps the pool. It runs even if other tasks failed."""


@contextmanager
def pool_for_run(
    *,
    size: int,
    pool_name: str | None = None,
    compute_pool_conn_id: str | None = None,
    is_async: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Iterator[PoolTasks]:
    """Lease nodes in a setup task before the tasks of the ``with`` block, and release them in a teardown task.

    :param size: Number of nodes, including the head node.
    :param pool_name: Name or URI of the pool.
    :param compute_pool_conn_id: Connection of type ``compute_pool``, instead of `pool_name`.
    :param is_async: Let the setup task end before the nodes are ready. A ``NodesSensor`` in the block then waits for
        the nodes.
    :param options: The same options as for ``ScaleClusterOperator``.
    """
    pool = {"pool_name": pool_name, "compute_pool_conn_id": compute_pool_conn_id}
    setup = LeasePoolOperator(task_id="lease_pool", size=size, is_async=is_async, options=options, **pool)
    teardown = CleanupPoolOperator(task_id="clean_up_pool", **pool)
    with teardown.as_teardown(setups=setup):
        yield PoolTasks(setup, teardown)
