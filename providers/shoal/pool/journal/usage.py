"""Record how many nodes leases and jobs use, and for how long (table `usage`), and add it up in node-seconds.

A lease uses its nodes from the time at which it is granted to its end, also while the nodes still start. A job uses the
nodes of its workers, and one node (the head, on which its driver runs) while it has no workers.

The transaction that changes a lease or a job also writes the row, so no process has to live until the end of the use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Select, delete, func, select, tuple_
from sqlalchemy.orm import Session

from shoal.state import stamps
from shoal.state.schema import Job, JobState, Lease, Usage

_LOST_S = 60.0
"""Seconds without a heartbeat after which the use by a job whose end is recorded is taken to have ended with the last
heartbeat. A driver writes a heartbeat every 5 s, and the store may not answer for some time."""

_COMES_AGAIN = ("python:", "cli:")
"""Prefixes of the names of holders that are not named after one run (see `shoal.pool.holder`)."""


@dataclass(frozen=True)
class HolderUsage:
    """Use of a pool by the leases or the jobs of one holder.

    Attributes:
        holder: Name of the run or process.
        nodes: Number of nodes that its leases, or its jobs, use now.
        lease_node_seconds: Nodes of its leases, multiplied by the seconds for which the leases were granted.
        job_node_seconds: Nodes of its jobs, multiplied by the seconds for which the jobs ran on them.
    """

    holder: str
    nodes: int
    lease_node_seconds: float
    job_node_seconds: float


def follow_leases(session: Session, pool: str, now: float) -> None:
    """Update the rows of a pool's leases: end the use by leases that have ended or have changed, and begin the use by
    leases that were granted or have changed. A change is another size or another team.

    Every transaction that may change leases calls this at its end.
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
                Usage(pool=pool, holder=lease.holder, lease_id=lease.id, team=lease.team, nodes=lease.size),
                now,
            )
        )


def end_expired(session: Session, lease: Lease, now: float) -> None:
    """End the use by a lease that has expired. If this host was down meanwhile, the use has ended with the lease's time
    to live."""
    for row in session.scalars(select(Usage).where(Usage.lease_id == lease.id, Usage.ended_at.is_(None))):
        _end(session, row, now, until=lease.expires_at)


def job_uses(session: Session, job: Job, nodes: int, now: float, *, since_s: float = 0.0) -> None:
    """Record how many nodes an attempt of a job uses.

    Args:
        session: A write transaction.
        job: The attempt's row.
        nodes: Number of nodes.
        now: Seconds since the epoch.
        since_s: Seconds for which the attempt has used this number of nodes.
    """
    for row in session.scalars(_of_attempt(job.id, job.attempt).where(Usage.ended_at.is_(None))):
        if row.nodes == nodes:
            return
        _end(session, row, now, ago=since_s)
    row = Usage(pool=job.pool, holder=job.holder, job_id=job.id, attempt=job.attempt, nodes=nodes)
    session.add(_begun(session, row, now, ago=since_s))


def end_job(session: Session, job: Job, now: float) -> None:
    """End the use by an attempt of a job. If its driver was lost long ago, the use ended with its last heartbeat."""
    last = job.heartbeat_at or job.started_at or now
    for row in session.scalars(_of_attempt(job.id, job.attempt).where(Usage.ended_at.is_(None))):
        _end(session, row, now, until=last if now - last > _LOST_S else None)


def of_attempts(session: Session, attempts: Sequence[tuple[str, int]], now: float) -> dict[tuple[str, int], float]:
    """Return the node-seconds of attempts of jobs up to now. Attempts for which none were recorded are missing.

    Args:
        session: An open transaction.
        attempts: Pairs of the job's id and the attempt's number.
        now: Seconds since the epoch.
    """
    found: dict[tuple[str, int], list[Usage]] = {}
    for row in session.scalars(select(Usage).where(tuple_(Usage.job_id, Usage.attempt).in_(attempts))):
        found.setdefault((row.job_id or "", row.attempt or 0), []).append(row)
    return {attempt: _total(session, rows, now) for attempt, rows in found.items()}


def by_holder(session: Session, pool: str, now: float, *, since: float = 0.0) -> list[HolderUsage]:
    """Return the use of a pool by each holder, the largest first.

    Args:
        session: An open transaction.
        pool: Name of the pool.
        now: Seconds since the epoch.
        since: Time (seconds since the epoch) from which the use counts.
    """
    rows = session.scalars(select(Usage).where(Usage.pool == pool, Usage.ended_at.is_(None) | (Usage.ended_at > since)))
    of_holder: dict[str, list[Usage]] = {}
    for row in rows:
        of_holder.setdefault(row.holder, []).append(row)
    found = []
    for holder, used in of_holder.items():
        leases = [row for row in used if row.lease_id is not None]
        jobs = [row for row in used if row.lease_id is None]
        at_work = [sum(row.nodes for row in rows if row.ended_at is None) for rows in (leases, jobs)]
        seconds = (_total(session, rows, now, since=since) for rows in (leases, jobs))
        found.append(HolderUsage(holder, max(at_work), *seconds))
    return sorted(found, key=lambda one: -max(one.lease_node_seconds, one.job_node_seconds))


