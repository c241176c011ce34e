"""Triggers with which deferred tasks wait for jobs and for nodes in Airflow's triggerer, without a slot of a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from shoal.airflow.store_polling import Update, Wait, WaitTrigger, isolated
from shoal.errors import PoolNotFoundError, ScaleError
from shoal.jobs.files.logs import LogFollower
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Mark
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.reconcile import acts
from shoal.jobs.reconcile.look import PollTimer, Target, log_follower
from shoal.jobs.reconcile.rounds import Waiter
from shoal.pool.api import ComputePool
from shoal.pool.journal import rows
from shoal.pool.scaling_plan import Snapshot
from shoal.pool.selection import which_pool
from shoal.pool.status import PoolStatus, status_of
from shoal.state import Store
from shoal.state.schema import JOB_ENDED, Job, JobState, Operation, OperationState

_SILENT_S = 15.0
"""Seconds without a heartbeat of a job's driver after which the trigger asks the pool's head node whether the driver
still runs. A running driver writes a heartbeat every few seconds."""

_COPY_S = 30.0
"""Seconds between two reads of a log that is on another machine. Ray's API returns the whole log each time."""

_MARK_S = 30.0
"""Longest time in seconds between two writes of the current position in a job's log to the store. If the triggerer is
killed, the next triggerer repeats the log lines since the last write."""

_MOST_LOG_BYTES = 256 * 1024
"""Largest number of bytes that are read from a log at a time, so that a long log does not delay the other waits."""


_CANCELLING = ThreadPoolExecutor(8, "shoal-cancelling")
"""Threads that cancel jobs. Cancelling a job takes seconds. The event loop's own threads are not used, because there
are few of them and all triggers need them."""


class JobWait(Wait):
    """Object that waits for the end of an attempt of a job.

    Args:
        trigger: The trigger that waits.
    """

    def __init__(self, trigger: JobTrigger) -> None:
        super().__init__(trigger.poll_interval)
        self.key = Key(trigger.job_id, trigger.attempt)
        self.pool = trigger.pool
        self.task_try = trigger.task_try
        self.log_position = trigger.log_position
        self.wants_credentials = False
        self._waiter: Waiter | None = None
        self._follower: LogFollower | None = None
        self._poll_timer = PollTimer()
        self._heartbeat: float | None = None
        self._marked = self.log_position
        self._silent_since = self._settled = self._copied = self._marked_at = time.monotonic()
        self._shown_place = ""

    @classmethod
    def look_at_all(cls, store: Store, waits: Collection[JobWait]) -> None:
        """Read the jobs of all waits with one query, send each wait its update, and record in the store that a process
        polls these jobs."""
        jobs = attempts.look_at(store, {wait.key for wait in waits})
        marks = []
        for wait in waits:
            job = jobs.get(wait.key)
            if job is None or job.state in JOB_ENDED:
                wait.send(Update(is_over=True))
                continue
            if job.state is JobState.PENDING and job.driver_key is not None:
                wait.wants_credentials = True
                wait.send(Update(is_over=True))
                continue
            with isolated(f"job {wait.key.job_id}"):
                wait._see(store, job)
            # A mark records two facts: that a process polls the job, and how far the job's log was copied.
            now, position = time.monotonic(), wait.log_position
            is_behind = position != wait._marked and now - wait._marked_at >= _MARK_S
            if wait._poll_timer.is_due(job, time.time()) or is_behind:
                wait._marked, wait._marked_at = position, now
                marks.append(Mark(wait.key, position, wait.task_try))
        if marks:
            attempts.touch_all(store, marks, time.time())

    def _see(self, store: Store, job: Job) -> None:
        if self._waiter is None or self._follower is None:
            # An earlier triggerer may have waited for this job, and have copied its log up to `log_shown`.
            if job.task_try == self.task_try and job.log_shown is not None:
                self.log_position = job.log_shown
            if self.pool is not None:
                with suppress(PoolNotFoundError):
                    which_pool(store, self.pool)  # this home may act on the pool that the task has named
            target = Target(store, self.key, job.pool, actor=job.holder)
            self._waiter, self._follower = Waiter(target), log_follower(target, self.log_position)
        now = time.monotonic()
        if job.heartbeat_at != self._heartbeat:
            self._heartbeat, self._silent_since = job.heartbeat_at, now
        if self.is_busy:
            return
        if job.state is JobState.RUNNING and self._follower.has_file:
            self._read_log(self._follower)
        elif job.state is JobState.RUNNING and now - self._copied >= _COPY_S:
            self._copied = now
            self.wanted = lambda follower=self._follower: self._read_log(follower)
            return
        if is_waiting(job):
            is_due = now - self._settled >= self._waiter.turn_check_s
        else:
            is_due = now - max(self._silent_since, self._settled) >= _SILENT_S
        if is_due:
            self._settled = now
            self.wanted = lambda waiter=self._waiter: self._reconcile(waiter)

    def _read_log(self, follower: LogFollower) -> None:
        lines = tuple(follower.lines(ended=False, most_bytes=_MOST_LOG_BYTES))
        if lines:
            self.send(Update(lines, follower.position))

    def _reconcile(self, waiter: Waiter) -> None:
        """Start the job if it is queued and its pool has enough free resources, or record the job's end if its driver
        was lost."""
        job = waiter.round()
        place = str(waiter.place or "")
        if place and place != self._shown_place:
            self._shown_place = place
            self.send(Update([f"waiting for room on pool {job.pool}: {place}"]))


