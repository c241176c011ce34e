"""Cancel the jobs of a workflow run on a pool, release its leases of nodes, and record the end of lost jobs.

A job is lost if its driver or its submitter died before it could record the end of the job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import select

from shoal.errors import PoolDownError, PoolNotFoundError, ShoalError
from shoal.jobs.files.sweep import discard_leftovers
from shoal.jobs.journal import admission, attempts
from shoal.jobs.submission import MOST_LISTED, attach, list_jobs
from shoal.pool.api import ComputePool
from shoal.pool.api import sweep as sweep_pools
from shoal.pool.holder import is_here
from shoal.state import Store
from shoal.state.codec import storable
from shoal.state.home import lock_file
from shoal.state.locks import open_locked
from shoal.state.schema import JobState, Lease, Pool

log = logging.getLogger(__name__)

_ACTIVE = (JobState.PENDING, JobState.RUNNING)

_QUEUE_PERIOD_S = 1.0
"""Seconds between two checks of the queues by the process that starts waiting jobs."""

_SETTLE_EVERY = 30
"""Number of checks of the queues after which all unfinished jobs are checked once. That check ends the jobs that must
not wait any more, for example because their timeout is over."""

_AT_ONCE = 1000
"""Largest number of running jobs, and of pending jobs, that one sweep checks."""


@dataclass(frozen=True)
class CleanupReport:
    """Report of the actions that one call of `clean_up` has taken for a run.

    Attributes:
        cancelled: Ids of the run's jobs that were cancelled.
        released: Whether the run had a lease of nodes, which was released.
        swept: Actions that `sweep` has taken on this host, one sentence each.
        left: Actions that are still to be done and that another host does by itself, one sentence each.
    """

    cancelled: tuple[str, ...]
    released: bool
    swept: tuple[str, ...]
    left: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the actions that the clean-up has taken as plain data, for an Airflow XCom or a Prefect artifact."""
        return asdict(self)


def clean_up(pool_name: str, holder: str, *, reason: str = "the run of the job was cleaned up") -> CleanupReport:
    """Cancel a workflow run's jobs on a pool, release its lease of nodes, and tidy up this host with `sweep`.

    The function may be called at any time and repeatedly. If the pool is on another host, this function only cancels
    the jobs and releases the lease in the store. The pool's host then ends the drivers and nodes; the report mentions
    that.

    Args:
        pool_name: Name of the pool; a pool that is gone or down has nothing to clean up.
        holder: Name of the run that holds the jobs and the lease.
        reason: Stored as the error of the cancelled jobs.
    """
    holder = storable(holder)
    active = list_jobs(pool_name, states=_ACTIVE, limit=MOST_LISTED)
    # Cancel this run's attempts, not whole jobs: a newer attempt of the same job may belong to another run.
    attempts_of_run = sorted({(job.job_id, job.attempt) for job in active if job.holder == holder})
    mine = [attach(job_id, attempt) for job_id, attempt in attempts_of_run]
    cancelled = tuple(handle.job_id for handle in mine if handle.cancel(reason))
    left = [handle.left for handle in mine if handle.left]
    try:
        pool = ComputePool(pool_name, holder=holder)
        released = pool.release()
        if released and not (status := pool.describe()).is_here:
            left.append(f'host {status.host} ends the nodes of pool "{pool_name}" that nothing else needs')
    except (PoolNotFoundError, PoolDownError):
        released = False
    return CleanupReport(cancelled, released, tuple(sweep()), tuple(left))


def sweep() -> list[str]:
    """End unneeded nodes on this host, record the end of jobs whose driver or submitter died, and remove their files.

    The function may be called at any time, repeatedly, and by several processes at the same time.

    Returns:
        The actions that were taken, one sentence each.
    """
    return [*settle_jobs(), *sweep_pools()]