def lifetime(session: Session, lease: Lease, now: float) -> float:
    """Return the seconds since a lease was granted; 0 if it waits."""
    shared_now = stamps.shared_now(session, now)
    rows = session.scalars(select(Usage).where(Usage.lease_id == lease.id))
    return sum(_seconds(row, shared_now) if row.node_seconds is None else row.node_seconds / row.nodes for row in rows)


def of_run(session: Session, pool: str, holder: str, lease_id: str | None, now: float) -> float:
    """Return the node-seconds that the leases of a run have used on a pool.

    The run of a workflow engine is known by its holder, and all its leases count. The holder of a plain Python process
    or of a user at a terminal may come again for other work, so only its present lease counts.

    Args:
        session: An open transaction.
        pool: Name of the pool.
        holder: Name of the run.
        lease_id: Id of the run's present lease; None if it has none.
        now: Seconds since the epoch.
    """
    of_this_run = Usage.lease_id == lease_id
    if not holder.startswith(_COMES_AGAIN):
        of_this_run = (Usage.holder == holder) & Usage.lease_id.is_not(None)
    elif lease_id is None:
        return 0.0
    return _sum(session, (Usage.pool == pool) & of_this_run, now)


def of_team(session: Session, pool: str, team: str, now: float, *, since: float) -> float:
    """Return the node-seconds that the leases of a team have used on a pool since a time."""
    return _sum(session, (Usage.pool == pool) & (Usage.team == team), now, since=since)


def of_job(session: Session, job_id: str, now: float) -> float:
    """Return the node-seconds of a job: of all its attempts since the last one that has succeeded."""
    after = session.scalar(select(func.max(Job.attempt)).where(Job.id == job_id, Job.state == JobState.SUCCEEDED)) or 0
    return _sum(session, (Usage.job_id == job_id) & (Usage.attempt > after), now)


def forget_before(session: Session, time: float) -> None:
    """Delete the rows of all pools whose use ended before a time, in seconds since the epoch."""
    session.execute(delete(Usage).where(Usage.ended_at < time))


def _of_attempt(job_id: str, attempt: int) -> Select[Usage]:
    return select(Usage).where(Usage.job_id == job_id, Usage.attempt == attempt)


def _begun(session: Session, row: Usage, now: float, *, ago: float = 0.0) -> Usage:
    row.begun_at = stamps.shared_now(session, now) - ago
    row.begun_clock = stamps.stamp(row.begun_at, ago=ago)
    return row


def _end(session: Session, row: Usage, now: float, *, ago: float = 0.0, until: float | None = None) -> None:
    """End the use that a row describes `ago` seconds before now, and at the time `until` at the latest."""
    shared_now = stamps.shared_now(session, now)
    seconds = max(0.0, _seconds(row, shared_now) - ago)
    if until is not None:
        seconds = min(seconds, max(0.0, until - row.begun_at))
    row.ended_at, row.node_seconds = shared_now - ago if until is None else until, row.nodes * seconds


def _seconds(row: Usage, shared_now: float) -> float:
    """Return for how many seconds the use that a row describes has gone on, by the monotonic clock where it was
    written on this host since its last boot, otherwise by the clock that all hosts share."""
    measured = stamps.age(row.begun_at, row.begun_clock)
    return max(0.0, shared_now - row.begun_at if measured is None else measured)


def _sum(session: Session, which: ColumnElement[bool], now: float, *, since: float = 0.0) -> float:
    """Return the node-seconds of the rows that a condition selects; see `_total`.

    The database adds up the uses that have ended, because the caller may hold the write lock, and a team has thousands
    of rows in a month. Only the others are read.
    """
    ended = session.scalar(
        select(func.sum(Usage.node_seconds)).where(which, Usage.begun_at >= since, Usage.ended_at > since)
    )
    others = select(Usage).where(
        which, Usage.ended_at.is_(None) | ((Usage.begun_at < since) & (Usage.ended_at > since))
    )
    return (ended or 0.0) + _total(session, session.scalars(others).all(), now, since=since)


def _total(session: Session, rows: Sequence[Usage], now: float, *, since: float = 0.0) -> float:
    """Return the node-seconds of several rows. Of a use that began before `since`, only the later part counts."""
    shared_now = stamps.shared_now(session, now)
    total = 0.0
    for row in rows:
        used = row.nodes * _seconds(row, shared_now) if row.node_seconds is None else row.node_seconds
        end = shared_now if row.ended_at is None else row.ended_at
        if row.begun_at < since < end:
            used *= (end - since) / (end - row.begun_at)
        total += used
    return total
