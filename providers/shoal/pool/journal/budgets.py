"""End leases whose lifetime or budget of node-hours is over, and the jobs that run on them.

Every reconcile round checks this, so a limit also holds if the process that requested the lease is dead or does not
release it.
"""

from __future__ import annotations

from sqlalchemy import select, update
from sqlalchemy.orm import Session, defer

from shoal.errors import BudgetError
from shoal.pool.holder import job_of
from shoal.pool.journal import usage
from shoal.pool.snapshot import Snapshot
from shoal.pool.spec import LeaseOptions
from shoal.state.schema import JOB_ENDED, Job, JobState, Lease, Usage

_TO_DO = "raise the budget, or use fewer nodes or less time"


def spent_leases(session: Session, snapshot: Snapshot, now: float) -> list[tuple[Lease, str]]:
    """Return the granted leases that have to be ended, each with the reason."""
    found = []
    for lease in snapshot.leases:
        if lease.waiting or (lease.max_lifetime is None and lease.budget_node_hours is None):
            continue
        if reason := _reason(session, lease, now):
            found.append((lease, reason))
    return found


def end_spent_leases(session: Session, snapshot: Snapshot, now: float) -> list[str]:
    """End the granted leases whose lifetime or budget is over, with their unfinished jobs. Return one sentence each.

    The driver of such a job reads the end in its job's row within seconds, and ends itself.
    """
    spent = spent_leases(session, snapshot, now)
    for lease, reason in spent:
        session.execute(
            update(Usage)
            .where(Usage.lease_id == lease.id)
            .values(end_reason=reason)
            .execution_options(synchronize_session=False)
        )
        whose = Job.id == job_id if (job_id := job_of(lease.holder)) else Job.holder == lease.holder
        unfinished = select(Job).where(Job.pool == lease.pool, whose, Job.state.not_in(JOB_ENDED))
        for job in session.scalars(unfinished.options(defer(Job.spec))):
            job.state, job.error, job.error_is_permanent, job.ended_at = JobState.FAILED, reason, True, now
            usage.end_job(session, job, now)
        session.delete(lease)
    return [reason for _, reason in spent]


def check_request(session: Session, pool: str, holder: str, options: LeaseOptions, now: float) -> None:
    """Refuse a lease whose run has used up its budget.

    Args:
        session: The caller's transaction.
        pool: Name of the pool.
        holder: Name of the run.
        options: Options of the request.
        now: Seconds since the epoch.

    Raises:
        BudgetError: The leases of this run have used as many node-hours as the budget has, or more.
    """
    budget = options.budget_node_hours
    if budget is None:
        return
    lease = session.scalars(select(Lease.id).where(Lease.pool == pool, Lease.holder == holder)).first()
    used = usage.of_run(session, pool, holder, lease, now) / 3600
    if used >= budget:
        raise BudgetError(f"{_spent(holder, pool, used, budget)}: {_TO_DO}")


def end_reason(session: Session, lease_id: str) -> str | None:
    """Return the reason why a lease was ended although its holder had not released it; None if it was not."""
    reasons = select(Usage.end_reason).where(Usage.lease_id == lease_id, Usage.end_reason.is_not(None))
    return session.scalars(reasons).first()


def _reason(session: Session, lease: Lease, now: float) -> str | None:
    if lease.max_lifetime is not None and usage.lifetime(session, lease, now) >= lease.max_lifetime:
        return (
            f'the lease of {lease.holder} on pool "{lease.pool}" was ended after max_lifetime={lease.max_lifetime:g} '
            "s: set a longer max_lifetime if the run needs more time"
        )
    budget = lease.budget_node_hours
    if budget is None:
        return None
    used = usage.of_run(session, lease.pool, lease.holder, lease.id, now) / 3600
    return f"{_spent(lease.holder, lease.pool, used, budget)}, and was ended: {_TO_DO}" if used >= budget else None


def _spent(holder: str, pool: str, used: float, budget: float) -> str:
    return f'{holder} has used {used:.4g} node-hours on pool "{pool}", and budget_node_hours={budget:g}'
