"""Record the number of nodes that each lease and each job uses (table `usage`), compute their node-seconds, and end the
leases over their limits and the jobs of these leases.

A lease uses its nodes from its grant to its end, even while the nodes still start. A job uses the nodes of its workers,
and one node (the head, on which its driver runs) while it has no workers.

The transaction that changes a lease or a job also writes the row of its use. So the record is complete even if every
process is killed. Every reconcile round checks the limits, so a limit holds even if the process that requested the
lease is dead or does not release the lease.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Select, func, select, tuple_, update
from sqlalchemy.orm import Session, defer

from shoal.errors import BudgetError, LeaseEndedError
from shoal.pool.holder import Notice, ends_with, job_of, run_of
from shoal.pool.scaling_plan import Snapshot
from shoal.pool.spec import LeaseOptions
from shoal.pool.timeouts import DRIVER_LOST_AFTER
from shoal.state import stamps
from shoal.state.schema import JOB_ENDED, Job, JobState, Lease, Pool, Usage

USAGE_DAYS = 30.0
"""Number of past days whose use of nodes `shoal pool describe` shows: about a month, the period of most budgets."""

_SEVERAL_RUNS = ("python:", "cli:")
"""Prefixes of the names of holders that several runs may use one after the other (see `shoal.pool.holder`)."""


@dataclass(frozen=True)
class HolderUsage:
    """Node-seconds that the leases and jobs of one holder have used on a pool, and the number of nodes in use now.

    Attributes:
        holder: Name of the run or process.
        nodes: Number of nodes that the holder's leases use now, or its jobs, whichever is larger.
        lease_node_seconds: Nodes of the holder's leases, multiplied by the seconds for which the leases were granted.
        job_node_seconds: Nodes of the holder's jobs, multiplied by the seconds for which the jobs used the nodes.
    """

    holder: str
    nodes: int
    lease_node_seconds: float
    job_node_seconds: float


def follow_leases(session: Session, pool: str, now: float) -> None:
    """Update the rows of the table `usage` after a change of a pool's leases.

    For a lease that has ended, the end is written to its row. A lease that was granted gets a new row. If the size or
    team of a lease has changed, the period of its old row ends, and the lease gets a new row. Every transaction that
    may change leases calls this function as its last step.
    """
    session.flush()
    granted = {
        lease.id: lease for lease in session.scalars(select(Lease).where(Lease.pool == pool, Lease.waiting.is_(False)))
    }
    open_rows = select(Usage).where(Usage.pool == pool, Usage.ended_at.is_(None), Usage.lease_id.is_not(None))
    for row in session.scalars(open_rows):
        lease = granted.get(row.lease_id or "")
        if lease is not None and (lease.size, lease.team) == (row.nodes, row.team):
            del granted[lease.id]
        else:
            _end(session, row, now)
    for lease in granted.values():
        row = Usage(pool=pool, holder=run_of(lease.holder), lease_id=lease.id, team=lease.team, nodes=lease.size)
        session.add(_begun(session, row, now))


def end_expired(session: Session, lease: Lease, now: float) -> None:
    """Record that an expired lease no longer uses nodes. The recorded end is the time of the expiry, even if this host
    notices the expiry only later, such as after a reboot."""
    for row in session.scalars(select(Usage).where(Usage.lease_id == lease.id, Usage.ended_at.is_(None))):
        _end(session, row, now, until=lease.expires_at)


def job_uses(session: Session, job: Job, nodes: int, now: float, *, since_s: float = 0.0) -> None:
    """Record how many nodes an attempt of a job uses."""
    for row in session.scalars(_of_attempt(job.id, job.attempt).where(Usage.ended_at.is_(None))):
        if row.nodes == nodes:
            return
        _end(session, row, now, ago=since_s)
    row = Usage(pool=job.pool, holder=job.holder, job_id=job.id, attempt=job.attempt, nodes=nodes)
    session.add(_begun(session, row, now, ago=since_s))


def end_use(session: Session, job: Job, now: float) -> None:
    """Record that an attempt of a job no longer uses nodes. If the job's driver was lost long ago, the recorded end is
    the driver's last heartbeat."""
    last = job.heartbeat_at or job.started_at or now
    for row in session.scalars(_of_attempt(job.id, job.attempt).where(Usage.ended_at.is_(None))):
        _end(session, row, now, until=last if now - last > DRIVER_LOST_AFTER else None)


