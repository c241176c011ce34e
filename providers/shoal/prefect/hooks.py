"""What cleans up after a run: hooks for its own end, and the look at runs that ended without one."""

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
    """Hook for `on_failure`, `on_crashed` and `on_cancellation`: ends what the run has on any pool.

    Prefect calls a cancellation hook from the process that serves the flow: it needs the same ``$SHOAL_HOME`` or
    ``$SHOAL_STATE_URL`` as the flow.

    Args:
        flow: The flow.
        flow_run: Its run.
        state: What it ended in.

    Example:
        >>> @flow(on_failure=[clean_up_run], on_crashed=[clean_up_run], on_cancellation=[clean_up_run])
        ... def retrain(): ...
    """
    for sentence in cleanup.clean_up_everywhere(holder_of(flow_run.id), reason=_ended_as(state)):
        get_logger("shoal").info(sentence)


def clean_up_ended_runs() -> list[str]:
    """End what flow runs that are in a final state still have on any pool: the janitor's look.

    A run that this server does not know is left to its own time to live: it may be another server's.

    Returns:
        What was done, a sentence each.
    """
    with get_client(sync_client=True) as client:

        def why_ended(run_id: str) -> str | None:
            try:
                state = client.read_flow_run(UUID(run_id)).state
            except (ValueError, ObjectNotFound):  # a name that a user has chosen, or another server's run
                return None
            return _ended_as(state) if state and state.is_final() else None

        return cleanup.clean_up_ended_runs(ENGINE, why_ended)


def _ended_as(state: State) -> str:
    return f"its Prefect run ended as {state.name}"
