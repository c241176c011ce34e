"""Clean up: cancel a run's jobs, release its leases of nodes, and sweep this host."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import or_, select

from shoal import history
from shoal.errors import PoolDownError, PoolNotFoundError
from shoal.history import acting_as
from shoal.jobs.journal import attempts
from shoal.jobs.reconcile import look
from shoal.jobs.reconcile.rounds import settle_jobs
from shoal.jobs.submission import MOST_LISTED, attach
from shoal.pool.api import ComputePool, sweep_nodes
from shoal.pool.holder import ALL_TEAMS, Notice, ends_with, job_holder, job_of, python_holder, run_of, whole_run
from shoal.pool.journal import commands
from shoal.pool.journal.rows import JournalStep, transaction
from shoal.pool.selection import which_pool
from shoal.state import Store
from shoal.state.databases import storable
from shoal.state.schema import JOB_ACTIVE, ActionKind, Job, JobState, Lease

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CleanupReport:
    """Report of the actions that one call of `clean_up` has taken for a run.

    Attributes:
        cancelled: Ids of the run's jobs that were cancelled.
        released: Whether the run had leases of nodes, which were released.
        swept: Actions that `sweep` has taken on this host, one sentence each: those that concern the run or the nodes
            of the pool. A last sentence contains the number of all other actions.
        left: Actions that are still to be done and that another host does by itself, one sentence each.
    """

    cancelled: tuple[str, ...]
    released: bool
    swept: tuple[str, ...]
    left: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return this report as plain data, for an Airflow XCom or a Prefect artifact."""
        return asdict(self)


def clean_up(
    pool_name: str,
    holder: str,
    *,
    reason: str = "the run of the job was cleaned up",
    is_cancelled: bool = False,
) -> CleanupReport:
    """Cancel the jobs of a workflow run on a pool, release the run's leases of nodes, and clean this host with `sweep`.

    The report names no other runs, because several workflow engines may share a store. The record of actions
    (`shoal history`) names them.

    For a flow run of Prefect, the function also ends the jobs and leases of the runs that it has called. For a block of
    `shoal.prefect.pool_lease`, it ends only the jobs and leases inside the block.

    The function may be called at any time and repeatedly. If the pool is on another host, this function only cancels
    the jobs and releases the lease in the store. The pool's host then ends the drivers and nodes, and the report lists
    these actions as `left`.

    Args:
        pool_name: Name of the pool; a pool that is gone or down has nothing to clean up.
        holder: Name of the run or block that holds the jobs and the leases.
        reason: Text that is stored as the error of the cancelled jobs.
        is_cancelled: Whether the run was cancelled. Then the jobs of the deployments that it has started with Prefect's
            ``run_deployment`` are ended, too.
    """
    with suppress(PoolNotFoundError):
        which_pool(Store(), pool_name)  # the caller has named the pool, so this home may act on it
    return _clean_up(pool_name, storable(holder), reason, is_cancelled=is_cancelled, with_others=False)


def _clean_up(pool_name: str, holder: str, reason: str, *, is_cancelled: bool, with_others: bool) -> CleanupReport:
    active = attempts.newest(Store(), pool=pool_name, states=JOB_ACTIVE, limit=MOST_LISTED)
    # Cancel only the attempts of this DAG run or flow run, not whole jobs. A newer attempt of the same job may belong
    # to another DAG run or flow run.
    attempts_of_run = sorted(
        (job.id, job.attempt)
        for job in active
        if ends_with(job.holder, job.ancestors, holder, is_cancelled=is_cancelled)
    )
    mine = [attach(job_id, attempt, actor=holder) for job_id, attempt in attempts_of_run]
    cancelled = tuple(handle.job_id for handle in mine if handle.cancel(reason))
    left = [handle.left for handle in mine if handle.left]
    try:
        # The lease belongs to the run that is cleaned up, whatever the team of this process is.
        pool = ComputePool(pool_name, holder=holder, team=ALL_TEAMS, is_named=False)
        released = pool.release()
        if released and not (status := pool.describe()).is_here:
            left.append(f'host {status.host} ends the nodes of pool "{pool_name}" that nothing else needs')
    except (PoolNotFoundError, PoolDownError):
        released = False
    did = sweep()
    swept = did if with_others else _of_run(pool_name, holder, did)
    return CleanupReport(cancelled, released, tuple(swept), tuple(left))


def _of_run(pool_name: str, holder: str, did: list[str]) -> list[str]:
    """Return the sentences of a sweep that concern a workflow run, and one with the number of the others."""
    notices = list(map(Notice.of, did))
    job_ids = {job_id for each in notices if each.holder and (job_id := job_of(each.holder))}
    owners = select(Job.id, Job.holder, Job.ancestors).where(Job.id.in_(job_ids))
    rows = Store().rows(owners) if job_ids else []
    jobs = {job_holder(each.id) for each in rows if ends_with(each.holder, each.ancestors, holder)}

    def is_own(notice: Notice) -> bool:
        if notice.holder is None:
            return notice.pool == pool_name
        return notice.holder in jobs or whole_run(notice.holder) == whole_run(holder)

    own = [str(each) for each in notices if is_own(each)]
    others = len(notices) - len(own)
    return [*own, f"other actions on this host: {others} (see shoal history)"] if others else own


def sweep(store: Store | None = None) -> list[str]:
    """End the nodes on this host that no pool needs any more, and record the end of lost jobs (see `settle_jobs`).

    The function may be called at any time, repeatedly, and by several processes at the same time.

    Args:
        store: The state store. Default: ``$SHOAL_STATE_URL``, else SQLite in ``$SHOAL_HOME``.

    Returns:
        The actions that were taken, one sentence each.
    """
    store = store or Store()
    did = [*settle_jobs(store), *sweep_nodes(store)]
    history.record_sweep(store, did, holder=python_holder())
    return did