def of_attempts(session: Session, attempts: Sequence[tuple[str, int]], now: float) -> dict[tuple[str, int], float]:
    """Return the node-seconds that attempts of jobs have used up to now. Attempts without a record are left out."""
    found: dict[tuple[str, int], list[Usage]] = {}
    for row in session.scalars(select(Usage).where(tuple_(Usage.job_id, Usage.attempt).in_(attempts))):
        found.setdefault((row.job_id or "", row.attempt or 0), []).append(row)
    return {attempt: _sum_rows(session, rows, now) for attempt, rows in found.items()}


def by_holder(session: Session, pool: str, now: float, *, since: float = 0.0) -> list[HolderUsage]:
    """Return the node-seconds that each holder has used on a pool. The holder that has used the most comes first."""
    rows = session.scalars(select(Usage).where(Usage.pool == pool, Usage.ended_at.is_(None) | (Usage.ended_at > since)))
    of_holder: dict[str, list[Usage]] = {}
    for row in rows:
        of_holder.setdefault(row.holder, []).append(row)
    found = []
    for holder, used in of_holder.items():
        leases = [row for row in used if row.lease_id is not None]
        jobs = [row for row in used if row.lease_id is None]
        at_work = [sum(row.nodes for row in rows if row.ended_at is None) for rows in (leases, jobs)]
        seconds = (_sum_rows(session, rows, now, since=since) for rows in (leases, jobs))
        found.append(HolderUsage(holder, max(at_work), *seconds))
    return sorted(found, key=lambda one: -max(one.lease_node_seconds, one.job_node_seconds))


def lifetime(session: Session, lease: Lease, now: float) -> float:
    """Return the seconds since a lease was granted; 0 if the lease still waits."""
    shared_now = stamps.shared_now(session, now)
    rows = session.scalars(select(Usage).where(Usage.lease_id == lease.id))
    return sum(_seconds(row, shared_now) if row.node_seconds is None else row.node_seconds / row.nodes for row in rows)


def of_run(session: Session, pool: str, holder: str, lease_id: str | None, now: float) -> float:
    """Return the node-seconds that the leases of a run (of a workflow or a script) have used on a pool.

    A run of a workflow engine has a holder name of its own, so all leases of the holder are counted. A plain Python
    process or a user at a terminal may use the same holder name for several runs, so only the present lease is counted.
    """
    of_this_run = Usage.lease_id == lease_id
    if not holder.startswith(_SEVERAL_RUNS):
        of_this_run = (Usage.holder == run_of(holder)) & Usage.lease_id.is_not(None)
    elif lease_id is None:
        return 0.0
    return _sum_matching(session, (Usage.pool == pool) & of_this_run, now)


def of_team(session: Session, pool: str, team: str, now: float, *, since: float) -> float:
    """Return the node-seconds that the leases of a team have used on a pool since a given time."""
    return _sum_matching(session, (Usage.pool == pool) & (Usage.team == team), now, since=since)


def of_job(session: Session, job_id: str, now: float) -> float:
    """Return the node-seconds that a job has used since its last successful attempt. If no attempt has succeeded, all
    attempts are counted."""
    after = session.scalar(select(func.max(Job.attempt)).where(Job.id == job_id, Job.state == JobState.SUCCEEDED)) or 0
    return _sum_matching(session, (Usage.job_id == job_id) & (Usage.attempt > after), now)


