"""Rounds of reconciling: those of a process that waits for an attempt, and those of a host for all its jobs.

The reconciler starts this module as a program when a job's row has not changed for some time, because the reconciler
itself sends no requests to the heads of pools. The program ends when no job waits for room. A driver that has ended
its job starts the next jobs itself, with the same function (`start_next`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from sqlalchemy import select

from shoal.errors import ShoalError, StoreError, TeamError
from shoal.jobs import credentials
from shoal.jobs.files.retention import discard_leftovers
from shoal.jobs.journal import attempts, job_queue
from shoal.jobs.journal.attempts import End, Key
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.reconcile import acts, decide, look
from shoal.jobs.reconcile.acts import Supplies
from shoal.jobs.reconcile.decide import PATIENCE_S, Cancel, Facts, Step
from shoal.jobs.reconcile.look import PollTimer, Target
from shoal.jobs.scheduling import Place
from shoal.jobs.timeouts import QUEUE_PERIOD_S, TURN_CHECK_PER_PLACE_S, TURN_CHECK_S, TURN_PATIENCE_S
from shoal.os_processes import ProcessId
from shoal.own_pauses import waited_since
from shoal.pool.api import ComputePool
from shoal.pool.bound_host import is_here
from shoal.pool.holder import Notice, job_holder, run_of, runs_around
from shoal.state import Store
from shoal.state.home import lock_file, open_locked
from shoal.state.schema import JOB_ENDED, Job, JobState, Lease, Pool

log = logging.getLogger("shoal.jobs.reconcile.rounds")


class Waiter:
    """Rounds of a process that waits for an attempt, and what it remembers between them.

    Args:
        target: The attempt.
        supplies: What this process gives to the job if it submits the job.
        shares_looks: Whether a look at the queue may be that of another waiter of this process, a second ago.
    """

    def __init__(self, target: Target, supplies: Supplies | None = None, *, shares_looks: bool = False) -> None:
        self._target = target
        self._shares_looks = shares_looks
        self._supplies = supplies or Supplies()
        self._silent_since: float | None = None
        self._heartbeat_at: float | None = None
        self._room_since: dict[Key, float] = {}
        self._poll_timer = PollTimer()
        self.place: Place | None = None
        """The attempt's place in its pool's queue in the last round."""

    @property
    def turn_check_s(self) -> float:
        """Return the seconds until the next round of an attempt that waits in the queue."""
        return TURN_CHECK_S + TURN_CHECK_PER_PLACE_S * (self.place.position if self.place else 1)

    def poll(self) -> Job:
        """Poll the job (update its `last_polled_at`) if the last poll is old enough, and return the job's row."""
        target = self._target
        job = attempts.load(target.store, target.key)
        if job.state not in JOB_ENDED and self._poll_timer.is_due(job, target.clock()):
            # While the job waits in the queue, this process renews the job's lease of nodes. When the job runs, the
            # driver renews the lease.
            if is_waiting(job):
                _renew_lease(target, job)
            job = attempts.touch(target.store, target.key, target.clock())
        secrets = self._supplies.secrets
        if secrets is not None and secrets.given:
            credentials.deliver(target.store, job, secrets)
        return job

    def round(self) -> Job:
        """Return the attempt's row. If the driver died without recording the attempt's end, first record the end.

        An attempt that waits in the queue is started if there is room for it.
        """
        target, job = self._target, self.poll()
        if job.state in JOB_ENDED or (job.driver and ProcessId.from_json(job.driver).alive()):
            return job  # a live driver records the end itself, so the head need not be asked
        if is_waiting(job):
            return self._take_turn(job)
        decision = decide.for_waiter(self._facts(job))
        if isinstance(decision, End):
            acts.record(target, job, decision)
        elif decision is Step.SEND:
            acts.send(target, self._supplies)
        return attempts.load(target.store, target.key)

    def _facts(self, job: Job) -> Facts:
        view = look.view(self._target, job)
        now = self._target.monotonic()
        # A driver that writes heartbeats into the store is running, even if this process cannot reach the pool's head.
        has_heartbeat = job.heartbeat_at != self._heartbeat_at
        self._heartbeat_at = job.heartbeat_at
        if view.silence not in PATIENCE_S or has_heartbeat:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        silent_for = 0.0 if self._silent_since is None else waited_since(self._silent_since, now)
        return look.facts(self._target, job, view, silent_for)

    def _take_turn(self, job: Job) -> Job:
        """Start this waiting attempt if its pool has room for it now, and return the attempt's row.

        Other waiting attempts are also started if the pool has had room for them for some seconds, because no other
        process seems to wait for these attempts.
        """
        target = self._target
        line = (job_queue.shared_look if self._shares_looks else job_queue.look)(target.store, target.pool)
        self.place = line.places.get(target.key)
        now = target.monotonic()
        self._room_since = {key: self._room_since.get(key, now) for key in line.free_for}
        overdue = [key for key, since in self._room_since.items() if now - since > TURN_PATIENCE_S]
        try:
            too_long = job_queue.why_waited_too_long(job, target.clock())
            if target.key in line.free_for or not line.has_nodes or too_long:
                start_if_room(target)
                job = attempts.load(target.store, target.key)
            for key in overdue:
                if key != target.key:
                    start_if_room(replace(target, key=key))
        except (StoreError, TeamError) as error:
            # The error is only logged, because the next round tries again to start the attempt.
            log.warning("the queue of pool %s could not be changed: %s", target.pool, error)
        return job