def settle_jobs() -> list[str]:
    """Record the end of jobs whose driver or submitter died before recording the end, and remove the jobs' files.

    Returns:
        The actions that were taken, one sentence each.
    """
    did = []
    store = Store()
    # One query lists the running jobs, another one the pending jobs: in a common list, which is limited to `_AT_ONCE`
    # jobs, many pending jobs could leave no room for the running ones. Of a list that is too long, the jobs that no
    # process waits for come first: a process that waits for a job checks it itself.
    states = (JobState.RUNNING, JobState.PENDING)
    for key in [key for state in states for key in attempts.least_recently_polled(store, state, _AT_ONCE)]:
        try:
            lost = attach(key.job_id, key.attempt).end_if_lost()
        except ShoalError as error:  # expected; for example, the pool is on another host, which checks the job
            log.info("job %s was not checked: %s", key.job_id, error)
            continue
        except Exception as error:  # log the unexpected error, and go on with the check of the other jobs
            log.exception("job %s could not be checked", key.job_id)
            did.append(f"job {key.job_id}: could not be checked: {type(error).__name__}: {error}")
            continue
        if lost:
            ended = attempts.load(store, key)
            did.append(f"job {key.job_id}, attempt {key.attempt}: {ended.state.value}, {ended.error}")
    return [*did, *discard_leftovers(store)]


def start_waiting_jobs(sleep: Callable[[float], None] = time.sleep) -> None:
    """Start the waiting jobs of this host's pools as soon as the pools have room, until no job waits any more.

    The function starts jobs that no process waits for, and ends jobs that must not wait any more. Only one process of a
    host runs this function at a time; a call in a second process returns at once.

    Args:
        sleep: Waits for a number of seconds.
    """
    store = Store()
    with open_locked(lock_file("queue"), wait=False) as mine:
        rounds = 0
        while mine and store.exists() and (pools := _pools_with_queue(store)):
            for pool in pools:
                for key in admission.look(store, pool).free_for:
                    try:
                        attach(key.job_id, key.attempt).start_if_room()
                    except ShoalError as error:  # an expected error; for example, the pool was deleted
                        log.info("job %s was not started: %s", key.job_id, error)
            sleep(_QUEUE_PERIOD_S)
            rounds += 1
            if rounds % _SETTLE_EVERY == 0:
                settle_jobs()


def _pools_with_queue(store: Store) -> list[str]:
    """Return the sorted names of those pools of this host on which at least one job waits."""
    with store.reading() as session:
        here = {pool.name for pool in session.scalars(select(Pool)) if is_here(pool)}
    return sorted(admission.pools_with_queue(store) & here)


def clean_up_everywhere(holder: str, *, reason: str) -> list[str]:
    """Call `clean_up` for every pool on which a workflow run has an unfinished job or a lease of nodes.

    An error on one pool is logged and reported, and the function goes on with the next pool.

    Args:
        holder: Name of the run.
        reason: Stored as the error of the cancelled jobs.

    Returns:
        The actions that were taken, one sentence each.
    """
    done: list[str] = []
    holder = storable(holder)
    for pool in sorted(pool for pool, of in _claims() if of == holder):
        try:
            report = clean_up(pool, holder, reason=reason)
        except Exception as error:
            log.exception("pool %s could not be cleaned up after %s", pool, holder)
            done.append(f"{pool}: could not be cleaned up after {holder}: {type(error).__name__}: {error}")
            continue
        done += [f"{pool}: cancelled job {job_id}: {reason}" for job_id in report.cancelled]
        done += [f"{pool}: released the lease of {holder}: {reason}"] if report.released else []
        done += [*report.swept, *report.left]
    return done


def clean_up_ended_runs(engine: str, why_ended: Callable[[str], str | None]) -> list[str]:
    """Cancel the jobs and release the leases of those runs of a workflow engine that have ended, on all pools.

    The engine's janitor (a scheduled DAG or flow) calls this function.

    Args:
        engine: First part of the holder names of the engine's runs: ``airflow`` or ``prefect``.
        why_ended: Function that gets the rest of a holder's name, and returns how that run ended, as text. It returns
            None for a run that goes on, and for an unknown run, which may belong to another server.

    Returns:
        The actions that were taken, one sentence each.
    """
    done = []
    for holder in sorted({of for _, of in _claims() if of.startswith(f"{engine}:")}):
        reason = why_ended(holder.removeprefix(f"{engine}:"))
        if reason:
            done += clean_up_everywhere(holder, reason=reason)
    return done


def _claims() -> set[tuple[str, str]]:
    """Return the pairs (name of the pool, name of the run) of all leases of nodes and all unfinished jobs."""
    with Store().reading() as session:
        leases = {(lease.pool, lease.holder) for lease in session.scalars(select(Lease))}
    return leases | {(job.pool, job.holder) for job in list_jobs(states=_ACTIVE, limit=MOST_LISTED)}
