"""Keep the embedded pools of this process for its next calls, because starting a pool takes seconds."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from shoal.errors import PoolNotFoundError
from shoal.pool.api import ComputePool
from shoal.pool.backends.local.environment import inherited_environment
from shoal.pool.backends.local.gpus import ALL
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import IDLE_TIMEOUT
from shoal.state.home import home
from shoal.state.store import default_url

_Key = tuple[object, ...]

Start = Callable[[PoolSpec, bool], tuple[ComputePool, bool]]
"""Type of a function that starts a pool, or does nothing if the pool is up. The function's arguments are the definition
of the pool, and whether this process starts the pool for the first time. The function returns the pool, and whether
this machine has GPUs that the pool has claimed or could claim."""

_numbers = itertools.count(1)


@dataclass
class _Kept:
    """An embedded pool of this process.

    Attributes:
        spec: Definition of the pool.
        calls: Number of calls that use the pool now.
        pool: The pool; None before it was started.
        may_have_gpus: Whether this machine has GPUs that the pool has claimed or could claim.
        turn: Lock that a call holds while it starts or ends the pool.
    """

    spec: PoolSpec
    calls: int = 0
    pool: ComputePool | None = None
    may_have_gpus: bool = True
    turn: threading.Lock = field(default_factory=threading.Lock)


_kept: dict[_Key, _Kept] = {}
_lock = threading.Lock()


def _forget_parents_pools() -> None:
    """Forget the parent's pools in a forked child, because these pools belong to the parent and end with the parent."""
    global _lock
    _lock = threading.Lock()
    _kept.clear()


os.register_at_fork(after_in_child=_forget_parents_pools)


@contextmanager
def pool_of_process(cpus: int, gpus: int, start: Start, *, ray: bool = True) -> Iterator[str]:
    """Yield the name of an embedded pool of this process. If the process has no pool of the requested size, start one.

    Concurrent calls share a pool, and the pool's queue decides which of their jobs run at the same time. After its last
    call, a pool stays up for the next call until it has been idle for `IDLE_TIMEOUT`, or this process has ended. But
    on a machine with GPUs, a pool that has requested GPUs goes down at once, so that other processes can use the GPUs.

    Raises:
        Exception: The pool could not be started.
    """
    kept, idle = _take(cpus, gpus, ray=ray)
    try:
        for each in idle:
            _end(each)
        with kept.turn:
            kept.pool, kept.may_have_gpus = start(kept.spec, kept.pool is None)
        yield kept.pool.name
    finally:
        with kept.turn:
            with _lock:
                kept.calls -= 1
                is_last = not kept.calls
            if is_last and kept.spec.gpus_per_node and kept.may_have_gpus:
                _end(kept)


def end_embedded_pools() -> None:
    """End the embedded pools of this process, and wait until all their processes are gone.

    Calling this function is optional, because the pools also end with this process.
    """
    with _lock:
        pools = list(_kept.values())
        _kept.clear()
    for each in pools:
        _end(each)


def _take(cpus: int, gpus: int, *, ray: bool) -> tuple[_Kept, list[_Kept]]:
    """Choose the embedded pool for a call, and count the call as a user of this pool. Return the pool, and the idle
    pools that have to be ended before the chosen pool is used."""
    # The processes of a pool inherit the environment of the process that starts the pool. So a pool is not used again
    # after an inherited environment variable has changed.
    place = (str(home()), default_url())
    environment = tuple(sorted(inherited_environment().items()))
    with _lock:
        size = (*place, environment, cpus)
        key, with_ray, with_all = (*size, gpus, ray), (*size, gpus, True), _kept.get((*size, ALL, True))
        if gpus == 0 and with_all is not None and not with_all.may_have_gpus:
            kept = with_all
        elif with_ray in _kept:
            kept = _kept[with_ray]
        elif key in _kept:
            kept = _kept[key]
        else:
            name = f"embedded-{os.getpid()}-{next(_numbers)}"
            kept = _kept[key] = _Kept(
                PoolSpec(
                    name=name,
                    max_nodes=1,
                    cpus_per_node=cpus,
                    gpus_per_node=gpus,
                    ray=ray,
                    idle_timeout=IDLE_TIMEOUT,
                )
            )
        kept.calls += 1
        # End idle pools of other sizes, because they occupy memory and GPUs that the chosen pool may need.
        idle = {other: each for other, each in _kept.items() if not each.calls and other[:2] == place}
        for other in idle:
            del _kept[other]
    return kept, list(idle.values())


def _end(kept: _Kept) -> None:
    # A user may have deleted the pool with `shoal pool delete`.
    with suppress(PoolNotFoundError):
        if kept.pool is not None:
            kept.pool.down()
