"""Record the task runs that a block of code submits, and wait until these task runs have ended."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from prefect.context import FlowRunContext
from prefect.logging import get_run_logger

if TYPE_CHECKING:
    from prefect.futures import PrefectFuture
    from prefect.task_runners import TaskRunner

_recording: ContextVar[tuple[Submissions, ...]] = ContextVar("_recording", default=())
"""The `Submissions` objects that record the task runs of the current code. Each coroutine of a flow has its own value,
so that concurrent coroutines do not record each other's task runs."""


class Submissions:
    """Record of the task runs that a flow or its tasks start with ``.submit`` or ``.map`` between `begin` and `end`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[PrefectFuture[Any]] = set()
        self._interrupted = False

    def begin(self) -> None:
        """Start recording the task runs that the current flow or task submits. Call `end` to stop the recording."""
        flow = FlowRunContext.get()
        if flow is not None:  # Only code in a flow run can submit tasks.
            _record_submissions_of(flow.task_runner)
            _recording.set((*_recording.get(), self))

    def end(self) -> None:
        """Stop recording. The task runs that are already recorded stay recorded, so that `wait` waits for them."""
        _recording.set(tuple(one for one in _recording.get() if one is not self))

    def add(self, future: PrefectFuture[Any]) -> None:
        """Record a task run."""
        with self._changed:
            self._running.add(future)
        future.add_done_callback(self._discard)

    def wait(self) -> None:
        """Wait until all recorded task runs have ended, successfully or not, or until `interrupt` is called."""
        with self._changed:
            if self._running:
                get_run_logger().info(
                    "pool_lease waits for %d submitted task runs before it releases the nodes", len(self._running)
                )
            self._changed.wait_for(lambda: self._interrupted or not self._running)

    def interrupt(self) -> None:
        """Make `wait` return even if task runs have not ended. This method may be called from any thread."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def _discard(self, future: PrefectFuture[Any]) -> None:
        with self._changed:
            self._running.discard(future)
            self._changed.notify_all()


def _record_submissions_of(runner: TaskRunner[Any]) -> None:
    """Replace the method `submit` of a flow run's task runner by a method that also records each future.

    The replacement is needed because Prefect keeps no list of submitted task runs. Each future is passed to all objects
    in `_recording`.
    """
    if "submit" in vars(runner):
        return
    submit = runner.submit

    def submit_and_record(*args: Any, **kwargs: Any) -> Any:
        future = submit(*args, **kwargs)
        for submissions in _recording.get():
            submissions.add(future)
        return future

    # `TaskRunner.map` calls `submit`, so mapped task runs are recorded, too. Each flow run has its own runner, so other
    # flow runs are not affected.
    vars(runner)["submit"] = submit_and_record
