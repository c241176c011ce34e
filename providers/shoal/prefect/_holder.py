"""Who asks, in Prefect's terms: the flow run, and the task run within it."""

from __future__ import annotations

from prefect.context import FlowRunContext, TaskRunContext

ENGINE = "prefect"


def holder_of(flow_run_id: object) -> str:
    """The name that a flow run's leases and jobs carry."""
    return f"{ENGINE}:{flow_run_id}"


def current_holder() -> str | None:
    """Of the run that this code is part of: its flow run, else (a task without a flow) its task run; None outside."""
    task = TaskRunContext.get()
    flow = FlowRunContext.get()
    run = (task and task.task_run.flow_run_id) or (flow and flow.flow_run and flow.flow_run.id)
    if not run and task:
        run = task.task_run.id
    return holder_of(run) if run else None


def task_key() -> str:
    """Tells the task runs of one flow run apart, and is the same for every retry of one."""
    task = TaskRunContext.get()
    return f"{task.task_run.task_key}/{task.task_run.dynamic_key}" if task else ""
