"""Build the name of the holder (the owner of leases and jobs) of a flow run: ``prefect:<flow_run_id>``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio
from prefect.context import FlowRunContext, TaskRunContext

ENGINE = "prefect"


def holder_of(flow_run_id: object) -> str:
    """Return the name of the holder to which a flow run's leases and jobs belong: ``prefect:<flow_run_id>``."""
    return f"{ENGINE}:{flow_run_id}"


def current_holder() -> str | None:
    """Return the holder name of the current flow run, or of the current task run if the task has no flow run.

    The result is None if the calling code runs neither in a flow nor in a task.
    """
    task = TaskRunContext.get()
    flow = FlowRunContext.get()
    run = (task and task.task_run.flow_run_id) or (flow and flow.flow_run and flow.flow_run.id)
    if not run and task:
        run = task.task_run.id
    return holder_of(run) if run else None


def task_key() -> str:
    """Return a key that identifies the current task run within its flow run.

    All retries of a task run have the same key, so a retry finds the job of the earlier try. Outside of a task, the
    result is an empty string.
    """
    task = TaskRunContext.get()
    return f"{task.task_run.task_key}/{task.task_run.dynamic_key}" if task else ""


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
