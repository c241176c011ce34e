"""Take and release named locks in the store, for actions that two hosts must not do at the same time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from sqlalchemy.orm import Session

from shoal.errors import JobError, StoreError
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.jobs.timeouts import LOCK_PERIOD_S
from shoal.own_pauses import waited_since
from shoal.state import Store
from shoal.state.schema import Lock
from shoal.state.stamps import shared_now

log = logging.getLogger(__name__)


_Claim = tuple[str, float]
"""A lock's holder and its `expires_at`; one of them changes whenever the lock is taken or renewed."""


@dataclass(frozen=True)
class HeldLock:
    """A lock that this process has taken. If the lock has expired in the meantime, another process may hold the lock
    now.

    Args:
        name: Name of the lock.
        holder: Random id that this process wrote into the lock when it took the lock.
        ttl: Seconds after the last renewal after which another process may take the lock.
        clock: Function that returns the present time in seconds since the epoch.
    """

    name: str
    holder: str
    ttl: float
    clock: Callable[[], float]

    def renew(self, session: Session) -> bool:
        """Renew the lock inside the transaction whose writes the lock protects."""
        lock = session.get(Lock, self.name, with_for_update=True)
        if lock is None or lock.holder != self.holder:
            return False
        lock.expires_at = shared_now(session, self.clock()) + self.ttl
        return True


@contextmanager
def store_lock(
    store: Store,
    name: str,
    ttl: float,
    *,
    patience: float = 300.0,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[HeldLock]:
    """Hold a named lock while the `with` block runs.

    If the process is paused for longer than `ttl`, or its clock is set forward, another process may take the lock while
    the block still runs. Therefore the block must call :meth:`HeldLock.renew` before each write, and must not write if
    the result is False.

    Raises:
        JobError: Other processes held the lock for `patience` seconds.
    """
    held = HeldLock(name, uuid4().hex, ttl, clock)
    began = since = monotonic()
    seen: _Claim | None = None
    while True:
        # If the lock's holder and `expires_at` have not changed for `ttl` seconds, the holder is dead, because a live
        # holder would have renewed the lock. A check of `expires_at` alone is not enough, because a host whose clock
        # was far ahead may have set `expires_at` to a time in the far future.
        dead = seen if waited_since(since, monotonic()) >= ttl else None
        claim = _take(store, held, dead)
        if claim is None:
            break
        if claim != seen:
            seen, since = claim, monotonic()
        if monotonic() - began > patience:
            raise JobError(f'other processes held the lock "{name}" for {patience:.0f} s: try again later')
        sleep(LOCK_PERIOD_S)
    try:
        yield held
    finally:
        _release(store, held)


def _take(store: Store, held: HeldLock, dead: _Claim | None) -> _Claim | None:
    """Take the lock if no process holds it, if it has expired, or if its holder is known to be dead."""
    with transaction(store, JobStep.LOCK) as session:
        lock = session.get(Lock, held.name)
        # The time is read after `get`, because `get` may wait for other writers.
        now = shared_now(session, held.clock())
        if lock is None:
            session.add(Lock(name=held.name, holder=held.holder, expires_at=now + held.ttl))
            return None
        claim = (lock.holder, lock.expires_at)
        if lock.expires_at > now and claim != dead:
            return claim
        lock.holder, lock.expires_at = held.holder, now + held.ttl
        return None


def _release(store: Store, held: HeldLock) -> None:
    try:
        with transaction(store, JobStep.UNLOCK) as session:
            lock = session.get(Lock, held.name)
            if lock is not None and lock.holder == held.holder:
                session.delete(lock)
    except StoreError as error:
        # The error is only logged, because the work under the lock is complete and the lock expires by itself.
        log.warning("the lock %s could not be released: %s", held.name, error)
