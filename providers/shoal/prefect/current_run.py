"""Describe the run around the current code: its holder (the owner of leases and jobs, ``prefect:<flow_run_id>``), the
flow runs and blocks of `pool_lease` around it, its timeouts, and its cancellation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, TypeVar
from uuid import uuid4

import anyio
from prefect import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import ObjectNotFound
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.settings import get_current_settings

from shoal.jobs import FlowTask
from shoal.pool.holder import Ancestors

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
        if flow is not None and "submit" not in vars(flow.task_runner):  # Only code in a flow run can submit tasks.
            # Prefect keeps no list of submitted task runs. `TaskRunner.map` calls `submit`, so mapped task runs are
            # recorded, too. Each flow run has its own runner, so other flow runs are not affected.
            submit = flow.task_runner.submit

            def submit_and_record(*args: Any, **kwargs: Any) -> Any:
                future = submit(*args, **kwargs)
                for block in _open.get():
                    block.submissions.add(future)
                return future

            vars(flow.task_runner)["submit"] = submit_and_record
        _open.set((*_open.get(), self))

    def end(self) -> None:
        """Close the block: the code that follows does not run inside it. `submissions` keeps its task runs."""
        _open.set(tuple(block for block in _open.get() if block is not self))

    def free_name(self) -> None:
        """Let another block have the name of this block. Call this method after the block's lease was released."""
        with _names_lock:
            _names.discard(self.holder)


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


@dataclass(frozen=True)
class Scope:
    """The current flow run, and the runs that have called it.

    Attributes:
        runs: The flow runs, from the root to the current one. A run after the first that has a `deployment_id` was
            started with ``run_deployment``; the other runs after the first are subflows in the process of their caller.
        subflows: Name of each run after the first within the run before it: key and dynamic key of the task run with
            which Prefect records the call of a subflow. Unlike the id of a subflow's run, the name stays the same if a
            caller is retried. A subflow that a task calls has a new name in each try.
    """

    runs: tuple[FlowRun, ...]
    subflows: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return a text that identifies the current run in all tries of the root run."""
        return "/".join((str(self.runs[0].id), *self.subflows))


def current_scope() -> Scope | None:
    """Return the scope of the current code; None outside of a flow.

    Only for subflows, the function asks the Prefect server.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return None
    runs, subflows = [context.flow_run], list[str]()
    if runs[0].parent_task_run_id is not None:
        with get_client(sync_client=True) as client, suppress(ObjectNotFound):  # a user may have deleted a caller's run
            while runs[0].parent_task_run_id is not None:
                call = client.read_task_run(runs[0].parent_task_run_id)
                if call.flow_run_id is None:  # A task outside of flows has called the subflow, which is the root.
                    break
                runs.insert(0, client.read_flow_run(call.flow_run_id))
                subflows.insert(0, f"{call.task_key}/{call.dynamic_key}")
    return Scope(tuple(runs), tuple(subflows))


def current_flow_task(holder: str, ancestors: Ancestors, digest: str | None) -> FlowTask:
    """Describe the current task run, so that it finds the job that an equal task run has submitted in an earlier try of
    the flow run."""
    scope, context = current_scope(), TaskRunContext.get()
    run = str(context.task_run.id if context else uuid4())
    # Outside of a flow, only retries of the task run find its job. In a flow, each try has another state: `run_count`
    # does not change if a flow run is resumed, and processes of a task runner have other start times.
    key, flow_try = (scope.name, str(scope.runs[-1].state_id)) if scope else (run, run)
    refresh = context.task.refresh_cache if context else None
    anew = get_current_settings().tasks.refresh_cache if refresh is None else refresh
    return FlowTask(key, holder, flow_try, run, ancestors, digest, anew, _task_name())


def _task_name() -> str | None:
    """Return the name of the current flow and of the current task, such as ``retrain.distributed_train``. The name of
    the task run is not used, because it may differ from one flow run to the next."""
    flow, context = FlowRunContext.get(), TaskRunContext.get()
    names = [flow.flow.name] if flow is not None and flow.flow is not None else []
    if context is not None:
        names.append(context.task.name)
    return ".".join(names) or None


