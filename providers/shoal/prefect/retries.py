"""Prevent retries of task runs after permanent errors, such as a wrong argument. Every retry would fail with the same
error."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar
from uuid import UUID
from weakref import WeakKeyDictionary

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.states import Failed
from prefect.utilities.asyncutils import run_coro_as_sync

from shoal.errors import JobCancelledError, ShoalError

P = ParamSpec("P")
T = TypeVar("T")

_logged: WeakKeyDictionary[ShoalError, UUID] = WeakKeyDictionary()
"""The task runs in whose log an error's refused retry is. Without it the reason would appear twice there, because
besides Prefect, `is_retried` calls the condition."""


# This must be a plain function: Prefect 3.7 and 3.8 never retry a task whose condition is another callable object.
def retry_unless_permanent(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Decide whether Prefect retries a task run, and log the reason if not: a permanent error is not retried.

    Permanent errors are a wrong argument, wrong data, a request for more than the pool has, and a job that a user has
    cancelled. All other errors are retried, such as a lost worker, or a pool that is down. Each task of `shoal.prefect`
    has this function as its ``retry_condition_fn``. Use it for your own tasks that call shoal, too, and call it in a
    condition of your own.

    Args:
        task: The task.
        task_run: Run of the task.
        state: Failed state of the run. Its data is the error.

    Returns:
        Whether the task run is retried.

    Example:
        >>> @task(retries=2, retry_condition_fn=retry_unless_permanent)
        ... def train():
        ...     return estimator.fit(dataset)
    """
    error = state.data
    if not isinstance(error, ShoalError) or not error.permanent:
        return True
    if _logged.get(error) != task_run.id:
        _logged[error] = task_run.id
        cancelled = isinstance(error, JobCancelledError)
        why = "a user has cancelled the job" if cancelled else "a retry would fail in the same way"
        get_run_logger().warning("the task is not retried, because %s: %s", why, error)
    return False


def job_task(function: Callable[P, T], *, run_name: str | Callable[..., str] | None = None) -> Task[P, T]:
    """Create a Prefect task whose results are not cached, and that is not retried after a permanent error.

    Args:
        function: The task's function.
        run_name: Function that returns the name of a task run from its arguments. None: Prefect makes the names.
    """
    return task(cache_policy=NO_CACHE, retry_condition_fn=retry_unless_permanent, task_run_name=run_name)(function)


def is_retried(error: Exception) -> bool:
    """Return whether Prefect will retry the current task run after an error; False outside of a task."""
    run = TaskRunContext.get()
    if run is None or run.task_run.run_count > run.task.retries:
        return False
    condition: Any = run.task.retry_condition_fn
    try:
        answer = condition(run.task, run.task_run, Failed(data=error)) if condition else True
        return bool(run_coro_as_sync(answer) if inspect.iscoroutine(answer) else answer)
    except Exception:  # Prefect logs the error of a condition, and does not retry the task.
        return False
