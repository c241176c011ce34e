"""`pool_lease`: a pool of some size for the duration of a block of code, and as it was before afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from prefect.exceptions import MissingContextError

from shoal.errors import PoolDownError, PoolNotFoundError
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

    At its beginning: brings the pool up if `pool_name` defines it (URI or block) and it is down, leases the nodes, and
    waits for them; nothing is left if they do not come. Meanwhile the lease is renewed. At its end, come what may:
    cancels jobs of this flow run that still run, releases the lease, ends what nobody owns, and takes the pool down
    again if it was brought up here and nobody else wants anything of it.

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
        self._brought_up = False

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
        try:
            if defines(self._source) and _is_down(self._pool):
                self._brought_up = True  # before it is: an interrupt half-way has something to take back
                self._pool.up(on_progress=log)
            self._lease = self._pool.lease(self._size, ttl=self._ttl, options=self._options, on_progress=log)
        except BaseException:
            self._leave()
            raise
        self._lease.__enter__()  # renewed from here on
        return self._pool

    def _leave(self) -> None:
        assert self._pool is not None
        try:
            if self._lease is not None:
                self._lease.__exit__(None, None, None)
        finally:
            clean_up(self._pool.name, self._pool.holder, reason="its pool_lease ended")
            if self._brought_up and not _is_wanted(self._pool):
                self._pool.down()


def _is_down(pool: ComputePool) -> bool:
    try:
        return pool.describe().state == "down"
    except PoolNotFoundError:
        return True


def _is_wanted(pool: ComputePool) -> bool:
    """Whether somebody else has a lease, or has set a base demand."""
    try:
        status = pool.describe()
    except (PoolNotFoundError, PoolDownError):
        return False
    return bool(status.leases) or status.target > status.min_nodes
