"""Named locks in the store, for actions that two hosts must not take at the same time."""

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
from shoal.state import Store
from shoal.state.schema import Lock
from shoal.state.stamps import shared_now

log = logging.getLogger(__name__)

_POLL_S = 0.2
"""Seconds between two attempts to take a lock; a lock is usually held for about a second."""


_Claim = tuple[str, float]
"""Holder of a lock and its `expires_at`: one of the two changes when the lock is renewed or taken."""


@dataclass(frozen=True)
class HeldLock:
    """A lock that this process has taken; the lock may have expired since, and another process may hold it now.

    Args:
        name: Name of the lock.
        holder: Random id of this acquisition.
        ttl: Seconds after which other processes may take the lock.
        clock: Returns seconds since the epoch.
    """

    name: str
    holder: str
    ttl: float
    clock: Callable[[], float]

    def renew(self, session: Session) -> bool:
        """Renew the lock inside the transaction that depends on the lock.

        Returns:
            False if another process has taken the lock: the transaction must not write then.
        """
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
    """Hold a named lock while the block runs.

    If the process is paused for longer than `ttl`, or its clock is set forward, the block goes on without the lock.
    Before each write, the block must therefore check :meth:`HeldLock.renew`.

    Args:
        store: Store that has the lock's row.
        name: Name of the lock.
        ttl: Seconds after which other processes may take the lock of a dead holder; far more than the block needs.
        patience: Seconds to wait for the lock; several times `ttl`.
        clock: Returns seconds since the epoch.
        monotonic: Returns seconds by a clock that never jumps.
        sleep: Waits for a number of seconds.

    Raises:
        JobError: Other processes held the lock for `patience` seconds.
    """
    held = HeldLock(name, uuid4().hex, ttl, clock)
    began = since = monotonic()
    seen: _Claim | None = None
    while True:
        # A claim unchanged for `ttl` is dead: a live holder would have renewed it. `expires_at` alone is not enough,
        # because a clock that was far ahead may have set it.
        dead = seen if monotonic() - since >= ttl else None
        claim = _take(store, held, dead)
        if claim is None:
            break
        if claim != seen:
            seen, since = claim, monotonic()
        if monotonic() - began > patience:
            raise JobError(f'other processes held the lock "{name}" for {patience:.0f} s: try again later')
        sleep(_POLL_S)
    try:
        yield held
    finally:
        _release(store, held)


def _take(store: Store, held: HeldLock, dead: _Claim | None) -> _Claim | None:
    """Take the lock if it is free, has expired or has the claim `dead`; otherwise return the present claim."""
    with transaction(store, JobStep.LOCK) as session:
        now = shared_now(session, held.clock())
        lock = session.get(Lock, held.name)
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
    except StoreError as error:  # the lock expires by itself, and the work under it is complete
        log.warning("the lock %s could not be released: %s", held.name, error)
