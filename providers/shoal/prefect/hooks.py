"""What cleans up after a run: hooks for its own end, and the look at runs that ended without one."""

from __future__ import annotations

from typing import Any

from prefect import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.logging import get_logger

from shoal.jobs import clean_up, list_jobs
from shoal.pool.api import list_pools
from shoal.prefect._holder import PREFIX, holder_of
from shoal.state.schema import JobState

_ACTIVE = (JobState.PENDING, JobState.RUNNING)


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
    _clean_up(str(flow_run.id), f"its Prefect run ended as {state.name}")


def clean_up_ended_runs() -> list[str]:
    """End what flow runs still have on any pool that are in a final state, or deleted: the janitor's look.

    Returns:
        What was done, a sentence each.
    """
    done = []
    with get_client(sync_client=True) as client:
        for run_id in sorted(_runs_with_something()):
            try:
                state = client.read_flow_run(run_id).state  # type: ignore[arg-type]  # a str will do
            except ObjectNotFound:
                ended = "was deleted"
            else:
                if state is None or not state.is_final():
                    continue
                ended = f"ended as {state.name}"
            done += _clean_up(run_id, f"its Prefect run {ended}")
    return done


def _clean_up(run_id: str, reason: str) -> list[str]:
    holder = holder_of(run_id)
    done = []
    for pool in sorted(_pools_of(holder)):
        report = clean_up(pool, holder, reason=reason)
        done += [f"{pool}: cancelled job {job_id}: {reason}" for job_id in report.cancelled]
        done += [f"{pool}: released the lease of {holder}: {reason}"] if report.released else []
        done += report.swept
    for sentence in done:
        get_logger("shoal").info(sentence)
    return done


def _pools_of(holder: str) -> set[str]:
    leased = {pool.name for pool in list_pools() if any(lease.holder == holder for lease in pool.leases)}
    return leased | {job.pool for job in list_jobs(states=_ACTIVE) if job.holder == holder}


def _runs_with_something() -> set[str]:
    holders = {lease.holder for pool in list_pools() for lease in pool.leases}
    holders |= {job.holder for job in list_jobs(states=_ACTIVE)}
    return {holder.removeprefix(PREFIX) for holder in holders if holder.startswith(PREFIX)}
