"""Client handle of one attempt of a job: read its status and log, wait for its result, and cancel it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, get_args

from sqlalchemy import select

from shoal.errors import (
    JobCancelledError,
    JobError,
    JobFailedError,
    PoolDownError,
    PoolElsewhereError,
    PoolNotFoundError,
    ShoalError,
    StoreError,
    StoreUnreachableError,
)
from shoal.jobs import credentials
from shoal.jobs.credentials import Secrets
from shoal.jobs.files import artifacts, staged_data_claims, working_folder
from shoal.jobs.files.logs import LogFollower
from shoal.jobs.head_client import HeadBusyError, HeadGoneError, JobClient
from shoal.jobs.journal import attempts, job_queue
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.job_queue import Admission
from shoal.jobs.journal.steps import JobStep, act
from shoal.jobs.lost_attempts import (
    PATIENCE_S,
    Lost,
    Missing,
    Silence,
    address,
    find_head,
    judge,
    look,
    pool_endpoint,
    submitter_is_gone,
)
from shoal.jobs.polling import PollTimer, bounded_pause, pause_after, turn_check_s
from shoal.jobs.queue_order import Place
from shoal.jobs.remote import handover, package
from shoal.jobs.remote.package import Package
from shoal.jobs.results import JobResult
from shoal.jobs.specs.function import AnyJobSpec, parse_spec
from shoal.jobs.timeouts import (
    CLEAN_UP_PATIENCE_S,
    CLEAN_UP_PERIOD_S,
    FAR_SUBMISSION_GRACE_S,
    HEAD_CHECK_S,
    ORPHAN_GRACE_S,
    SHORTEST_PAUSE_S,
    STOP_PATIENCE_S,
    SUBMISSION_GRACE_S,
    TURN_PATIENCE_S,
)
from shoal.pool.api import ComputePool
from shoal.pool.backends.ray_http import last_line
from shoal.pool.endpoint import NO_GCS, Endpoint, driver_command
from shoal.pool.timeouts import STORE_PATIENCE, STORE_PERIOD
from shoal.state import Store, stamps
from shoal.state.process import ProcessId, sleep_until_end
from shoal.state.schema import JOB_ACTIVE, JOB_ENDED, Job, JobState, Lease
from shoal.training.boosting.request import Framework
from shoal.training.progress import OnProgress, Progress

log = logging.getLogger(__name__)


class JobTimeoutError(JobError, TimeoutError):
    """Error that `JobHandle.wait` raises if the job has not ended within the timeout; the job itself goes on."""


@dataclass(frozen=True)
class JobStatus:
    """Status of one attempt of a job; times are seconds since the epoch.

    Attributes:
        job_id: Id of the job.
        attempt: Number of the attempt, from 1.
        pool: Name of the pool that the attempt runs on.
        holder: Name of the run that submitted the job.
        state: State of the attempt, see `shoal.state.schema.JobState`.
        error: Reason why the attempt failed or was cancelled; None for any other attempt.
        result: Result of the attempt once it has succeeded.
        mlflow_run_id: Id of the attempt's MLflow run; None before that run has started.
        created_at: Time of the submission.
        started_at: Time when the driver began.
        ended_at: Time when the attempt ended.
        progress: Latest progress of the training that the driver has recorded, at most some seconds old while the
            attempt runs; None if no progress has been recorded yet.
        priority: Priority in the pool's queue.
        position: Place in the pool's queue, 1 for the attempt that starts next; None if the attempt does not wait.
        node_seconds: Number of nodes that the attempt has used up to now, multiplied by the seconds; None before it has
            started.
    """

    job_id: str
    attempt: int
    pool: str
    holder: str
    state: JobState
    error: str | None
    result: JobResult | None
    mlflow_run_id: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    progress: Progress | None = None
    priority: int = 0
    position: int | None = None
    node_seconds: float | None = None

    @classmethod
    def of(cls, job: Job, place: Place | None = None, node_seconds: float | None = None) -> JobStatus:
        """Build the status from the attempt's row, its place in the queue, and its node-seconds so far."""
        return cls(
            job_id=job.id,
            attempt=job.attempt,
            pool=job.pool,
            holder=job.holder,
            state=job.state,
            error=job.error,
            result=JobResult.model_validate(job.result) if job.result else None,
            mlflow_run_id=job.mlflow_run_id,
            created_at=job.created_at,
            started_at=job.started_at,
            ended_at=job.ended_at,
            progress=_progress(job),
            priority=job.priority,
            position=place.position if place and job.is_waiting else None,
            node_seconds=node_seconds,
        )


