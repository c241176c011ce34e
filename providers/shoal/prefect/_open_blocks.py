"""Blocks of `pool_lease` around the current code: their names as holders, and the task runs for which they wait."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger

if TYPE_CHECKING:
    from prefect.futures import PrefectFuture
    from prefect.task_runners import TaskRunner

_open: ContextVar[tuple[Block, ...]] = ContextVar("_open", default=())
"""The blocks around the current code, the innermost last. Each coroutine of a flow has its own value, and threads of
tasks get a copy, so that concurrent coroutines and tasks have their own blocks. Tasks in other processes have none."""

_names: set[str] = set()
"""Holders of the blocks that are open in this process."""

_names_lock = threading.Lock()


class Block:
    """One block of `pool_lease`, which holds a lease of its own.

    Attributes:
        holder: Name of the block as holder, ``prefect:<flow_run_id>/<block>``. A retry after a killed process opens its
            blocks with the same names, and so takes over their leases.
        pool: Name of the pool. None before the lease was requested.
        submissions: Task runs that were started inside the block.
    """

    def __init__(self, run: str) -> None:
        task = TaskRunContext.get()
        # The id of the task run tells apart the blocks of tasks that run in different processes.
        prefix = f"{run}/{task.task_run.id.hex[-12:]}-" if task is not None else f"{run}/"
        with _names_lock:
            self.holder = next(name for number in count(1) if (name := f"{prefix}{number}") not in _names)
            _names.add(self.holder)
        self.pool: str | None = None
        self.submissions = Submissions()

    def begin(self) -> None:
        """Open the block: the code that follows runs inside it, until `end` is called."""
        flow = FlowRunContext.get()
        if flow is not None:  # Only code in a flow run can submit tasks.
            _record_submissions_of(flow.task_runner)
        _open.set((*_open.get(), self))

    def end(self) -> None:
        """Close the block: the code that follows does not run inside it. `submissions` keeps its task runs."""
        _open.set(tuple(block for block in _open.get() if block is not self))

    def free_name(self) -> None:
        """Let another block have the name of this block. Call this method after the block's lease was released."""
        with _names_lock:
            _names.discard(self.holder)


def open_blocks() -> tuple[Block, ...]:
    """Return the blocks around the current code, the innermost last."""
    return _open.get()


class Submissions:
    """Record of the task runs that a flow or its tasks have started inside a block with ``.submit`` or ``.map``."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[PrefectFuture[Any]] = set()
        self._interrupted = False

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

    The replacement is needed because Prefect keeps no list of submitted task runs. Each future is passed to all blocks
    around the call.
    """
    if "submit" in vars(runner):
        return
    submit = runner.submit

    def submit_and_record(*args: Any, **kwargs: Any) -> Any:
        future = submit(*args, **kwargs)
        for block in _open.get():
            block.submissions.add(future)
        return future

    # `TaskRunner.map` calls `submit`, so mapped task runs are recorded, too. Each flow run has its own runner, so other
    # flow runs are not affected.
    vars(runner)["submit"] = submit_and_record