@dataclass(kw_only=True, eq=False, repr=False)
class JobTrigger(WaitTrigger):
    """Trigger that waits until an attempt of a job has ended, and copies the job's log to the task's log.

    If the triggerer is killed, the next triggerer may repeat the log lines of the last 30 s.

    :param job_id: Id of the job.
    :param attempt: Number of the attempt.
    :param submissions: Number of submissions of the job when the task was deferred. If the job was submitted again
        since then, the job belongs to a newer try of the task.
    :param task_try: Number of the try of the task.
    :param log_position: Position in the job's log up to which the lines are in the task's log already.
    :param cancel_on_kill: Whether the job is cancelled if a user marks or clears the task.
    :param pool: Name of the job's pool, as the task has named it. None: an earlier version has deferred the task.
    """

    job_id: str
    attempt: int
    submissions: int
    task_try: int
    log_position: int = 0
    cancel_on_kill: bool = True
    pool: str | None = None

    def new_wait(self) -> JobWait:
        """Create the `Wait` object through which the poller of this process sends updates to this trigger."""
        return JobWait(self)

    def event(self, wait: JobWait, *, timed_out: bool) -> dict[str, Any]:
        """Return the payload of the event: the job, and the position in the job's log from which the task continues to
        copy the log."""
        # The triggerer has no credentials. So the task continues in a worker, which sends the credentials and defers
        # the task again.
        wants = {"wants_credentials": True} if wait.wants_credentials else {}
        job = {"job_id": self.job_id, "attempt": self.attempt, "submissions": self.submissions}
        return {**job, "timed_out": timed_out, "log_position": wait.log_position, **wants}

    async def end(self) -> None:
        """Cancel the job, unless a newer try of the task has attached to the job."""
        if not self.cancel_on_kill:
            self.log.info("job %s goes on (cancel_on_kill=False)", self.job_id)
        elif not await asyncio.get_running_loop().run_in_executor(_CANCELLING, self._cancel):
            self.log.info(
                "job %s is not cancelled: it has ended, or a newer try of the task has attached to it", self.job_id
            )

    def _cancel(self) -> bool:
        store, key = Store(), Key(self.job_id, self.attempt)
        job = attempts.load(store, key)
        target = Target(store, key, job.pool, actor=job.holder)
        reason = "the deferred task was marked or cleared"
        return acts.cancel(target, job, reason, most_submissions=self.submissions).is_done


