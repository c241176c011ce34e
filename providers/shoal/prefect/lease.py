"""`pool_lease`: a pool of some size for the duration of a block of code, and as it was before afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from prefect.exceptions import MissingContextError

from shoal.jobs import clean_up
from shoal.pool.api import ComputePool
from shoal.pool.leases import PoolLease
from shoal.pool.tunables import LEASE_TTL
from shoal.prefect._holder import current_holder
from shoal.prefect._progress import NodeLog
from shoal.prefect._threads import in_thread
from shoal.prefect.blocks import PoolSource, defines, pool_of


def pool_lease(
    size: int, *, pool_name: PoolSource = None, ttl: float = LEASE_TTL, options: Mapping[str, Any] | None = None
) -> PoolForTheDuration:
    """Have a pool of at least `size` nodes for the duration of a ``with`` or ``async with`` block of a flow.

    At its beginning: leases the nodes and waits for them, bringing the pool up if it is down and `pool_name` defines it
    (URI or block); nothing is left if they do not come. Meanwhile the lease is renewed. At its end, come what may:
    cancels jobs of this flow run that still run, releases the lease, and ends what nobody owns; a pool that was brought
    up for leases is down again after the last of them.

    A flow run has one lease on a pool: nesting two on the same pool is not possible.

    Args:
        size: Nodes, the head among them.
        pool_name: Name, URI or block of the pool.
        ttl: Seconds that the lease outlives this process if it is killed.
        options: ``rollback_after_seconds``, ``block_until_min_cluster_size``.

    Returns:
        The context manager; it gives the pool.

    Raises:
        ScaleError: The nodes did not come; the pool is as it was.
        PoolDownError: The pool is down, and only its name was given.
        InvalidArgumentError: A size above MAX_NODES, a wrong option.

    Example:
        >>> with pool_lease(3, pool_name="local://retrain?max_nodes=4") as pool:
        ...     distributed_train(spec, pool_name=pool.name)
    """
    return PoolForTheDuration(size, pool_name, ttl, options)


class PoolForTheDuration:
    """What `pool_lease` returns."""

    def __init__(self, size: int, source: PoolSource, ttl: float, options: Mapping[str, Any] | None) -> None:
        self._size = size
        self._source = source
        self._ttl = ttl
        self._options = options
        self._pool: ComputePool | None = None
        self._lease: PoolLease | None = None

    def __enter__(self) -> ComputePool:
        return self._enter(self._holder(), NodeLog())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    async def __aenter__(self) -> ComputePool:
        holder, log = self._holder(), NodeLog()
        return await in_thread(lambda: self._enter(holder, log), log.interrupt)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await in_thread(self._leave)

    @staticmethod
    def _holder() -> str:
        holder = current_holder()
        if holder is None:
            raise MissingContextError("pool_lease belongs into a flow or task; elsewhere use shoal.ComputePool.lease")
        return holder

    def _enter(self, holder: str, log: NodeLog) -> ComputePool:
        self._pool = pool_of(self._source, holder=holder)
        self._lease = self._pool.lease(
            self._size, ttl=self._ttl, bring_up=defines(self._source), options=self._options, on_progress=log
        )
        self._lease.__enter__()  # renewed from here on
        return self._pool

    def _leave(self) -> None:
        assert self._pool is not None and self._lease is not None
        try:
            clean_up(self._pool.name, self._pool.holder, reason="its pool_lease ended")
        finally:
            self._lease.__exit__(None, None, None)