def host_round(target: Target) -> bool:
    """End the attempt if it was lost, has waited for too long, or is not polled by any process; send it if its
    submitter has died. The call does not poll the job.
    """
    job = attempts.load(target.store, target.key)
    if job.state in JOB_ENDED:
        return False
    decision = decide.for_host(look.facts(target, job, look.view(target, job)))
    match decision:
        case End():
            return acts.record(target, job, decision)
        case Cancel(reason):
            return acts.cancel(target, job, reason, seen={job.state}).is_done
        case Step.SEND:
            acts.send(target, Supplies())
    return False


def start_if_room(target: Target) -> None:
    """Start a waiting attempt if its pool has room for it now, or end it if it must not wait any more."""
    job = attempts.load(target.store, target.key)
    if not is_waiting(job):
        return
    decision = decide.in_queue(look.facts(target, job, look.view(target, job)))
    if isinstance(decision, End):
        acts.record(target, job, decision)
    elif decision is Step.ADMIT:
        acts.admit(target)


def start_next(store: Store, pool: str) -> None:
    """Start the waiting jobs for which a pool has room now; do nothing if no job waits.

    A driver calls this function after it has recorded the end of its job, so that the next job does not wait until
    another process checks the queue. If the driver is killed before this call, another process starts the next job.
    """
    for key in job_queue.look(store, pool).free_for:
        try:
            start_if_room(Target(store, key, pool))
        except ShoalError as error:  # an error is expected here, for example if the pool was deleted
            log.info("job %s was not started: %s", key.job_id, error)


def _renew_lease(target: Target, job: Job) -> None:
    """Renew the lease of nodes of a waiting job when a third of the lease's time has passed."""
    runs = runs_around(job.holder, job.ancestors)
    leases = target.store.scalars(select(Lease).where(Lease.pool == job.pool))
    held = [lease for lease in leases if run_of(lease.holder) in runs]
    if all(lease.expires_at - target.clock() > lease.ttl * 2 / 3 for lease in held):
        return
    try:
        ComputePool(job.pool, holder=job.holder, ancestors=job.ancestors, store=target.store, is_named=False).renew()
    except ShoalError as error:
        log.warning("the lease of %s could not be renewed: %s", job.holder, error)


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
        else:
            if not lost:
                continue
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
        while mine and store.exists():
            here = {pool.name for pool in store.scalars(select(Pool)) if is_here(pool)}
            if not (pools := job_queue.pools_with_queue(store) & here):
                return
            for pool in sorted(pools):
                start_next(store, pool)
            sleep(QUEUE_PERIOD_S)
            rounds += 1
            if rounds % SETTLE_EVERY == 0:
                settle_jobs()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for sentence in settle_jobs():
        log.info(sentence)
    start_waiting_jobs()
