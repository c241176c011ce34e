"""Give names to all points at which a job changes its database row or its files, or starts or ends its driver. The
crash tests kill a process at each named point.

A process may die before, during and after each step. The next submission, or the next clean-up of the host, goes on
from the state in which the process died. The crash tests end a process at every member of `JobStep`, so every new
transaction or action on a job needs a member. The members of `RetentionStep` are the steps that remove old versions of
models and old attempts, that of `StudyStep` is the step of a search for parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from sqlalchemy.exc import DataError, IntegrityError
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_fixed

from shoal.errors import StoreError
from shoal.pool.timeouts import STORE_PATIENCE, STORE_PERIOD
from shoal.state import Store
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
    NOTE_GPU = "note-gpu"
    """Transaction: the driver records whether the job uses GPUs, if its spec leaves this open."""
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
    """Transaction: record that the result was returned to a caller, or that no later caller gets it."""


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

    Raises:
        StoreError: The store could not be used for `STORE_PATIENCE` seconds, or its file was removed.
    """
    retrying = Retrying(
        retry=retry_if_exception(lambda error: _may_pass(error) and store.exists()),
        stop=stop_after_delay(STORE_PATIENCE),
        wait=wait_fixed(STORE_PERIOD),
        before_sleep=_print_first_error,
        reraise=True,
    )
    return retrying(action)


def _may_pass(error: BaseException) -> bool:
    """Return whether a transaction that failed may succeed on a retry; False if the database refused the data."""
    return isinstance(error, StoreError) and not isinstance(error.__cause__, IntegrityError | DataError)


def _print_first_error(state: RetryCallState) -> None:
    if state.attempt_number == 1 and state.outcome is not None:
        print(f"{state.outcome.exception()}; trying again for up to {STORE_PATIENCE:.0f} s", flush=True)
