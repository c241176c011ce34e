"""Plain functions for compute pools. Some of them call one method of `ComputePool`, such as `scale_cluster`. The others
work on all pools, such as `list_pools`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from sqlalchemy import select

from shoal.errors import InvalidArgumentError
from shoal.pool.api.compute_pool import ComputePool
from shoal.pool.backends import Seen
from shoal.pool.bound_host import is_here
from shoal.pool.journal import rows
from shoal.pool.names import pool_name_of
from shoal.pool.reconcile import background_process
from shoal.pool.reconcile.sweep import sweep
from shoal.pool.snapshot import Snapshot
from shoal.pool.spec import ScaleOptions, checked_size
from shoal.pool.status import NodeInfo, PoolReport, PoolStatus, check_nodes, report_of
from shoal.state import Store
from shoal.state.schema import Pool, PoolState

_ASKED_AT_ONCE = 16
"""Largest number of pools whose status `report_pools` reads at the same time."""


def scale_cluster(
    expected_cluster_size: int,
    *,
    pool_name: str | None = None,
    is_async: bool = False,
    options: Mapping[str, Any] | None = None,
    notebook_name: str | None = None,
) -> bool:
    """Grow or shrink a pool to a number of nodes, including the head.

    If the nodes are not ready at the deadline, or the call fails in any way, the previous demand is restored and all
    nodes that this operation started are ended.

    Args:
        expected_cluster_size: Number of nodes, from MIN_NODES to MAX_NODES of the pool.
        pool_name: Name of the pool. Optional inside a job, if ``$SHOAL_POOL`` is set, or if only one pool is up.
        is_async: Return as soon as the request is written to the database. The reconciler (a background process on
            this host) then starts or ends the nodes.
        options: ``rollback_after_seconds`` is the time until the deadline (default: 720). With
            ``block_until_min_cluster_size``, the call returns as soon as this number of nodes is ready. The other nodes
            may still start until the deadline. Then the demand is set to the number of ready nodes.
        notebook_name: Alias of `pool_name` that accepts any text, such as ``'"MY_NOTEBOOK"'``, which names the pool
            ``my-notebook``; see `shoal.pool.names.pool_name_of`.

    Returns:
        True when all nodes, or the minimum, are ready. With `is_async`: True when the request is accepted.

    Raises:
        InvalidArgumentError: The size or an option is invalid. Nothing was changed.
        PoolNotFoundError: No pool has this name. Nothing was changed.
        PoolDownError: The pool is down. Start it with `ComputePool.up`.
        ScaleError: The size was not reached, and the operation was rolled back. The error names each failed node.
    """
    from_notebook = pool_name_of(notebook_name) if notebook_name else None
    if pool_name and from_notebook and pool_name != from_notebook:
        raise InvalidArgumentError(
            f"pool_name={pool_name!r} and its alias notebook_name={notebook_name!r} (pool {from_notebook!r}) differ: "
            "pass only one of them"
        )
    size = checked_size(expected_cluster_size)
    # Check the options first, so that wrong options are reported even if the store cannot be opened.
    ScaleOptions.for_size(options, size)
    return ComputePool(pool_name or from_notebook).scale(size, is_async=is_async, options=options)


def get_nodes(pool_name: str | None = None) -> list[NodeInfo]:
    """Return the nodes that are ready to work, the head first, as ``[{"name": …, "cpus": …, "gpus": …}, …]``.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    return ComputePool(pool_name).get_nodes()


def describe_pool(pool_name: str | None = None) -> PoolStatus:
    """Return a pool's current status: state, limits, target size, nodes, leases (granted and waiting) and last
    operation.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    return ComputePool(pool_name).describe()


def alter_pool(pool_name: str, *, min_nodes: int | None = None, max_nodes: int | None = None) -> None:
    """Change a pool's MIN_NODES and MAX_NODES. The reconciler starts nodes if MIN_NODES was raised.

    Raises:
        PoolNotFoundError: No pool has this name.
        InvalidArgumentError: MIN_NODES is above MAX_NODES, or MAX_NODES is below the base demand, below the nodes that
            the granted leases take together, or below the size of a waiting lease.
    """
    ComputePool(pool_name).alter(min_nodes=min_nodes, max_nodes=max_nodes)


def list_pools(store: Store | None = None, *, embedded: bool = False) -> list[PoolStatus]:
    """Return the status of every pool in the store.

    Args:
        store: The state store.
        embedded: Whether to include embedded pools (pools that belong to a process or a job) that are not down.
    """
    return [report.status for report in report_pools(store, embedded=embedded)]


def report_pools(
    store: Store | None = None, *, embedded: bool = False, check: Callable[[Snapshot], Seen] = check_nodes
) -> list[PoolReport]:
    """Return the status and the operations of every pool in the store. The number of database queries does not depend
    on the number of pools.

    Args:
        store: The state store.
        embedded: Whether to include embedded pools (pools that belong to a process or a job) that are not down.
        check: Function that returns which nodes of a pool are lost. Default: ask the pool's head, which may take
            seconds.
    """
    with (store or Store()).reading() as session:
        snapshots = rows.load_all(session)
    listed = [each for each in snapshots if each.pool.owner is None or (embedded and each.pool.state != PoolState.DOWN)]
    now = time.time()
    # The head of a remote pool may take seconds to answer, so several pools are queried at the same time.
    with ThreadPoolExecutor(max(1, min(len(listed), _ASKED_AT_ONCE))) as threads:
        # The threads use the store of the caller (`shoal.state.home.use_store`).
        reports = [threads.submit(copy_context().run, report_of, each, now, check) for each in listed]
    return [each.result() for each in reports]


def sweep_nodes(store: Store) -> list[str]:
    """End the nodes on this host that no pool needs any more, and return one sentence for each action. The record of
    actions gets no line; see `shoal.jobs.sweep`."""
    did = sweep(store)
    with store.reading() as session:
        alive = any(is_here(pool) for pool in session.scalars(select(Pool).where(Pool.state != PoolState.DOWN)))
    if alive:
        background_process.ensure_running()
    return did
