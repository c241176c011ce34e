"""What a run has to leave behind, whatever became of it: nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shoal.errors import PoolDownError, PoolNotFoundError
from shoal.jobs.submission import attach, list_jobs
from shoal.pool.api import ComputePool, sweep
from shoal.state.schema import JobState


@dataclass(frozen=True)
class CleanupReport:
    """What was done.

    Attributes:
        cancelled: Ids of the holder's jobs that still ran.
        released: Whether the holder had a lease.
        swept: What else nobody owned on this host, a sentence each.
    """

    cancelled: tuple[str, ...]
    released: bool
    swept: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for an XCom or an artifact."""
        return asdict(self)


def clean_up(pool_name: str, holder: str, *, reason: str = "its run was cleaned up") -> CleanupReport:
    """End what a run still has on a pool: its jobs, its lease, and whatever nobody owns. Safe at any time, and twice.

    Args:
        pool_name: The pool; one that is gone or down has nothing to clean.
        holder: The run.
        reason: Kept with the jobs that are cancelled.
    """
    active = list_jobs(pool_name, states=(JobState.PENDING, JobState.RUNNING))
    mine = sorted({job.job_id for job in active if job.holder == holder})
    cancelled = tuple(job_id for job_id in mine if attach(job_id).cancel(reason))
    try:
        released = ComputePool(pool_name, holder=holder).release()
    except (PoolNotFoundError, PoolDownError):
        released = False
    return CleanupReport(cancelled, released, tuple(sweep()))
