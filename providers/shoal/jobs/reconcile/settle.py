"""Record the end of lost jobs, and start jobs that wait for room: ``python -m shoal.jobs.reconcile.settle``.

The reconciler starts this program when a job's row in the store has not changed for some time. The reconciler itself
sends no requests to the heads of pools. The program ends when no job waits for room. A driver that has ended its job
starts the next jobs itself, with the same function (`start_next`).

A job is lost if its driver or its submitter died before the end of the job was recorded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sqlalchemy import select

from shoal.errors import ShoalError
from shoal.jobs.files.retention import discard_leftovers
from shoal.jobs.journal import attempts, job_queue
from shoal.jobs.reconcile.look import Target
from shoal.jobs.reconcile.rounds import host_round, start_next
from shoal.jobs.timeouts import QUEUE_PERIOD_S
from shoal.pool.bound_host import is_here
from shoal.pool.holder import Notice, job_holder
from shoal.state import Store
from shoal.state.home import lock_file, open_locked
from shoal.state.schema import JobState, Pool

log = logging.getLogger("shoal.settle")

SETTLE_EVERY = 30
"""Checks of the queues between two checks of all unfinished jobs, some of which must not wait any more."""

_AT_ONCE = 1000
"""One sweep checks at most this number of running jobs, and at most this number of pending jobs."""


def settle_jobs(store: Store | None = None) -> list[str]:
    """Record the end of jobs whose driver or submitter has died, and remove the temporary files of ended jobs."""
    did: list[str] = []
    store = store or Store()
    # Running jobs and pending jobs have separate limits, so that running jobs are checked even if there are very many
    # pending jobs. Jobs that no process waits for are checked first, because a process that waits for a job checks the
    # job itself.
    states = (JobState.RUNNING, JobState.PENDING)
    for key in [key for state in states for key in attempts.least_recently_polled(store, state, _AT_ONCE)]:
        if key.problem:
            did.append(key.problem)
            continue
        try:
            lost = host_round(Target(store, key, attempts.load(store, key).pool))
        except ShoalError as error:
            # A ShoalError is expected here, for example if the job's pool is on another host. In that case, that host
            # checks the job.
            log.debug("job %s was not checked: %s", key.job_id, error)
            continue
        except Exception as error:  # log the unexpected error, and go on with the check of the other jobs
            log.exception("job %s could not be checked", key.job_id)
            sentence = f"job {key.job_id}: could not be checked: {type(error).__name__}: {error}"
            did.append(Notice(sentence, job_holder(key.job_id)))
            continue
        if lost:
            ended = attempts.load(store, key)
            sentence = f"job {key.job_id}, attempt {key.attempt}: {ended.state.value}, {ended.error}"
            did.append(Notice(sentence, job_holder(key.job_id)))
    return [*did, *discard_leftovers(store)]


def start_waiting_jobs(sleep: Callable[[float], None] = time.sleep) -> None:
    """Start the waiting jobs of this host's pools as soon as the pools have room, until no job waits any more.

    The function starts jobs that no process waits for, and ends jobs that must not wait any more. Only one process of a
    host runs this function at a time; a call in a second process returns at once.
    """
    store = Store()
    with open_locked(lock_file("queue"), wait=False) as mine:
        rounds = 0
        while mine and store.exists() and (pools := _pools_with_queue(store)):
            for pool in pools:
                start_next(store, pool)
            sleep(QUEUE_PERIOD_S)
            rounds += 1
            if rounds % SETTLE_EVERY == 0:
                settle_jobs()


def _pools_with_queue(store: Store) -> list[str]:
    """Return the sorted names of those pools of this host on which at least one job waits."""
    with store.reading() as session:
        here = {pool.name for pool in session.scalars(select(Pool)) if is_here(pool)}
    return sorted(job_queue.pools_with_queue(store) & here)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for sentence in settle_jobs():
        log.info(sentence)
    start_waiting_jobs()