def clean_up_everywhere(
    holder: str, *, reason: str, is_cancelled: bool = False, with_others: bool = False
) -> list[str]:
    """Call `clean_up` for every pool on which a workflow run has an unfinished job or a lease of nodes.

    An error on one pool is logged and reported, and the function goes on with the next pool.

    Args:
        holder: Name of the run.
        reason: Text that is stored as the error of the cancelled jobs.
        is_cancelled: Whether the run was cancelled; see `clean_up`.
        with_others: Whether to return what the sweeps have done for other runs, too, as a janitor does.
    """
    done: list[str] = []
    holder = storable(holder)
    owned = [each for each in _owned() if ends_with(each.holder, each.ancestors, holder, is_cancelled=is_cancelled)]
    for pool in sorted({each.pool for each in owned}):
        try:
            report = _clean_up(pool, holder, reason, is_cancelled=is_cancelled, with_others=with_others)
        except Exception as error:
            log.exception("the jobs and leases of %s on pool %s could not be cleaned up", holder, pool)
            done.append(
                f"{pool}: the jobs and leases of {holder} could not be cleaned up: {type(error).__name__}: {error}"
            )
            continue
        done += [f"{pool}: cancelled job {job_id}: {reason}" for job_id in report.cancelled]
        done += [f"{pool}: released the lease of {holder}: {reason}"] if report.released else []
        done += [*report.swept, *report.left]
    return done


@dataclass(frozen=True)
class RunEnd:
    """End of a workflow run, as its workflow engine has recorded it.

    Attributes:
        reason: Text that is stored as the error of the cancelled jobs.
        is_cancelled: Whether the run was cancelled; see `clean_up`.
        is_doubtful: Whether the engine has only missed the run's heartbeats, so that the run may still go on.
    """

    reason: str
    is_cancelled: bool = False
    is_doubtful: bool = False


def clean_up_ended_runs(engine: str, end_of: Callable[[str], RunEnd | None]) -> list[str]:
    """Cancel the jobs and release the leases of a workflow engine's ended runs, on all pools.

    A run whose end is doubtful is left alone while a process still waits for one of its jobs.

    The engine's janitor (a scheduled DAG or flow) calls this function.

    Args:
        engine: Name of the workflow engine, with which the names of its runs as holders begin.
        end_of: Function that returns the end of a run by its name without the engine; None if the run has not ended.

    Returns:
        One sentence for each action, and for each run that was left alone.
    """
    done = []
    holders = {run_of(holder) for each in _owned() for holder in (each.holder, *(each.ancestors or {}))}
    for holder in sorted(each for each in holders if each.startswith(f"{engine}:")):
        if (end := end_of(holder.removeprefix(f"{engine}:"))) is None:
            continue
        if end.is_doubtful:
            now = time.time()
            active = attempts.newest(Store(), pool=None, states=JOB_ACTIVE, limit=MOST_LISTED)
            mine = (job for job in active if ends_with(job.holder, job.ancestors, holder))
            if awaited := next((job for job in mine if look.is_awaited(job, now)), None):
                why = f"a process still waits for its job {awaited.id}"
                done.append(f"{holder} was left alone, although {end.reason}: {why}")
                continue
        with acting_as(f"{engine}:janitor"):
            done += clean_up_everywhere(holder, reason=end.reason, is_cancelled=end.is_cancelled, with_others=True)
    return done


def is_in_use(holder: str) -> bool:
    """Return whether a workflow run has a lease of nodes or an unfinished job."""
    has_lease = select(Lease.id).where(Lease.holder == holder).exists()
    has_job = select(Job.id).where(Job.state.in_(JOB_ACTIVE), Job.holder == holder).exists()
    return bool(Store().scalar(select(or_(has_lease, has_job))))


def end_in_store(
    *, reason: str, owns_lease: Callable[[str], bool], owns_job: Callable[[str, str | None], bool]
) -> list[str]:
    """Record in the store that jobs and leases of a failed run have ended, without contacting a cluster.

    The driver of a running job reads this record within 2 s, and then ends itself. The leases expire, and the
    reconciler of the pool's host ends the nodes that nothing else needs. Unlike this function, `clean_up` also waits
    until the drivers have ended.
    """
    store = Store(migrate=False)
    if not store.exists() or not store.has_tables():
        return []
    did = []
    for job in attempts.newest(store, pool=None, states=JOB_ACTIVE, limit=MOST_LISTED):
        key = attempts.Key(job.id, job.attempt)
        if owns_job(job.holder, job.task_key) and attempts.end(
            store, key, JobState.CANCELLED, time.time(), error=reason, actor=job.holder
        ):
            did.append(f"{job.pool}: cancelled job {job.id}: {reason}")
    for lease in store.scalars(select(Lease)):
        if not owns_lease(lease.holder):
            continue
        with transaction(store, JournalStep.REQUEST) as session:
            now = time.time()
            if not commands.let_expire(session, lease.id, lease.epoch, now):
                continue
            history.record(
                session,
                ActionKind.RELEASED,
                lease.holder,
                holder=lease.holder,
                at=now,
                pool=lease.pool,
                detail=reason,
            )
        did.append(f"{lease.pool}: the lease of {lease.holder} expires: {reason}")
    return did


def _owned() -> list[Job | Lease]:
    """Return the rows of all unfinished jobs and all leases of nodes."""
    store = Store()
    return [*store.scalars(select(Lease)), *attempts.newest(store, pool=None, states=JOB_ACTIVE, limit=MOST_LISTED)]
