"""Derive the holder's name of leases and jobs from the current flow run and task run."""

from __future__ import annotations

from prefect.context import FlowRunContext, TaskRunContext

ENGINE = "prefect"


def holder_of(flow_run_id: object) -> str:
    """Return the holder of a flow run's leases and jobs: ``prefect:<flow_run_id>``."""
    return f"{ENGINE}:{flow_run_id}"


def current_holder() -> str | None:
    """Return the holder for the current flow run, or for the current task run if the task has no flow run.

    The result is None outside of a flow and a task.
    """
    task = TaskRunContext.get()
    flow = FlowRunContext.get()
    run = (task and task.task_run.flow_run_id) or (flow and flow.flow_run and flow.flow_run.id)
    if not run and task:
        run = task.task_run.id
    return holder_of(run) if run else None


def task_key() -> str:
    """Return a key that is unique per task run within a flow run and the same for all retries of a task run."""
    task = TaskRunContext.get()
    return f"{task.task_run.task_key}/{task.task_run.dynamic_key}" if task else ""
