"""Decide whether a driver has to end its job, and why.

The possible reasons: the job was cancelled, has exceeded its time limit or its budget, or was not polled by any process
for `orphan_after` seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.jobs.journal.attempts import budget_spent
from shoal.state.schema import JOB_ENDED, Job, JobState


@dataclass(frozen=True)
class Reason:
    """Reason why a driver has to end its job, and the final state that the job gets."""

    state: JobState
    text: str
    permanent: bool = False
    """Whether a further attempt would end for the same reason."""


def why_end(
    job: Job | None,
    *,
    unasked_for: float,
    running_for: float,
    timeout: float | None,
    used_node_hours: float = 0.0,
    budget_node_hours: float | None = None,
) -> Reason | None:
    """Return the reason why a running job has to end; None if the job may go on."""
    if job is None:
        return Reason(JobState.CANCELLED, "the job's row was removed from the store")
    if job.state in JOB_ENDED:
        return Reason(job.state, job.error or f"the state in the job's row is {job.state.value}")
    if job.orphan_after is not None and unasked_for > job.orphan_after:
        return Reason(
            JobState.CANCELLED,
            f"no process has polled the job for orphan_after={job.orphan_after:.0f} s: set orphan_after=None to "
            "let a job go on even if no process waits for it",
        )
    if timeout is not None and running_for > timeout:
        return Reason(JobState.FAILED, f"the job ran longer than run_config.timeout={timeout:g} s: raise the timeout")
    if budget_node_hours is not None and used_node_hours >= budget_node_hours:
        return Reason(JobState.FAILED, budget_spent(used_node_hours, budget_node_hours), permanent=True)
    return None
