"""A named lock in the store, for what must not happen twice at once on any host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

from shoal.errors import JobError
from shoal.jobs.steps import JobStep, transaction
from shoal.state import Store
from shoal.state.schema import Lock

_POLL_S = 0.2
"""Between looks at a lock that another holds; what is done under one takes about a second."""


@contextmanager
def store_lock(
    store: Store,
    name: str,
    ttl: float,
    *,
    patience: float = 300.0,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold a named lock for the block.

    Args:
        store: Where the lock's row is kept.
        name: What is locked.
        ttl: Seconds after which others may take it from a holder that died; far more than the block takes.
        patience: Seconds to wait for another holder, several times its `ttl`.
        clock: Seconds since the epoch.
        sleep: How to wait.

    Raises:
        JobError: Another held it all the while.
    """
    holder = uuid4().hex
    until = clock() + patience
    while not _take(store, name, holder, ttl, clock()):
        if clock() > until:
            raise JobError(f'the lock "{name}" was held by others for {patience:.0f} s: try again')
        sleep(_POLL_S)
    try:
        yield
    finally:
        with transaction(store, JobStep.UNLOCK) as session:
            lock = session.get(Lock, name)
            if lock is not None and lock.holder == holder:
                session.delete(lock)


def _take(store: Store, name: str, holder: str, ttl: float, now: float) -> bool:
    with transaction(store, JobStep.LOCK) as session:
        lock = session.get(Lock, name)
        if lock is None:
            session.add(Lock(name=name, holder=holder, expires_at=now + ttl))
            return True
        if lock.expires_at > now:
            return False
        lock.holder, lock.expires_at = holder, now + ttl
        return True
