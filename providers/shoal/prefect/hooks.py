"""Clean up after flow runs: a hook for the end of a run, and a function for runs that ended without this hook."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.logging import get_logger

from shoal.jobs import cleanup
from shoal.prefect._holder import ENGINE, holder_of


def clean_up_run(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Cancel a flow run's jobs and release its leases on all pools.

    Use this function as hook for `on_failure`, `on_crashed` and `on_cancellation`. Prefect calls a cancellation hook in
    the process that serves the flow, so this process needs the same ``$SHOAL_HOME`` or ``$SHOAL_STATE_URL`` as the
    flow.

    Args:
        flow: The flow.
        flow_run: Run of the flow.
        state: Final state of the run.

    Example:
        >>> @flow(on_failure=[clean_up_run], on_crashed=[clean_up_run], on_cancellation=[clean_up_run])
        ... def retrain(): ...
    """
    for sentence in cleanup.clean_up_everywhere(holder_of(flow_run.id), reason=_ended_as(state)):
        get_logger("shoal").info(sentence)


def clean_up_ended_runs() -> list[str]:
    """Cancel the jobs and release the leases of all flow runs that have ended; call this in a janitor flow.

    If this Prefect server does not know a run, the run may belong to another server. Its leases are not touched, and
    expire after their time to live.

    Returns:
        One sentence for each thing that was done.
    """
    with get_client(sync_client=True) as client:

        def why_ended(run_id: str) -> str | None:
            try:
                state = client.read_flow_run(UUID(run_id)).state
            except (ValueError, ObjectNotFound):  # A user chose this holder name, or it is a run of another server.
                return None
            return _ended_as(state) if state and state.is_final() else None

        return cleanup.clean_up_ended_runs(ENGINE, why_ended)


def _ended_as(state: State) -> str:
    return f"its Prefect run ended as {state.name}"
