"""Give names to all points at which a job changes its database row or its files, or starts or ends its driver. The
crash tests kill a process at each named point. Named locks in the store stand here, too.

A process may die before, during and after each step. The next submission, or the next clean-up of the host, goes on
from the state in which the process died. The crash tests end a process at every member of `JobStep`, so every new
transaction or action on a job needs a member. The members of `RetentionStep` are the steps that remove old versions of
models and old attempts, that of `StudyStep` is the step of a search for parameters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar
from uuid import uuid4

from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.orm import Session
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_fixed

from shoal.errors import JobError, StoreError
from shoal.jobs.timeouts import LOCK_PERIOD_S
from shoal.own_pauses import waited_since
from shoal.pool.timeouts import STORE_PATIENCE, STORE_PERIOD
from shoal.state import Store
from shoal.state.schema import Lock
from shoal.state.stamps import shared_now
from shoal.state.store import At, act, transaction

__all__ = ["At", "JobStep", "RetentionStep", "StudyStep", "act", "transaction"]


class JobStep(StrEnum):
    """Names of the steps of a job, in the order in which they happen. The crash tests end a process at each step."""

    ASK = "ask"
    """Transaction: find an existing attempt of the same job, or add the row of a new attempt."""
    HAND_OVER = "hand-over"
    """Action: write the credentials into a file; on `ray://` pools, transaction: write them encrypted into the row."""
    ADMIT = "admit"
    """Transaction: put the attempt into its pool's queue, admit it if there is room, or put it back."""
    SEND = "send"
    """Action: the submitter sends the attempt to the pool's head, which starts the driver."""
    TOUCH = "touch"
    """Transaction: update `last_polled_at` of the attempt."""
    START = "start"
    """Transaction: the driver records that the attempt runs."""
    TAKE = "take"
    """Action: read and delete the file of credentials; on `ray://` pools, transaction: ask for them."""
    BEAT = "beat"
    """Transaction: the driver records its heartbeat, its progress and its metrics, every few seconds."""
    NOTE_RUN = "note-run"
    """Transaction: the driver records the MLflow run of the attempt."""
    NOTE_CHOICE = "note-choice"
    """Transaction: the driver records whether the job uses GPUs, and which versions of tables it reads, if its spec
    leaves this open."""
    FREE = "free"
    """Transaction: the driver records that the training is over and the attempt needs no room for workers any more."""
    PUBLISH = "publish"
    """Action: the driver writes the files of the training's result."""
    NOTE_SAVED = "note-saved"
    """Transaction: the driver records that the training is saved, so that the next attempt need not train again."""
    LOCK = "lock"
    """Transaction: take a named lock."""
    SETTLE = "settle"
    """Transaction, while the lock of an alias is held: complete the record of a promotion whose process was killed."""
    INTEND = "intend"
    """Transaction, while the lock of an alias is held: record a promotion, or its withdrawal, before the model's alias
    is moved."""
    PROMOTE = "promote"
    """Action, while the lock of an alias is held: move the alias in MLflow to the version that won the comparison, or
    back to the version that had it before."""
    CONFIRM = "confirm"
    """Transaction, while the lock of an alias is held: record that the alias was moved."""
    UNLOCK = "unlock"
    """Transaction: release a named lock."""
    END = "end"
    """Transaction: record the end of the attempt, with its result or error."""
    STOP = "stop"
    """Action: ask the head to stop the driver."""
    TIDY = "tidy"
    """Action: remove files that are not needed any more, such as staged data and credentials."""
    COLLECT = "collect"
    """Transaction: record that the result was returned to a caller, that no later caller gets it, or that a user has
    dismissed the failure."""


class RetentionStep(StrEnum):
    """Names of the steps that remove old versions of models and old attempts. Crash tests can end a process at each
    step."""

    CHECK = "check"
    """Transaction, while the locks of a model's aliases are held: check that a version is not needed."""
    DELETE_LOGGED_MODEL = "delete-logged-model"
    """Action, while the locks of a model's aliases are held: delete the logged model of a version in MLflow."""
    DELETE_VERSION = "delete-version"
    """Action, while the locks of a model's aliases are held: delete a version in MLflow."""
    REMOVE_FILES = "remove-files"
    """Action: remove the files of a job's old attempts."""
    REMOVE_ROWS = "remove-rows"
    """Transaction: remove the rows of a job's old attempts."""


class StudyStep(StrEnum):
    """Name of the step of a search for parameters, at which its own crash tests end the driver."""

    APPEND = "append"
    """Transaction: the driver adds entries to the journal of the study."""


T = TypeVar("T")


def patiently(store: Store, action: Callable[[], T]) -> T:
    """Call a function. While the store cannot be used, repeat the call for up to `STORE_PATIENCE` seconds.

    The nodes of a pool also wait for `STORE_PATIENCE` seconds if the store cannot be used.
    """

    def may_pass(error: BaseException) -> bool:
        # If the database refused the data, it refuses them again.
        is_refused = isinstance(error.__cause__, IntegrityError | DataError)
        return isinstance(error, StoreError) and not is_refused and store.exists()

    retrying = Retrying(
        retry=retry_if_exception(may_pass),
        stop=stop_after_delay(STORE_PATIENCE),
        wait=wait_fixed(STORE_PERIOD),
        before_sleep=_print_first_error,
        reraise=True,
    )
    return retrying(action)


def _print_first_error(state: RetryCallState) -> None:
    if state.attempt_number == 1 and state.outcome is not None:
        print(f"{state.outcome.exception()}; trying again for up to {STORE_PATIENCE:.0f} s", flush=True)


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
        try:
            with transaction(store, JobStep.UNLOCK) as session:
                lock = session.get(Lock, name)
                if lock is not None and lock.holder == held.holder:
                    session.delete(lock)
        except StoreError as error:
            # The error is only logged, because the work under the lock is complete and the lock expires by itself.
            log.warning("the lock %s could not be released: %s", name, error)


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