def _of_attempt(job_id: str, attempt: int) -> Select[Usage]:
    return select(Usage).where(Usage.job_id == job_id, Usage.attempt == attempt)


def _begun(session: Session, row: Usage, now: float, *, ago: float = 0.0) -> Usage:
    row.begun_at = stamps.shared_now(session, now) - ago
    row.begun_clock = stamps.stamp(row.begun_at, ago=ago)
    return row


def _end(session: Session, row: Usage, now: float, *, ago: float = 0.0, until: float | None = None) -> None:
    """Write the end of the period and the used node-seconds to a row of the table `usage`. The end is `until` if it is
    given, otherwise `ago` seconds before now."""
    shared_now = stamps.shared_now(session, now)
    seconds = max(0.0, _seconds(row, shared_now) - ago)
    if until is not None:
        seconds = min(seconds, max(0.0, until - row.begun_at))
    row.ended_at, row.node_seconds = shared_now - ago if until is None else until, row.nodes * seconds


def _seconds(row: Usage, shared_now: float) -> float:
    """Return for how many seconds the nodes of a row have been in use.

    If the row was written on this host since the last boot, the time is measured with the monotonic clock. Otherwise
    it is measured with the database server's clock, which all hosts share.
    """
    measured = stamps.age(row.begun_at, row.begun_clock)
    return max(0.0, shared_now - row.begun_at if measured is None else measured)


def _sum_matching(session: Session, which: ColumnElement[bool], now: float, *, since: float = 0.0) -> float:
    """Return the node-seconds of all rows that match a condition. The time before `since` is not counted.

    The database adds up the closed rows, because the caller may hold the write lock, and a team has thousands of rows
    in a month. Only open rows, and rows that began before `since`, are read one by one.
    """
    ended = session.scalar(
        select(func.sum(Usage.node_seconds)).where(which, Usage.begun_at >= since, Usage.ended_at > since)
    )
    others = select(Usage).where(
        which, Usage.ended_at.is_(None) | ((Usage.begun_at < since) & (Usage.ended_at > since))
    )
    return (ended or 0.0) + _sum_rows(session, session.scalars(others).all(), now, since=since)


def _sum_rows(session: Session, rows: Sequence[Usage], now: float, *, since: float = 0.0) -> float:
    """Return the node-seconds of several rows. The time before `since` is not counted."""
    shared_now = stamps.shared_now(session, now)
    total = 0.0
    for row in rows:
        used = row.nodes * _seconds(row, shared_now) if row.node_seconds is None else row.node_seconds
        end = shared_now if row.ended_at is None else row.ended_at
        if row.begun_at < since < end:
            used *= (end - since) / (end - row.begun_at)
        total += used
    return total


SPENT_ADVICE = "raise the budget, or use fewer nodes or less time"
"""Advice at the end of error messages about a budget that is used up."""


def spent_leases(session: Session, snapshot: Snapshot, now: float) -> list[tuple[Lease, str]]:
    """Return the granted leases whose lifetime or budget is used up, each with a sentence about the reason."""
    found = []
    for lease in snapshot.leases:
        if lease.waiting:
            continue
        if lease.max_lifetime is not None and lifetime(session, lease, now) >= lease.max_lifetime:
            why = (
                f'the lease of {lease.holder} on pool "{lease.pool}" was ended after '
                f"max_lifetime={lease.max_lifetime:g} s: set a longer max_lifetime if the run needs more time"
            )
            found.append((lease, why))
        elif (budget := lease.budget_node_hours) is not None:
            used = of_run(session, lease.pool, lease.holder, lease.id, now) / 3600
            if used >= budget:
                why = f"{_spent(lease.holder, lease.pool, used, budget)}, and the lease was ended: {SPENT_ADVICE}"
                found.append((lease, why))
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
    used = of_team(session, pool.name, team, now, since=since) / 3600
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
    used = of_run(session, pool, holder, lease, now) / 3600
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
    end_use(session, job, now)