_RENEW_S = 60.0
"""Seconds between two renewals of a lease during a wait, far below the lease's time to live of 15 minutes."""


class PoolWait(Wait):
    """Object that waits for nodes of a pool, or for the end of an operation (a request to change the pool's size).

    Args:
        trigger: The trigger that waits. If it has no `nodes`, only the end of the operation ends the wait; if it has no
            `operation_id`, the wait is only for nodes.
    """

    def __init__(self, trigger: PoolTrigger) -> None:
        super().__init__(trigger.poll_interval)
        self.pool = trigger.pool
        self.holder = trigger.holder
        self.nodes = trigger.nodes
        self.operation_id = trigger.operation_id
        self._client: ComputePool | None = None
        self._renewed = time.monotonic()
        self._shown = ""

    @classmethod
    def look_at_all(cls, store: Store, waits: Collection[PoolWait]) -> None:
        """Read the rows of each pool once, and send an update to each wait for this pool."""
        operations = [wait.operation_id for wait in waits if wait.operation_id is not None]
        with store.reading(snapshot=False) as session:
            query = select(Operation.id).where(Operation.id.in_(operations), Operation.state == OperationState.OPEN)
            is_open = set(session.scalars(query)) if operations else set()
        for name in {wait.pool for wait in waits}:
            with isolated(f"pool {name}"):
                cls._look_at_pool(store, name, [wait for wait in waits if wait.pool == name], is_open)

    @classmethod
    def _look_at_pool(cls, store: Store, name: str, waits: Collection[PoolWait], is_open: Collection[str]) -> None:
        try:
            with store.reading() as session:
                snapshot = rows.load(session, name, lock=False)
        except PoolNotFoundError:
            for wait in waits:
                wait.send(Update(is_over=True))
            return
        status = status_of(snapshot, time.time())
        for wait in waits:
            with isolated(f"a wait for pool {name}"):
                wait._see(store, snapshot, status, is_open)

    def _see(self, store: Store, snapshot: Snapshot, status: PoolStatus, is_open: Collection[str]) -> None:
        text = f"pool {self.pool}: {status.progress(self.holder)}"
        lines = [text] if text != self._shown else []
        self._shown = text
        if self._client is None:
            self._client = ComputePool(self.pool, holder=self.holder, store=store)
        is_over = self.operation_id is not None and self.operation_id not in is_open
        if not is_over and self.nodes is not None:
            try:
                is_over = self._client.has_nodes(self.nodes, snapshot=snapshot)
            except ScaleError:  # The wait ends. The task continues in a worker and raises this error.
                is_over = True
        if lines or is_over:
            self.send(Update(lines, is_over=is_over))
        now = time.monotonic()
        if now - self._renewed >= _RENEW_S:
            self._renewed = now
            self.wanted = self._client.renew


@dataclass(kw_only=True, eq=False, repr=False)
class PoolTrigger(WaitTrigger):
    """Trigger that waits for nodes of a pool, or for the end of a request for nodes, and renews the DAG run's lease.

    :param pool: Name of the pool.
    :param holder: Name of the holder whose lease is renewed.
    :param nodes: Number of ready nodes with which the wait is over.
    :param operation_id: Id of the operation that requests the nodes. If a user marks or clears the task, the operation
        is rolled back, unless it has ended or a newer operation has replaced it.
    """

    pool: str
    holder: str
    nodes: int | None = None
    operation_id: str | None = None

    def new_wait(self) -> PoolWait:
        """Create the `Wait` object through which the poller of this process sends updates to this trigger."""
        return PoolWait(self)

    async def end(self) -> None:
        """Roll back the request for nodes that the task waits for, unless the request has already ended."""
        if self.operation_id is not None:
            await asyncio.to_thread(self._withdraw, self.operation_id)

    def _withdraw(self, operation_id: str) -> None:
        pool = ComputePool(self.pool, holder=self.holder)
        if pool.withdraw(operation_id, "the deferred task was marked or cleared"):
            self.log.info("the request for nodes of pool %s is rolled back", self.pool)
