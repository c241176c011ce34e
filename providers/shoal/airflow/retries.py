"""Prevent retries of tasks after permanent errors, such as a wrong argument. Every retry would fail with the same
error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from airflow.sdk.exceptions import AirflowFailException

from shoal.airflow.results import store_cause
from shoal.errors import ShoalError

try:
    from airflow.sdk import RetryPolicy
except ImportError:  # Airflow before 3.3 has no retry policies.
    RetryPolicy = object  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from airflow.sdk import RetryDecision
    from airflow.sdk.definitions.context import Context


@contextmanager
def no_retry_of_permanent_errors() -> Iterator[None]:
    """Fail the task without a retry if the ``with`` block or the decorated method raises a permanent error.

    Permanent errors are a wrong argument, wrong data, and a request for more than the pool has. All other errors are
    raised unchanged, such as a lost worker, a pool that is down, or resources that did not become free in time. Any
    error of shoal is stored as an XCom, for messages and for `training_results`.

    :raises AirflowFailException: The error is permanent. The original error is the cause.
    """
    try:
        yield
    except (ShoalError, AirflowFailException) as error:
        store_cause(str(error))
        if isinstance(error, ShoalError) and error.permanent:
            raise AirflowFailException(str(error)) from error
        raise


class FailOnPermanentErrors(RetryPolicy):
    """Retry policy for your own tasks that call shoal: a permanent error fails the task at once.

    shoal's own operators do not need this policy. The policy needs Airflow 3.3 or later: ``@task(retries=3,
    retry_policy=FailOnPermanentErrors())``.
    """

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        """Decide whether the task is retried.

        :param exception: The error of the task.
        :param try_number: Number of the try, from 1.
        :param max_tries: Largest number of tries.
        :param context: Airflow's context of the task.
        """
        from airflow.sdk import RetryDecision

        if isinstance(exception, ShoalError) and exception.permanent:
            return RetryDecision.fail(f"a retry would fail in the same way: {exception}")
        return RetryDecision.default()
