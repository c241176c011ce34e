"""A named lock in the store, for what must not happen twice at once on any host."""

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
"""Between looks at a lock that another holds; what is done under one takes about a second."""


_Claim = tuple[str, float]
"""Holder of a lock and `expires_at`: one of them changes when the lock is renewed or taken."""


@dataclass(frozen=True)
class HeldLock:
    """A lock as its holder knows it; it may have expired and be another's by now.

    Args:
        name: What is locked.
        holder: This holder, and no other time of holding it.
        ttl: Seconds after which others may take it.
        clock: Seconds since the epoch.
    """

    name: str
    holder: str
    ttl: float
    clock: Callable[[], float]

    def renew(self, session: Session) -> bool:
        """Prolong the lock, in the transaction that relies on it.

        Returns:
            False when another has taken it: the transaction must not write.
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
    """Hold a named lock for the block.

    A holder that is paused for longer than `ttl`, or whose clock is set ahead, goes on without the lock: what must not
    happen then asks :meth:`HeldLock.renew` first.

    Args:
        store: Where the lock's row is kept.
        name: What is locked.
        ttl: Seconds after which others may take it from a holder that died; far more than the block takes.
        patience: Seconds to wait for another holder, several times its `ttl`.
        clock: Seconds since the epoch.
        monotonic: Seconds by a clock that never jumps.
        sleep: How to wait.

    Raises:
        JobError: Another held it all the while.
    """
    held = HeldLock(name, uuid4().hex, ttl, clock)
    began = since = monotonic()
    seen: _Claim | None = None
    while True:
        # A live holder would have renewed it. Its end may never come: it is a time by a clock that was ahead.
        dead = seen if monotonic() - since >= ttl else None
        claim = _take(store, held, dead)
        if claim is None:
            break
        if claim != seen:
            seen, since = claim, monotonic()
        if monotonic() - began > patience:
            raise JobError(f'the lock "{name}" was held by others for {patience:.0f} s: try again')
        sleep(_POLL_S)
    try:
        yield held
    finally:
        _release(store, held)


def _take(store: Store, held: HeldLock, dead: _Claim | None) -> _Claim | None:
    """Take the lock if it is free, has expired or is held by `dead`; otherwise return the claim that keeps it."""
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
    except StoreError as error:  # it expires by itself; what was done under it counts
        log.warning("the lock %s could not be released: %s", held.name, error)
