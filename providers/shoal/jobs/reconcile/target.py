"""The attempt that a process reconciles, and the means to do it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from shoal.jobs.journal.attempts import Key
from shoal.os_processes import ProcessId, sleep_until_end
from shoal.pool.endpoint import Endpoint
from shoal.state import Store


@dataclass(frozen=True)
class Target:
    """The attempt that a process reconciles, and the means to do it.

    Attributes:
        store: Store that has the attempt's row.
        key: The attempt.
        pool: Name of the attempt's pool.
        actor: Name of the holder to record if this process ends the attempt. None: this process.
        find_endpoint: Function that finds the head of a pool. None: `pool_endpoint`.
        clock: Function that returns the present time in seconds since the epoch.
        monotonic: Function that returns the seconds of a clock that never jumps.
        sleep: Function that waits for a given number of seconds, or until the given process has ended.
    """

    store: Store
    key: Key
    pool: str
    _: KW_ONLY
    actor: str | None = None
    find_endpoint: Callable[[str], Endpoint] | None = None
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float, ProcessId | None], None] = sleep_until_end

    def endpoint_of(self, pool: str) -> Endpoint:
        """Return the endpoint of a pool's head; see `pool_endpoint` for the errors."""
        return self.find_endpoint(pool) if self.find_endpoint else pool_endpoint(pool, self.store)


def pool_endpoint(name: str, store: Store | None = None) -> Endpoint:
    """Return the endpoint (addresses and token) of a pool's head.

    Raises:
        PoolNotFoundError: There is no such pool.
        PoolElsewhereError: The pool is bound to another machine.
        PoolDownError: The pool is down, or its head is being replaced.
    """
    from shoal.pool.api import ComputePool

    return ComputePool(name, store=store, is_named=False).endpoint()
