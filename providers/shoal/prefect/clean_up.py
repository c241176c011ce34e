"""Clean up after flow runs: hooks of a run that ends, and a task that ends what ended runs have left."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.logging import get_logger

from shoal.jobs import cleanup
from shoal.jobs.cleanup import RunEnd
from shoal.prefect.current_run import ENGINE, holder_of


def clean_up_run(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Cancel a flow run's jobs and release its leases on all pools, and those of its subflows.

    Use this function as hook for `on_failure`, `on_crashed` and `on_cancellation`. After a cancellation, the hook also
    cancels the jobs of deployments that the run has started with ``run_deployment``. The hook of a subflow ends only
    the jobs and leases of the subflow.

    Prefect calls a cancellation hook in the process that serves the flow or, for a work pool of processes, in the
    worker (Prefect 3.7) or in a process of its own (3.8). This process needs the same ``$SHOAL_HOME`` or
    ``$SHOAL_STATE_URL`` as the flow.

    Args:
        flow: The flow.
        flow_run: Run of the flow.
        state: Final state of the run.

    Example:
        >>> @flow(on_failure=[clean_up_run], on_crashed=[clean_up_run], on_cancellation=[clean_up_run])
        ... def retrain(): ...
    """
    end = end_as(state)
    for sentence in cleanup.clean_up_everywhere(
        holder_of(flow_run.id), reason=end.reason, is_cancelled=end.is_cancelled
    ):
        get_logger("shoal").info(sentence)


def end_as(state: State) -> RunEnd:
    """Return the end of a flow run from its final state."""
    return RunEnd(
        f"its Prefect run ended as {state.name}",
        is_cancelled=state.is_cancelled() or state.is_cancelling(),
        # An automation marks a run as crashed if the server has got no heartbeat, for example because it was too busy.
        is_doubtful=state.is_crashed(),
    )


def clean_up_ended_runs() -> list[str]:
    """Cancel the jobs and release the leases of all flow runs that have ended, and those of their subflows.

    Call this function in a flow that runs periodically. A run that this Prefect server does not know may belong to
    another server. So the jobs and leases of an unknown run are not changed. The leases of an unknown run expire when
    they are no longer renewed.

    A run that is marked as crashed may go on, because the server has only missed its heartbeats. The function leaves
    such a run alone while a process waits for one of its jobs.

    Returns:
        One sentence for each action, and for each crashed run that was left alone.
    """
    with get_client(sync_client=True) as client:

        def end_of(run_id: str) -> RunEnd | None:
            try:
                state = client.read_flow_run(UUID(run_id)).state
            # If a user has chosen the name of a lease's holder, `run_id` is not a UUID, and `UUID` raises ValueError.
            # If the flow run belongs to another Prefect server, the client raises ObjectNotFound.
            except (ValueError, ObjectNotFound):
                return None
            return end_as(state) if state and state.is_final() else None

        return cleanup.clean_up_ended_runs(ENGINE, end_of)
