"""Retry store transactions whose failure would lose the result of a finished training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.exc import DataError, IntegrityError
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_fixed

from shoal.errors import StoreError
from shoal.pool.timeouts import STORE_PATIENCE, STORE_PERIOD
from shoal.state import Store

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
