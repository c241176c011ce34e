"""Find the flow runs around the current code (the chain from the root run through its subflows to the current run), and
the name by which a repeated task run finds its job."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID, uuid4

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from shoal.jobs import FlowTask
from shoal.pool.holder import Ancestors


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
    run = context.flow_run
    if run.parent_task_run_id is None:
        return Scope((run,), ())
    with get_client(sync_client=True) as client:
        return _scope_of(run, client)


def _scope_of(run: FlowRun, client: SyncPrefectClient) -> Scope:
    runs, subflows = [run], list[str]()
    while (call := _calling(runs[0].parent_task_run_id, client)) is not None:
        caller, name = call
        runs.insert(0, caller)
        subflows.insert(0, name)
    return Scope(tuple(runs), tuple(subflows))


def _calling(task_run_id: UUID | None, client: SyncPrefectClient) -> tuple[FlowRun, str] | None:
    """Return the flow run that has called a subflow, and the name of the subflow within it; None for a root run."""
    if task_run_id is None:
        return None
    try:
        call = client.read_task_run(task_run_id)
        # A task outside of flows may have called the subflow, which is then the root.
        caller = client.read_flow_run(call.flow_run_id) if call.flow_run_id else None
    except ObjectNotFound:  # a user has deleted the caller's run
        return None
    return (caller, f"{call.task_key}/{call.dynamic_key}") if caller else None


def current_flow_task(holder: str, ancestors: Ancestors, digest: str | None) -> FlowTask:
    """Describe the current task run, so that it finds the job that an equal task run has submitted in an earlier try of
    the flow run.

    Args:
        holder: Holder of the job.
        ancestors: Holders whose end is also the end of the job.
        digest: Digest of the code of the task's function (`shoal.kinds.task_spec.code_of`).
    """
    scope, context = current_scope(), TaskRunContext.get()
    run = str(context.task_run.id if context else uuid4())
    # Outside of a flow, only retries of the task run find its job. In a flow, each try has another state: `run_count`
    # does not change if a flow run is resumed, and processes of a task runner have other start times.
    key, flow_try = (scope.name, str(scope.runs[-1].state_id)) if scope else (run, run)
    refresh = context.task.refresh_cache if context else None
    anew = get_current_settings().tasks.refresh_cache if refresh is None else refresh
    return FlowTask(key, holder, flow_try, run, ancestors, digest, anew)
