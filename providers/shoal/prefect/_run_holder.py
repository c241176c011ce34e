"""Build the name of the holder (the owner of leases and jobs) of a flow run: ``prefect:<flow_run_id>``."""

from __future__ import annotations

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
