"""Release everything that a run still holds on a pool, and set lost jobs right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import select

from shoal.errors import PoolDownError, PoolNotFoundError, ShoalError
from shoal.jobs.files.leftovers import discard_leftovers
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.submission import attach, list_jobs
from shoal.pool.api import ComputePool
from shoal.pool.api import sweep as sweep_pools
from shoal.state import Store
from shoal.state.codec import storable
from shoal.state.schema import JobState, Lease

log = logging.getLogger(__name__)

_ACTIVE = (JobState.PENDING, JobState.RUNNING)

_AT_ONCE = 1000
"""Unfinished jobs that a sweep looks at; the rest has the next one."""


@dataclass(frozen=True)
class CleanupReport:
    """What was done.

    Attributes:
        cancelled: Ids of the holder's jobs that still ran.
        released: Whether the holder had a lease.
        swept: What else nobody owned on this host, a sentence each.
        left: What only another host can do, and does by itself, a sentence each.
    """

    cancelled: tuple[str, ...]
    released: bool
    swept: tuple[str, ...]
    left: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for an XCom or an artifact."""
        return asdict(self)


def clean_up(pool_name: str, holder: str, *, reason: str = "its run was cleaned up") -> CleanupReport:
    """End what a run still has on a pool: its jobs, its lease, and whatever nobody owns. Safe at any time, and twice.

    From another host than the pool's the jobs are cancelled and the lease is released; the pool's host ends drivers and
    nodes, and the report says so.

    Args:
        pool_name: The pool; one that is gone or down has nothing to clean.
        holder: The run.
        reason: Kept with the jobs that are cancelled.
    """
    holder = storable(holder)
    active = list_jobs(pool_name, states=_ACTIVE, limit=_AT_ONCE)
    # By attempt: the next one may be another run's.
    attempts_of_run = sorted({(job.job_id, job.attempt) for job in active if job.holder == holder})
    mine = [attach(job_id, attempt) for job_id, attempt in attempts_of_run]
    cancelled = tuple(handle.job_id for handle in mine if handle.cancel(reason))
    left = [handle.left for handle in mine if handle.left]
    try:
        pool = ComputePool(pool_name, holder=holder)
        released = pool.release()
        if released and not (status := pool.describe()).is_here:
            left.append(f'host {status.host} ends the nodes of pool "{pool_name}" that no other demand needs')
    except (PoolNotFoundError, PoolDownError):
        released = False
    return CleanupReport(cancelled, released, tuple(sweep()), tuple(left))


def sweep() -> list[str]:
    """End what nobody owns on this host, and set the rows of jobs right whose drivers did not live to do so.

    Safe at any time, concurrently, twice.

    Returns:
        What was done, a sentence each.
    """
    return [*settle_jobs(), *sweep_pools()]


def settle_jobs() -> list[str]:
    """Set the rows of jobs right whose drivers, or submitters, did not live to do so.

    Returns:
        What was done, a sentence each.
    """
    did = []
    for job in list_jobs(states=_ACTIVE, limit=_AT_ONCE):
        try:
            handle = attach(job.job_id, job.attempt)
            lost = handle.end_if_lost()
        except ShoalError as error:  # of a pool on another machine nothing can be said from here
            log.info("job %s is left alone: %s", job.job_id, error)
            continue
        except Exception as error:  # one job that cannot be judged must not keep the others from their turn
            log.exception("job %s could not be judged", job.job_id)
            did.append(f"job {job.job_id}: could not be judged: {type(error).__name__}: {error}")
            continue
        if lost:
            ended = attempts.load(Store(), Key(job.job_id, handle.attempt))
            did.append(f"job {job.job_id}, attempt {handle.attempt}: {ended.state.value}, {ended.error}")
    return [*did, *discard_leftovers(Store())]


def clean_up_everywhere(holder: str, *, reason: str) -> list[str]:
    """Call `clean_up` on every pool where a run has something; one that raises is reported, and the others follow.

    Args:
        holder: The run.
        reason: Kept with the jobs that are cancelled.

    Returns:
        What was done, a sentence each.
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
    """End what runs of a workflow engine that have ended still have on any pool; a janitor calls it.

    Args:
        engine: First part of its holders' names: ``airflow``, ``prefect``.
        why_ended: Given the rest of a holder's name, how that run ended; None where it goes on, or nothing is known of
            it: it may be another server's.

    Returns:
        What was done, a sentence each.
    """
    done = []
    for holder in sorted({of for _, of in _claims() if of.startswith(f"{engine}:")}):
        reason = why_ended(holder.removeprefix(f"{engine}:"))
        if reason:
            done += clean_up_everywhere(holder, reason=reason)
    return done


def _claims() -> set[tuple[str, str]]:
    """(pool, holder) of every lease and of every job that has not ended."""
    with Store().reading() as session:
        leases = {(lease.pool, lease.holder) for lease in session.scalars(select(Lease))}
    return leases | {(job.pool, job.holder) for job in list_jobs(states=_ACTIVE, limit=_AT_ONCE)}
