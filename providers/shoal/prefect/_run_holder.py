"""Name the holder (the owner of leases and jobs) of a flow run, ``prefect:<flow_run_id>``, and its ancestors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import NamedTuple, TypeVar

import anyio
from prefect.context import FlowRunContext, TaskRunContext

from shoal.prefect._open_blocks import open_blocks
from shoal.prefect.scope import current_scope

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
    found = {block.holder: True for block in open_blocks()} | ({run: True} if run else {})
    is_in_process = True
    for caller, called in reversed(list(pairwise(scope.runs if scope else ()))):
        is_in_process = is_in_process and called.deployment_id is None
        found[holder_of(caller.id)] = is_in_process
    return found


def lease_holder(pool: str) -> str | None:
    """Return the holder of the lease on a pool around the current code. Without such a lease, return the current
    holder."""
    held = [block.holder for block in open_blocks() if block.pool == pool]
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


class TimeLimit(NamedTuple):
    """The timeout of a task run or flow run: `what` has it, when it `ends`, and its length in `seconds`."""

    what: str
    ends: float
    seconds: float


def time_limits() -> list[TimeLimit]:
    """Return the timeouts of the current task run and flow run."""
    task, flow = TaskRunContext.get(), FlowRunContext.get()
    limits = []
    for what, context, seconds in (
        ("task", task, task and task.task.timeout_seconds),
        ("flow", flow, flow and flow.flow and flow.flow.timeout_seconds),
    ):
        if context is not None and seconds:
            limits.append(TimeLimit(what, context.start_time.timestamp() + seconds, seconds))
    return limits


def why_ended(limits: Sequence[TimeLimit]) -> str:
    """Return why Prefect ends a run. Prefect raises the same exception for a timeout and for a cancellation, so the
    time decides."""
    now = time.time()
    for limit in limits:
        if now >= limit.ends:
            return f"its Prefect {limit.what} has exceeded its timeout of {limit.seconds:g} s"
    return "its Prefect run was cancelled"
