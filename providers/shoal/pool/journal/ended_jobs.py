"""Record the end of a job's attempt: set the final state, delete the attempt's credentials, and record that the attempt
no longer uses nodes.

Most callers are in `shoal.jobs.journal.attempts`. The module `lease_limits` ends the jobs of a lease that is over its
limits, in the transaction that ends the lease.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from shoal.pool.journal import usage
from shoal.state.schema import Job, JobState


def end_job(
    session: Session,
    job: Job,
    state: JobState,
    now: float,
    *,
    error: str | None = None,
    error_is_permanent: bool | None = None,
) -> None:
    """Record the end of a job's attempt, and that the attempt no longer uses nodes. Delete the attempt's encrypted
    credentials.
    """
    job.state, job.error, job.error_is_permanent, job.ended_at = state, error, error_is_permanent, now
    job.driver_key = job.sealed_credentials = None
    usage.end_job(session, job, now)