ENGINE = "prefect"


def holder_of(flow_run_id: object) -> str:
    """Return the name of the holder to which a flow run's leases and jobs belong: ``prefect:<flow_run_id>``."""
    return f"{ENGINE}:{flow_run_id}"


def current_holder() -> str | None:
    """Return the holder name of the current flow run, or of the current task run if the task has no flow run.

    The result is None if the calling code runs neither in a flow nor in a task.
    """
    flow = FlowRunContext.get()
    # In a flow that a task calls, the context of this task is still set.
    if flow is not None and flow.flow_run is not None:
        return holder_of(flow.flow_run.id)
    task = TaskRunContext.get()
    return holder_of(task.task_run.flow_run_id or task.task_run.id) if task is not None else None


def ancestors() -> dict[str, bool]:
    """Return the holders whose end is also the end of a job or lease that the current code requests
    (`shoal.pool.holder.Ancestors`).

    In a subflow, the function asks the Prefect server for the runs that have called it.
    """
    run, scope = current_holder(), current_scope()
    found = {block.holder: True for block in _open.get()} | ({run: True} if run else {})
    is_in_process = True
    for caller, called in reversed(list(pairwise(scope.runs if scope else ()))):
        is_in_process = is_in_process and called.deployment_id is None
        found[holder_of(caller.id)] = is_in_process
    return found


def lease_holder(pool: str) -> str | None:
    """Return the holder of the lease on a pool around the current code. Without such a lease, return the current
    holder."""
    held = [block.holder for block in _open.get() if block.pool == pool]
    return held[-1] if held else current_holder()


T = TypeVar("T")


async def in_thread(call: Callable[[], T], interrupt: Callable[[], object] | None = None) -> T:
    """Run the function `call` in a thread, and return the result of the function.

    If the async task is cancelled, this function calls `interrupt` and waits until `call` has ended. Otherwise `call`
    would go on in its thread after the task has ended.
    """
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        with anyio.CancelScope(shield=True):
            if interrupt is not None:
                await asyncio.to_thread(interrupt)
            await asyncio.wait([running])
        if not running.cancelled():
            # Read the exception that `call` may have raised, because asyncio logs a warning about an exception that is
            # never read.
            running.exception()
        raise


class Interrupt:
    """End the call of an async task in its thread when the task is cancelled. Any thread may use this object."""

    def __init__(self) -> None:
        self.is_requested = False
        self._callbacks: list[Callable[[], object]] = []

    def add(self, callback: Callable[[], object]) -> None:
        """Add a function that ends a part of the call. If the task is cancelled already, call the function at once."""
        self._callbacks.append(callback)
        if self.is_requested:
            callback()

    def request(self) -> None:
        """Call all functions that were added. A function may be called twice."""
        self.is_requested = True
        for callback in list(self._callbacks):
            callback()


interrupt_of_task: ContextVar[Interrupt | None] = ContextVar("interrupt_of_task", default=None)
"""The interrupt of the current async task of `twin`; None elsewhere."""


def on_interrupt(callback: Callable[[], object]) -> None:
    """Call a function when the current async task is cancelled."""
    if (interrupt := interrupt_of_task.get()) is not None:
        interrupt.add(callback)


def time_limits() -> dict[str, float]:
    """Return when the timeouts of the current task run and flow run end, by the reason that they give for its end."""
    task, flow = TaskRunContext.get(), FlowRunContext.get()
    limits = {}
    for what, context, seconds in (
        ("task", task, task and task.task.timeout_seconds),
        ("flow", flow, flow and flow.flow and flow.flow.timeout_seconds),
    ):
        if context is not None and seconds:
            reason = f"its Prefect {what} has exceeded its timeout of {seconds:g} s"
            limits[reason] = context.start_time.timestamp() + seconds
    return limits


def why_ended(limits: Mapping[str, float]) -> str:
    """Return why Prefect ends a run. Prefect raises the same exception for a timeout and for a cancellation, so the
    time decides."""
    return next((reason for reason, ends in limits.items() if time.time() >= ends), "its Prefect run was cancelled")
