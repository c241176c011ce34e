"""Provide `clean_up_run`, a hook that Prefect calls when a flow run has ended. The hook cleans up after the run."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging import get_logger

from shoal.jobs import cleanup
from shoal.prefect._run_holder import holder_of


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
