"""`Submissions`: the task runs that are submitted in a block of code, and a wait for their end."""

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
"""The objects that record what the current code submits. Concurrent coroutines of a flow have one value each."""


class Submissions:
    """The task runs that ``.submit`` and ``.map`` start between `begin` and `end`, in a flow or in its tasks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[PrefectFuture[Any]] = set()
        self._interrupted = False

    def begin(self) -> None:
        """Record all task runs that the current code submits from now on."""
        flow = FlowRunContext.get()
        if flow is not None:  # Only code with a flow run can submit tasks.
            _record_submissions_of(flow.task_runner)
            _recording.set((*_recording.get(), self))

    def end(self) -> None:
        """Stop recording."""
        _recording.set(tuple(one for one in _recording.get() if one is not self))

    def add(self, future: PrefectFuture[Any]) -> None:
        """Record a task run.

        Args:
            future: Future of the task run.
        """
        with self._changed:
            self._running.add(future)
        future.add_done_callback(self._discard)

    def wait(self) -> None:
        """Wait until all recorded task runs have ended, successfully or not, or until `interrupt` is called."""
        with self._changed:
            if self._running:
                get_run_logger().info(
                    "pool_lease waits for %d submitted task runs, and releases the pool after them", len(self._running)
                )
            self._changed.wait_for(lambda: self._interrupted or not self._running)

    def interrupt(self) -> None:
        """End the wait. This method may be called from any thread."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def _discard(self, future: PrefectFuture[Any]) -> None:
        with self._changed:
            self._running.discard(future)
            self._changed.notify_all()


def _record_submissions_of(runner: TaskRunner[Any]) -> None:
    """Let a flow run's task runner report each future to the objects that record. Prefect itself keeps no list."""
    if "submit" in vars(runner):
        return
    submit = runner.submit

    def submit_and_record(*args: Any, **kwargs: Any) -> Any:
        future = submit(*args, **kwargs)
        for submissions in _recording.get():
            submissions.add(future)
        return future

    vars(runner)["submit"] = submit_and_record  # `TaskRunner.map` calls it too. Each flow run has its own runner.
