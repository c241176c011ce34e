"""Record the number of nodes that each lease and each job uses (table `usage`), and compute their node-seconds.

A lease uses its nodes from its grant to its end, even while the nodes still start. A job uses the nodes of its workers,
and one node (the head, on which its driver runs) while it has no workers.

The transaction that changes a lease or a job also writes the row of its use. So the record is complete even if every
process is killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Select, func, select, tuple_
from sqlalchemy.orm import Session

from shoal.pool.holder import run_of
from shoal.pool.timeouts import DRIVER_LOST_AFTER
from shoal.state import stamps
from shoal.state.schema import Job, JobState, Lease, Usage

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
        session.add(
            _begun(
                session,
                Usage(pool=pool, holder=run_of(lease.holder), lease_id=lease.id, team=lease.team, nodes=lease.size),
                now,
            )
        )


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
