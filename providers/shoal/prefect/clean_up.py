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
from shoal.prefect._run_holder import ENGINE, holder_of


def clean_up_run(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Cancel a flow run's jobs and release its leases on all pools.

    Use this function as hook for `on_failure`, `on_crashed` and `on_cancellation`. Prefect calls a cancellation hook in
    the process that serves the flow, so the serving process needs the same ``$SHOAL_HOME`` or ``$SHOAL_STATE_URL`` as
    the flow.

    Args:
        flow: The flow.
        flow_run: Run of the flow.
        state: Final state of the run.

    Example:
        >>> @flow(on_failure=[clean_up_run], on_crashed=[clean_up_run], on_cancellation=[clean_up_run])
        ... def retrain(): ...
    """
    for sentence in cleanup.clean_up_everywhere(holder_of(flow_run.id), reason=ended_as(state)):
        get_logger("shoal").info(sentence)


def ended_as(state: State) -> str:
    """Return the reason for a clean-up: how the flow run ended."""
    return f"its Prefect run ended as {state.name}"


def clean_up_ended_runs() -> list[str]:
    """Cancel the jobs and release the leases of all flow runs that have ended.

    Call this function in a flow that runs periodically. A run that this Prefect server does not know may belong to
    another server. So the jobs and leases of an unknown run are not changed. The leases of an unknown run expire when
    they are no longer renewed.

    Returns:
        One sentence for each action.
    """
    with get_client(sync_client=True) as client:

        def why_ended(run_id: str) -> str | None:
            try:
                state = client.read_flow_run(UUID(run_id)).state
            # If a user has chosen the name of a lease's holder, `run_id` is not a UUID, and `UUID` raises ValueError.
            # If the flow run belongs to another Prefect server, the client raises ObjectNotFound.
            except (ValueError, ObjectNotFound):
                return None
            return ended_as(state) if state and state.is_final() else None

        return cleanup.clean_up_ended_runs(ENGINE, why_ended)