class JobHandle:
    """Handle of one attempt of a job, returned by :func:`shoal.jobs.submit` and :func:`shoal.jobs.attach`.

    In an event loop, ``await handle`` waits for the job while other tasks go on. Unlike :meth:`wait`, ``await`` does
    not print the job's log. If the task that awaits the handle is cancelled, the job goes on.

    Args:
        store: Store that has the attempt's row.
        job: The attempt's row.
        secrets: Credentials for the driver; given only if this process submits the job.
        package: Code that is sent with the job; given only if this process submits the job to a `ray://` pool, which is
            an existing Ray cluster.
        cancel_on_interrupt: Whether Ctrl-C in :meth:`wait` cancels the job.
        submissions: If this handle replaces a handle in another process, the `submissions` of that handle. None: the
            present number of submissions of the attempt.
        actor: Name of the holder to record if this handle cancels the job. None: this process.
        endpoint_of: Function that finds the head of a pool; :func:`shoal.jobs.lost_attempts.pool_endpoint` by default.
        clock: Function that returns the present time in seconds since the epoch.
        monotonic: Function that returns the seconds of a clock that never jumps.
        sleep: Function that waits for a given number of seconds, or until the given process has ended.
    """

    def __init__(
        self,
        store: Store,
        job: Job,
        *,
        secrets: Secrets | None = None,
        package: Package | None = None,
        cancel_on_interrupt: bool = False,
        submissions: int | None = None,
        actor: str | None = None,
        endpoint_of: Callable[[str], Endpoint] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float, ProcessId | None], None] = sleep_until_end,
    ) -> None:
        self._store = store
        self._key = Key(job.id, job.attempt)
        self._pool = job.pool
        self._submissions = attempts.submissions(job) if submissions is None else submissions
        self._is_sealed = job.needs_credentials
        self._secrets = secrets
        self._actor = actor
        self._package = package
        self._cancel_on_interrupt = cancel_on_interrupt
        self._endpoint_of = endpoint_of or partial(pool_endpoint, store=store)
        self._clock = clock
        self._monotonic = monotonic
        self._sleep = sleep
        self._driver: ProcessId | None = None
        self._silent_since: float | None = None
        self._heartbeat_at: float | None = None
        self._left: str | None = None
        self._place: Place | None = None
        self._room_since: dict[Key, float] = {}
        self._poll_timer = PollTimer()

    @property
    def job_id(self) -> str:
        """Return the id of the job."""
        return self._key.job_id

    @property
    def attempt(self) -> int:
        """Return the number of the attempt, from 1."""
        return self._key.attempt

    @property
    def pool(self) -> str:
        """Return the name of the pool that the job runs on."""
        return self._pool

    @property
    def has_ended(self) -> bool:
        """Return whether the attempt has ended, according to its row in the store."""
        return attempts.load(self._store, self._key).state in JOB_ENDED

    @property
    def needs_credentials(self) -> bool:
        """Return whether the driver waits for credentials, or will wait for them when the job leaves the queue."""
        return self._is_sealed and attempts.load(self._store, self._key).state is JobState.PENDING

    @property
    def spec(self) -> AnyJobSpec:
        """Return the spec with which the job was submitted, without credentials."""
        return parse_spec(attempts.load(self._store, self._key).spec)

    @property
    def submissions(self) -> int:
        """Return how often the attempt had been submitted when this handle was created.

        :meth:`cancel` uses this number if `unless_resubmitted` is set.
        """
        return self._submissions

    @property
    def place(self) -> Place | None:
        """Return the job's place in its pool's queue at the time of this handle's last check."""
        return self._place

    @property
    def left(self) -> str | None:
        """Return a sentence about the driver if the driver was still running when :meth:`cancel` returned; otherwise
        None."""
        return self._left

    def deliver_credentials(self, secrets: Secrets | None = None, *, while_queued: bool = True) -> bool:
        """Send the job's credentials to its driver, and wait until the driver has them.

        Only a process that has called `submit` for the job can send the credentials. It does not matter whether that
        call created the job or attached to an existing one. On local pools, and for jobs without credentials, the call
        returns at once.

        Args:
            secrets: The credentials; by default those with which this handle was created.
            while_queued: Whether to wait even if the job is in its pool's queue. False: return False if the job is in
                the queue.

        Returns:
            True if the driver has its credentials or needs none, or if the job has ended.
        """
        self._secrets = secrets or self._secrets
        while self.needs_credentials:
            if self.settle().is_waiting and not while_queued:
                return False
            self._sleep(SHORTEST_PAUSE_S, None)
        return True

    def outlive_interrupts(self) -> None:
        """Let the job go on if Ctrl-C interrupts :meth:`wait` of this handle, even if this process has submitted the
        job."""
        self._cancel_on_interrupt = False

    def status(self) -> JobStatus:
        """Return the attempt's present status.

        The call also polls the job (updates its `last_polled_at`), so that a job with `orphan_after` does not end
        itself.
        """
        job = self.settle()
        used = attempts.node_seconds(self._store, [self._key], self._clock())
        return JobStatus.of(job, self._place, used.get(self._key))

    def wait(
        self,
        timeout: float | None = None,
        on_log: Callable[[str], Any] | None = print,
        on_progress: OnProgress | None = None,
        stop: Event | None = None,
        log_position: int = 0,
    ) -> JobResult:
        """Wait until the job has ended, and return its result.

        Ctrl-C cancels the job if plain Python or the CLI submitted it, unless `outlive_interrupts` was called. A job
        that a workflow engine submitted goes on.

        Args:
            timeout: Seconds to wait; the job goes on after that time. None: wait without a limit.
            on_log: Function that is called with each new line of the job's log. None: the log is not read.
            on_progress: Function that is called with the training's progress each time the progress has changed.
            stop: Event with which another thread ends the wait; the job goes on.
            log_position: Position in the log at which `on_log` begins, from :attr:`LogFollower.position`.

        Raises:
            JobFailedError: The job failed; the message ends with the cause.
            JobCancelledError: The job was cancelled.
            JobTimeoutError: The job has not ended within `timeout` seconds, or before `stop` was set.
        """
        try:
            for line in self._follow(
                timeout,
                with_log=on_log is not None,
                on_progress=on_progress,
                stop=stop,
                log_position=log_position,
            ):
                if on_log is not None:
                    on_log(line)
        except KeyboardInterrupt:
            if self._cancel_on_interrupt:
                self.cancel("the process that waited for the job was interrupted")
            raise
        return self._outcome()

    def __await__(self) -> Generator[Any, None, JobResult]:
        return self._awaited().__await__()

    async def _awaited(self) -> JobResult:
        import asyncio

        steps = self._watch(None, with_log=False)
        # A thread is used only while the job's row is read, and not during the pauses. So hundreds of handles can be
        # awaited at the same time, although asyncio has few threads.
        while (pause := await asyncio.to_thread(next, steps, None)) is not None:
            await asyncio.sleep(float(pause))
        return await asyncio.to_thread(self._outcome)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Return the lines of the job's log.

        Args:
            follow: Whether to wait for further lines until the job has ended, instead of returning only the present
                lines.
        """
        if follow:
            return self._follow(None)
        return self.log_follower().lines(ended=True)

    def log_follower(self, position: int = 0) -> LogFollower:
        """Return a reader of the job's log that returns only new lines at each call.

        Args:
            position: Position at which the reader begins, from :attr:`LogFollower.position`.
        """
        return LogFollower(self._key, self._log_over_http, position)

    def cancel(self, reason: str = "cancelled on request", *, unless_resubmitted: bool = False) -> bool:
        """Cancel the job and end its driver and workers; return False if the job had ended already.

        If the pool is on another host, the driver reads the cancellation from the job's row and ends by itself. In that
        case this method does not wait for the driver's end, and :attr:`left` contains a sentence about the driver.

        Args:
            reason: Text that is stored as the job's error.
            unless_resubmitted: Do not cancel the job, and return False, if the job was submitted again after this
                handle was created. In that case a newer try of the same task waits for the job.
        """
        most_submissions = self._submissions if unless_resubmitted else None
        return self._cancel(attempts.load(self._store, self._key), JOB_ACTIVE, reason, most_submissions)

    def _cancel(self, job: Job, seen: Collection[JobState], reason: str, most_submissions: int | None = None) -> bool:
        """Cancel the attempt if its present state is one of the given states; otherwise return False.

        Args:
            job: The attempt's row, as the caller has read it.
            seen: States in which the attempt may be cancelled.
            reason: Text that is stored as the attempt's error.
            most_submissions: Largest number of submissions with which the attempt may be cancelled. None: any number.
        """
        if not attempts.end(
            self._store,
            self._key,
            JobState.CANCELLED,
            self._clock(),
            seen=seen,
            most_submissions=most_submissions,
            error=reason,
            actor=self._actor,
        ):
            return False
        try:
            if not job.is_waiting:
                self._stop_driver(job)
        except PoolElsewhereError as error:
            self._left = f"the driver of job {self.job_id} ends by itself on host {error.host} within seconds"
            return True
        except JobError as error:  # the driver reads the cancellation and ends by itself
            self._left = (
                f"the driver of job {self.job_id} ends by itself within seconds; the call did not wait for this, "
                f"because the pool's head reported an error: {error}"
            )
        self._tidy(job)
        return True

    def _stop_driver(self, job: Job) -> None:
        """Stop the driver through the head's Job API, and wait up to 15 s until the driver has ended.

        If the driver has not ended by then, the method returns. A thread of the driver, which reads the job's row, then
        ends the driver.

        Raises:
            PoolElsewhereError: The pool is bound to another machine.
            JobError: The head refused the request.
        """
        until = self._monotonic() + STOP_PATIENCE_S
        stopped = False
        while self._monotonic() < until:
            view = look(self._store, job, self._endpoint_of)
            if view.silence in (Silence.POOL_GONE, Silence.HEAD_REPLACED) or (view.ray_job and view.ray_job.ended):
                break
            if view.silence is None and view.ray_job is None:
                break  # the head has no record of the attempt, so there is no driver to wait for
            if not stopped:
                stopped = self._request_stop()
            self._sleep(SHORTEST_PAUSE_S, None)

    def send(self) -> bool:
        """Submit the attempt to its pool's head if the pool has room for it; otherwise put the attempt into the queue.

        Returns:
            False if the attempt had been submitted before.

        Raises:
            PoolDownError: The pool is down.
            JobError: The head does not answer, or refused the attempt, which is now recorded as failed.
        """
        return self._or_fail(self._queue_and_submit)

    def start_if_room(self) -> None:
        """Submit a waiting attempt if its pool has room for it and the pool's head can be reached; otherwise do
        nothing.

        An attempt that must not wait any more (see :meth:`end_if_lost`) is ended instead.

        Raises:
            PoolElsewhereError: The pool is bound to another machine.
        """
        if self.end_if_lost():
            return
        head = find_head(self._store, self._pool, self._endpoint_of)
        if isinstance(head, Silence):
            return
        if job_queue.admit(self._store, self._key, self._clock(), address(head)) is not Admission.NOW:
            return
        try:
            self._or_fail(partial(self._submit_or_put_back, head))
        except (JobError, PoolDownError) as error:
            log.warning("job %s, attempt %d was not started: %s", self.job_id, self.attempt, error)

    def _queue_and_submit(self) -> bool:
        # The credentials are written before the attempt joins the queue, because any process may send a queued attempt
        # to the head, and the driver then needs the credentials.
        if self._secrets is not None and not self._is_sealed:
            with act(JobStep.HAND_OVER):
                credentials.hand_over(self._key.submission_id, self._secrets)
        head = self._endpoint_of(self._pool)
        if self._package is not None and self._package.files:
            with act(JobStep.HAND_OVER):
                JobClient.at(head).upload(package.name(self._key.submission_id), self._package.content())
        admitted = job_queue.admit(self._store, self._key, self._clock(), address(head))
        return admitted is Admission.WAITS or self._submit(head)

    def _submit(self, head: Endpoint) -> bool:
        client = JobClient.at(head)
        job = attempts.load(self._store, self._key)
        with act(JobStep.SEND):
            submitted = client.submit(
                _entrypoint(job),
                self._key.submission_id,
                {"shoal_job": self.job_id, "attempt": str(self.attempt)},
                package=package.name(self._key.submission_id) if package.is_used(job.spec) else None,
            )
        if not submitted:
            self._discard_unneeded_credentials()
        return submitted

    def _submit_or_put_back(self, head: Endpoint) -> bool:
        """Submit the admitted attempt; if the head does not answer, queue the attempt again and return False."""
        try:
            return self._submit(head)
        except (HeadBusyError, HeadGoneError, PoolDownError) as error:
            # The head may have received this submission in spite of the error. In that case the head starts the driver,
            # and the driver runs as usual.
            job_queue.put_back(self._store, self._key)
            log.warning("job %s, attempt %d waits again: %s", self.job_id, self.attempt, error)
            return False

    def _or_fail(self, submit: Callable[[], bool]) -> bool:
        """Call `submit`, which sends the attempt to the head, and record the attempt as failed if `submit` raises.

        Returns:
            The result of `submit`; False if `submit` raised, but another process has submitted the attempt.
        """
        try:
            return submit()
        except BaseException as error:
            if self._secrets is None and not isinstance(error, Exception):
                # `_secrets` is None if another process has submitted the job. Ctrl-C in this process must not end such
                # a job. Another process sends the job to the head later.
                raise
            # The head may start a driver in spite of the error. Such a driver finds that the attempt has ended, and
            # exits. An attempt that another process has submitted meanwhile is not recorded as failed.
            reason = f"the job could not be submitted: {str(error) or type(error).__name__}"
            if self._secrets is not None:
                reason = self._secrets.redact(reason)
            interrupted = self._cancel_on_interrupt and isinstance(error, KeyboardInterrupt)
            seen = JOB_ACTIVE if interrupted else {JobState.PENDING}
            attempts.end(self._store, self._key, JobState.FAILED, self._clock(), seen=seen, error=reason)
            job = self._discard_unneeded_credentials()
            if isinstance(error, Exception) and job.state in (JobState.RUNNING, JobState.SUCCEEDED):
                return False
            raise

    def _discard_unneeded_credentials(self) -> Job:
        """Delete the file with the attempt's credentials unless a driver still has to read it; return the job's row."""
        job = attempts.load(self._store, self._key)
        # The driver reads the file with the credentials while the row's state is still PENDING, so in any other state
        # the file is not needed. If the submitter writes the file after this check, the driver removes the file when
        # the driver ends.
        if job.state is not JobState.PENDING:
            credentials.discard(self._key.submission_id)
        return job

    def settle(self) -> Job:
        """Return the attempt's row. If the driver died without recording the attempt's end, first record the end.

        An attempt that waits in the queue is started if there is room for it. If the job's pool is on another host, a
        lost attempt is not recorded here, because only that host can check the driver.
        """
        job = self._poll()
        if job.state in JOB_ENDED or (job.driver and ProcessId.from_json(job.driver).alive()):
            return job  # a live driver records the end itself, so the head need not be asked
        if job.is_waiting:
            return self._take_turn(job)
        try:
            is_missing = self._judge(job) is Missing.SUBMISSION
        except PoolElsewhereError:
            return job
        if is_missing and self._clock() - (job.admitted_at or job.created_at) > SUBMISSION_GRACE_S:
            self.send()
        return attempts.load(self._store, self._key)

    def _take_turn(self, job: Job) -> Job:
        """Start this waiting attempt if its pool has room for it now, and return the attempt's row.

        Other waiting attempts are also started if the pool has had room for them for some seconds, because no other
        process seems to wait for these attempts.
        """
        line = job_queue.look(self._store, self._pool)
        self._place = line.places.get(self._key)
        now = self._monotonic()
        self._room_since = {key: self._room_since.get(key, now) for key in line.free_for}
        overdue = [key for key, since in self._room_since.items() if now - since > TURN_PATIENCE_S]
        try:
            if self._key in line.free_for or not line.has_nodes or job_queue.why_waited_too_long(job, self._clock()):
                self.start_if_room()
                job = attempts.load(self._store, self._key)
            for key in overdue:
                if key != self._key:
                    self._handle_of(key).start_if_room()
        except PoolElsewhereError:  # the pool is on another host, and a process there starts the attempt
            pass
        except StoreError as error:
            # The error is only logged, because the next check of the queue tries again to start the attempt.
            log.warning("the queue of pool %s could not be changed: %s", self._pool, error)
        return job

    def _handle_of(self, key: Key) -> JobHandle:
        """Return a handle of another attempt on the same pool, so that this process can start that attempt."""
        return JobHandle(
            self._store,
            attempts.load(self._store, key),
            endpoint_of=self._endpoint_of,
            clock=self._clock,
            monotonic=self._monotonic,
            sleep=self._sleep,
        )

    def end_if_lost(self) -> bool:
        """Record the end of the attempt if it was lost, has waited for too long, or is not polled by any process.

        The clean-up of a host calls this method for all unfinished jobs. The call does not poll the job, so that a job
        with `orphan_after` still ends if no other process polls the job.

        Returns:
            Whether this call ended the attempt. Reasons to end the attempt: the driver died without recording the end,
            the submitter died before the attempt joined the queue, the attempt has waited for longer than its timeout,
            the pool went down, or no process has polled the job for longer than `orphan_after`.

        Raises:
            PoolElsewhereError: The pool is bound to another machine.
        """
        job = attempts.load(self._store, self._key)
        if job.state in JOB_ENDED:
            return False
        if job.is_waiting:
            return self._end_if_unwanted(job)
        verdict = self._judge(job)
        if isinstance(verdict, Lost):
            return True
        missing = verdict is Missing.SUBMISSION
        if missing and job.admitted_at is None and submitter_is_gone(job, self._clock()):
            pid = job.submitter["pid"]
            why = f"the submitter (pid {pid}) died before it sent the job to the pool's head: submit the job again"
            return self.end_pending(job, JobState.FAILED, why)
        if self._is_orphan(job, ORPHAN_GRACE_S):
            reason = "no process polled the job for longer than orphan_after, and the driver did not end the job"
            return self._cancel(job, {job.state}, reason)
        long_ago = job.admitted_at is not None and self._clock() - job.admitted_at > FAR_SUBMISSION_GRACE_S
        if missing and (long_ago or submitter_is_gone(job, self._clock())):
            self.send()  # the process that had to send the attempt has died or stopped trying
        return False

    def _end_if_unwanted(self, job: Job) -> bool:
        """End a waiting attempt if no process polls it, if it has waited for too long, or if its pool is down. Return
        whether the attempt was ended.

        Raises:
            PoolElsewhereError: The pool is bound to another machine.
        """
        if self._is_orphan(job, 0.0):
            why = f"no process has polled the job for orphan_after={job.orphan_after:g} s while it waited in the queue"
            return self.end_pending(job, JobState.CANCELLED, why)
        if too_long := job_queue.why_waited_too_long(job, self._clock()):
            return self.end_pending(job, JobState.FAILED, too_long)
        if find_head(self._store, job.pool, self._endpoint_of) is Silence.POOL_GONE:
            return self.end_pending(job, JobState.FAILED, f'pool "{job.pool}" went down while the job was waiting')
        return False

    def end_pending(self, job: Job, state: JobState, why: str) -> bool:
        """Record the end of an attempt that has no driver yet; return False if a driver has started meanwhile.

        Args:
            job: The attempt's row.
            state: Final state of the attempt.
            why: Text that is stored as the attempt's error.
        """
        seen = {JobState.PENDING}
        if not attempts.end(self._store, self._key, state, self._clock(), seen=seen, error=why, actor=self._actor):
            return False
        self._tidy(job)
        return True

    def _is_orphan(self, job: Job, grace_s: float) -> bool:
        """Return whether no process has polled the attempt for more than `orphan_after` plus `grace_s` seconds."""
        if job.orphan_after is None:
            return False
        unasked = stamps.age(job.last_polled_at, job.last_polled_clock)
        if unasked is None:
            if job.heartbeat_at is not None:
                # `last_polled_at` was written on another host or before a reboot, so this host cannot measure its age.
                # The job has a heartbeat, so its driver has started. This process need not end the job, because the
                # driver itself ends a job that no process polls.
                return False
            unasked = self._clock() - job.last_polled_at
        return unasked > job.orphan_after + grace_s

    def _poll(self) -> Job:
        """Poll the job (update its `last_polled_at`) if the last poll is old enough, and return the job's row."""
        job = attempts.load(self._store, self._key)
        if job.state not in JOB_ENDED and self._poll_timer.is_due(job, self._clock()):
            # While the job waits in the queue, this process renews the job's lease of nodes. When the job runs, the
            # driver renews the lease.
            if job.is_waiting:
                self._renew_lease(job)
            job = attempts.touch(self._store, self._key, self._clock())
        if self._secrets is not None and self._secrets.given:
            handover.deliver(self._store, job, self._secrets)
        return job

    def _renew_lease(self, job: Job) -> None:
        """Renew the lease of nodes of a waiting job when a third of the lease's time has passed."""
        with self._store.reading(snapshot=False) as session:
            held = session.scalars(select(Lease).where(Lease.pool == job.pool, Lease.holder == job.holder)).first()
        if held is None or held.expires_at - self._clock() > held.ttl * 2 / 3:
            return
        try:
            ComputePool(job.pool, holder=job.holder, store=self._store).renew()
        except ShoalError as error:
            log.warning("the lease of %s could not be renewed: %s", job.holder, error)

    def _judge(self, job: Job) -> Lost | Missing | None:
        view = look(self._store, job, self._endpoint_of)
        now = self._monotonic()
        # A driver that writes heartbeats into the store is running, even if this process cannot reach the pool's head.
        has_heartbeat = job.heartbeat_at != self._heartbeat_at
        self._heartbeat_at = job.heartbeat_at
        if view.silence not in PATIENCE_S or has_heartbeat:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        silent_for = 0.0 if self._silent_since is None else now - self._silent_since
        verdict = judge(job, view, silent_for=silent_for, last_words=self._last_words)
        if not isinstance(verdict, Lost):
            return verdict
        if not attempts.end(
            self._store, self._key, verdict.state, self._clock(), seen={job.state}, error=verdict.reason
        ):
            # The job's state has changed since this process read the row: the driver has started, or has recorded the
            # end.
            return None
        self._tidy(job)
        return verdict

    def _follow(
        self,
        timeout: float | None,
        *,
        with_log: bool = True,
        on_progress: OnProgress | None = None,
        stop: Event | None = None,
        log_position: int = 0,
    ) -> Iterator[str]:
        """Wait until the job has ended, and meanwhile yield the lines of its log."""
        for step in self._watch(timeout, with_log=with_log, on_progress=on_progress, log_position=log_position):
            if isinstance(step, str):
                yield step
            elif stop is None:
                self._sleep(step, self._driver)
            elif stop.wait(step):
                raise JobTimeoutError(
                    f'the wait for job "{self.job_id}" was stopped on request. The job goes on: reattach with '
                    f"shoal.jobs.attach({self.job_id!r})"
                )

    def _watch(
        self,
        timeout: float | None,
        *,
        with_log: bool,
        on_progress: OnProgress | None = None,
        log_position: int = 0,
    ) -> Iterator[str | float]:
        """Check the job again and again until it has ended. Yield new lines of its log, and after each check the
        seconds to pause.

        The caller pauses between two checks, either by sleeping or in an event loop.
        """
        follower = self.log_follower(log_position)
        started = self._monotonic()
        head_check = started
        job: Job | None = None
        shown: Place | None = None
        last_progress = ""
        away_since: float | None = None
        while True:
            try:
                if self._monotonic() >= head_check:
                    job = self.settle()
                    head_check = self._monotonic() + (self._turn_check_s if job.is_waiting else HEAD_CHECK_S)
                else:
                    job = self._poll()
                if with_log and job.is_waiting and self._place is not None and self._place != shown:
                    shown = self._place
                    yield f"waiting for room on pool {self._pool}: {shown}"
                ended = job.state in JOB_ENDED
                self._driver = ProcessId.from_json(job.driver) if job.driver else None
                # The log of a pending job contains no lines of the driver, but only lines of Ray, which do not help the
                # user.
                if with_log and job.state is not JobState.PENDING:
                    yield from follower.lines(ended=ended)
                progress = _progress(job)
                # Progress is compared as text, because a NaN is not equal to another NaN and would count as a change.
                if on_progress is not None and progress is not None and str(progress) != last_progress:
                    on_progress(progress)
                    last_progress = str(progress)
                if ended:
                    return
                away_since = None
                waited = self._monotonic() - started
                pause = bounded_pause(self._turn_check_s) if job.is_waiting else pause_after(waited)
            except StoreUnreachableError as error:
                # The job goes on while this process cannot reach the store. The driver also retries for
                # `STORE_PATIENCE` seconds.
                if away_since is None:
                    away_since = self._monotonic()
                    log.warning(
                        "job %s goes on, and this process waits for the store, which cannot be reached: %s",
                        self.job_id,
                        error,
                    )
                elif self._monotonic() - away_since > STORE_PATIENCE:
                    raise
                pause = STORE_PERIOD
            if timeout is not None and self._monotonic() - started > timeout:
                raise JobTimeoutError(
                    f'job "{self.job_id}" is still {job.state.value if job else "unfinished"} after {timeout:.0f} s. '
                    f"The job goes on: reattach with shoal.jobs.attach({self.job_id!r})"
                )
            yield pause

    @property
    def _turn_check_s(self) -> float:
        """Return the seconds until this process checks again whether the waiting attempt may start."""
        return turn_check_s(self._place.position if self._place else 1)

    def _outcome(self) -> JobResult:
        job = attempts.load(self._store, self._key)
        what = f'job "{self.job_id}" (attempt {self.attempt})'
        if job.state is JobState.CANCELLED:
            raise JobCancelledError(f"{what} was cancelled: {job.error}")
        if job.state is JobState.FAILED:
            error = JobFailedError(f"{what} failed: {job.error}", permanent=bool(job.error_is_permanent))
            for traceback in self.log_follower().tracebacks():
                error.add_note(traceback)
            raise error
        self._await_clean_up(job)
        result = JobResult.model_validate(job.result)
        # The result is marked as returned to a caller only in this last step. If this process is killed before this
        # step, a new submission of the same job still gets the result.
        attempts.collect(self._store, self._key, self._clock())
        return result

    def _await_clean_up(self, job: Job) -> None:
        """Wait until the job's driver has ended the MLflow run and exited, if the driver runs on this host.

        Without this wait, the caller could take the pool down before the driver has ended the MLflow run.
        """
        until = self._monotonic() + CLEAN_UP_PATIENCE_S
        driver = ProcessId.from_json(job.driver) if job.driver else None
        while driver and driver.alive() and self._monotonic() < until:
            self._sleep(CLEAN_UP_PERIOD_S, driver)

    def _request_stop(self) -> bool:
        try:
            endpoint = self._endpoint_of(self._pool)
            client = JobClient.at(endpoint)
            with act(JobStep.STOP):
                return client.stop(self._key.submission_id)
        except (HeadBusyError, HeadGoneError, PoolDownError, PoolNotFoundError):
            return False

    def _log_over_http(self) -> str:
        job = attempts.load(self._store, self._key)
        try:
            endpoint = self._endpoint_of(self._pool)
            if address(endpoint) != job.endpoint:
                return ""
            return JobClient.at(endpoint).logs(self._key.submission_id)
        except (JobError, PoolDownError, PoolNotFoundError):
            return ""

    def _last_words(self) -> str:
        return last_line("\n".join(self.log_follower().lines(ended=True)))

    def _tidy(self, job: Job) -> None:
        """Remove the files that the attempt has left behind: credentials, staged data and unfinished artifacts.

        Errors are only logged, because the attempt's end is recorded already.
        """
        with act(JobStep.TIDY):
            with self._logged():
                credentials.discard(self._key.submission_id)
            with self._logged():
                working_folder.discard(self._key.submission_id)
            with self._logged():
                staged_data_claims.give_up(self._key, parse_spec(job.spec).staged())
            with self._logged():
                results = artifacts.folder(self._key, parse_spec(job.spec).run_config.artifact_location)
                artifacts.discard_unfinished(results, artifacts.claim_of(self._store, self._key))

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Log any error of a `with` block that removes files. The error is not raised."""
        try:
            yield
        except Exception as error:  # Different storages raise different exceptions, so all types are caught.
            log.warning("job %s, attempt %d: some files could not be removed: %s", self.job_id, self.attempt, error)


def _entrypoint(job: Job) -> list[str]:
    """Return the command that starts the driver with the Python of the process that first submitted the job.

    On a pool without Ray, the command names the library of a training, so that the driver and its workers share the
    library's memory. If the training registers its model, they do not share the library, because only the driver needs
    the library's code for scikit-learn.
    """
    python = str(job.submitter["python"])
    library = str(job.spec.get("framework"))
    is_shared = library in get_args(Framework) and not job.spec.get("register_as")
    shared = [library] if is_shared and job.endpoint["gcs"] == NO_GCS else []
    return driver_command(python, job.id, str(job.attempt), *shared)


def _progress(job: Job) -> Progress | None:
    return None if job.progress is None else Progress.of(job.progress)
