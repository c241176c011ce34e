"""End the leases whose lifetime or budget of node-hours is used up, and the jobs of these leases. Check the quotas of
teams.

Every reconcile round checks the limits, so a limit holds even if the process that requested the lease is dead or does
not release the lease.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import select, update
from sqlalchemy.orm import Session, defer

from shoal.errors import BudgetError, LeaseEndedError
from shoal.pool.holder import ends_with, job_of, run_of
from shoal.pool.journal import usage
from shoal.pool.journal.usage import USAGE_DAYS
from shoal.pool.notice import Notice
from shoal.pool.snapshot import Snapshot
from shoal.pool.spec import LeaseOptions
from shoal.state import stamps
from shoal.state.schema import JOB_ENDED, Job, JobState, Lease, Pool, Usage

SPENT_ADVICE = "raise the budget, or use fewer nodes or less time"
"""Advice at the end of error messages about a budget that is used up."""


def spent_leases(session: Session, snapshot: Snapshot, now: float) -> list[tuple[Lease, str]]:
    """Return the granted leases whose lifetime or budget is used up, each with a sentence about the reason."""
    found = []
    for lease in snapshot.leases:
        if lease.waiting or (lease.max_lifetime is None and lease.budget_node_hours is None):
            continue
        if reason := _reason(session, lease, now):
            found.append((lease, reason))
    return found


def end_spent_leases(session: Session, snapshot: Snapshot, now: float) -> list[str]:
    """End the granted leases whose lifetime or budget is used up, and their unfinished jobs. Return one sentence for
    each lease.

    The driver of each of these jobs reads the recorded end in the job's row within seconds, and exits.
    """
    spent = spent_leases(session, snapshot, now)
    for lease, reason in spent:
        session.execute(
            update(Usage)
            .where(Usage.lease_id == lease.id)
            .values(end_reason=reason)
            .execution_options(synchronize_session=False)
        )
        own = job_of(lease.holder)
        for job in _unfinished(session, lease.pool):
            if job.id != own and not ends_with(job.holder, job.ancestors, lease.holder):
                continue
            end_job(session, job, JobState.FAILED, now, error=reason, error_is_permanent=True)
        session.delete(lease)
    return [Notice(reason, lease.holder) for lease, reason in spent]


def check_quota(session: Session, pool: Pool, team: str | None, size: int, options: LeaseOptions, now: float) -> None:
    """Raise an error if a requested lease can never fit into its team's quota, or if the team has used up its
    node-hours.

    Raises:
        BudgetError: The request is above the quota.
    """
    limits = (pool.quotas or {}).get(team or "")
    if not team or limits is None:
        return
    change = f"use less, or ask the pool's administrator for a higher quota (`shoal pool quota {pool.name} {team}`)"
    most, hours = limits["max_nodes"], limits["node_hours"]
    if most is not None and size > most:
        raise BudgetError(f'a lease of {size} nodes is above the quota of {most} nodes of team "{team}": {change}')
    if hours is None:
        return
    since = stamps.shared_now(session, now) - USAGE_DAYS * 24 * 3600
    used = usage.of_team(session, pool.name, team, now, since=since) / 3600
    asked = size * (options.max_lifetime or 0.0) / 3600
    if used >= hours or used + asked > hours:
        request = f", and this lease could use {asked:.4g} more" if asked else ""
        raise BudgetError(
            f'team "{team}" has used {used:.4g} of {hours:g} node-hours on pool "{pool.name}" in the past '
            f"{USAGE_DAYS:g} days{request}: {change}"
        )


def set_quota(pool: Pool, team: str, *, max_nodes: int | None, node_hours: float | None) -> None:
    """Set the limits of a team on a pool. If both limits are None, the team's quota is removed."""
    quotas = dict(pool.quotas or {})
    quotas.pop(team, None)
    if max_nodes is not None or node_hours is not None:
        quotas[team] = {"max_nodes": max_nodes, "node_hours": node_hours}
    pool.quotas = quotas or None


def quota_text(pool: Pool, team: str) -> str:
    """Return the limits of a team on a pool as text, such as ``3 nodes, 100 node-hours``."""
    limits = (pool.quotas or {}).get(team, {})
    units = (("max_nodes", "nodes"), ("node_hours", "node-hours"))
    given = [f"{limits[name]:g} {unit}" for name, unit in units if limits.get(name) is not None]
    return ", ".join(given) or "no limit"


def check_request(session: Session, pool: str, holder: str, options: LeaseOptions, now: float) -> None:
    """Raise an error if the run that requests a lease has used up its budget of node-hours.

    Raises:
        BudgetError: The leases of this run have used all node-hours of the budget.
    """
    budget = options.budget_node_hours
    if budget is None:
        return
    lease = session.scalars(select(Lease.id).where(Lease.pool == pool, Lease.holder == holder)).first()
    used = usage.of_run(session, pool, holder, lease, now) / 3600
    if used >= budget:
        raise BudgetError(f"{_spent(holder, pool, used, budget)}: {SPENT_ADVICE}")


def check_lease(session: Session, pool: str, holder: str) -> None:
    """Raise an error if a run has had a lease on a pool, and has none any more.

    Raises:
        LeaseEndedError: The lease has ended.
    """
    if session.scalars(select(Lease.id).where(Lease.pool == pool, Lease.holder == holder)).first() is not None:
        return
    leases = select(Usage).where(Usage.pool == pool, Usage.holder == run_of(holder), Usage.lease_id.is_not(None))
    if (last := session.scalars(leases.order_by(Usage.id.desc()).limit(1)).first()) is not None:
        raise LeaseEndedError(last.end_reason or f'the lease of {holder} on pool "{pool}" has expired or was released')


def end_reason(session: Session, lease_id: str) -> str | None:
    """Return the reason (lifetime or budget) why shoal has ended a lease; None if shoal has not ended the lease."""
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
    if used < budget:
        return None
    return f"{_spent(lease.holder, lease.pool, used, budget)}, and the lease was ended: {SPENT_ADVICE}"


def _spent(holder: str, pool: str, used: float, budget: float) -> str:
    return (
        f'{run_of(holder)} has used {used:.4g} node-hours on pool "{pool}", so budget_node_hours={budget:g} is used up'
    )


def end_jobs_of_pool(session: Session, pool: str, reason: str, now: float) -> None:
    """Record that the unfinished jobs of a pool have failed, because the pool is gone."""
    for job in _unfinished(session, pool):
        end_job(session, job, JobState.FAILED, now, error=reason)


def _unfinished(session: Session, pool: str) -> Iterator[Job]:
    unfinished = select(Job).where(Job.pool == pool, Job.state.not_in(JOB_ENDED))
    yield from session.scalars(unfinished.options(defer(Job.spec)))


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
    usage.end_use(session, job, now)
