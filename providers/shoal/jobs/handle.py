"""Client handle of one attempt of a job: read its status and log, wait for its result, and cancel it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from threading import Event
from typing import Any

from shoal.errors import JobCancelledError, JobError, JobFailedError, StoreUnreachableError, TeamError
from shoal.jobs.credentials import Secrets
from shoal.jobs.files.logs import LogFollower
from shoal.jobs.journal import attempts, metric_points, owners
from shoal.jobs.journal.metric_points import MetricPoint
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.kind import parse_spec
from shoal.jobs.reconcile import acts, look
from shoal.jobs.reconcile.acts import Supplies
from shoal.jobs.reconcile.look import Target
from shoal.jobs.reconcile.rounds import Waiter
from shoal.jobs.results import JobResult
from shoal.jobs.scheduling import Place
from shoal.jobs.spec import AnyJobSpec
from shoal.jobs.status import JobStatus, progress_of
from shoal.jobs.timeouts import CLEAN_UP_PATIENCE_S, CLEAN_UP_PERIOD_S, HEAD_CHECK_S
from shoal.os_processes import ProcessId
from shoal.own_pauses import waited_since
from shoal.pool.timeouts import STORE_PATIENCE, STORE_PERIOD, WAIT_PERIOD
from shoal.pool.waiting import bounded_pause
from shoal.state.schema import JOB_ENDED, Job, JobState
from shoal.training.reporting import OnProgress

log = logging.getLogger(__name__)


class JobTimeoutError(JobError, TimeoutError):
    """Error that `JobHandle.wait` raises if the job has not ended within the timeout; the job itself goes on."""


class JobHandle:
    """Handle of one attempt of a job, returned by :func:`shoal.jobs.submit` and :func:`shoal.jobs.attach`.

    In an event loop, ``await handle`` waits for the job while other tasks go on. Unlike :meth:`wait`, ``await`` does
    not print the job's log. If the task that awaits the handle is cancelled, the job goes on.

    Args:
        target: The attempt.
        job: The attempt's row.
        supplies: What this process gives to the job; given only if this process submits the job.
        submissions: If this handle replaces a handle in another process, the `submissions` of that handle. None: the
            present number of submissions of the attempt.

    Attributes:
        target: The attempt that the handle belongs to.
        job_id: Id of the job.
        attempt: Number of the attempt, from 1.
        pool: Name of the pool that the job runs on.
        submissions: How often the attempt had been submitted when this handle was created. :meth:`cancel` uses this
            number if `unless_resubmitted` is set.
        was_collected: Whether a caller already had the result when this handle was created. Only later tries of a
            workflow engine's task get such a handle from `submit`.
        left: Sentence about the driver if the driver was still running when :meth:`cancel` returned; otherwise None.
    """

    def __init__(
        self, target: Target, job: Job, supplies: Supplies | None = None, *, submissions: int | None = None
    ) -> None:
        self.target = target
        self._store, self._key = target.store, target.key
        self.job_id, self.attempt, self.pool = target.key.job_id, target.key.attempt, target.pool
        self.submissions = attempts.submissions(job) if submissions is None else submissions
        self.was_collected = job.collected_at is not None
        self.left: str | None = None
        self._is_sealed = job.needs_credentials
        self._supplies = supplies or Supplies()
        self._waiter = Waiter(target, self._supplies)
        self._driver: ProcessId | None = None

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
    def place(self) -> Place | None:
        """Return the job's place in its pool's queue at the time of this handle's last check."""
        return self._waiter.place

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
        self._supplies.secrets = secrets or self._supplies.secrets
        while self.needs_credentials:
            if is_waiting(self._waiter.round()) and not while_queued:
                return False
            self.target.sleep(WAIT_PERIOD, None)
        return True

    def outlive_interrupts(self) -> None:
        """Let the job go on if Ctrl-C interrupts :meth:`wait` of this handle, even if this process has submitted the
        job."""
        self._supplies.end_on_interrupt = False

    def status(self) -> JobStatus:
        """Return the attempt's present status.

        The call also polls the job (updates its `last_polled_at`), so that a job with `orphan_after` does not end
        itself.
        """
        try:
            job = self._waiter.round()
        except TeamError:  # the database lets this process only read the job
            job = attempts.load(self._store, self._key)
        used = attempts.node_seconds(self._store, [self._key], self.target.clock())
        return JobStatus.of(job, self.place, used.get(self._key))

    def wait(
        self,
        timeout: float | None = None,
        on_log: Callable[[str], Any] | None = print,
        on_progress: OnProgress | None = None,
        stop: Event | None = None,
        log_position: int = 0,
        collect: bool = True,
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
            collect: Whether the result counts as returned. False: a new submission of the same job still gets the
                result, until :meth:`collect` is called.

        Raises:
            JobFailedError: The job failed; the message ends with the cause.
            JobCancelledError: The job was cancelled.
            JobTimeoutError: The job has not ended within `timeout` seconds, or before `stop` was set.
        """
        try:
            steps = self._watch(timeout, on_log is not None, on_progress, log_position)
            for line in self._follow(steps, stop):
                if on_log is not None:
                    on_log(line)
        except KeyboardInterrupt:
            if self._supplies.end_on_interrupt:
                self.cancel("the process that waited for the job was interrupted")
            raise
        return self._outcome(collect)

    def collect(self) -> None:
        """Record that the result was returned to a caller. The next submission then creates a new attempt."""
        attempts.collect(self._store, self._key, self.target.clock())

    def __await__(self) -> Generator[Any, None, JobResult]:
        import asyncio

        async def awaited() -> JobResult:
            steps = self._watch(with_log=False)
            # A thread is used only while the job's row is read, and not during the pauses. So hundreds of handles can
            # be awaited at the same time, although asyncio has few threads.
            while (pause := await asyncio.to_thread(next, steps, None)) is not None:
                await asyncio.sleep(float(pause))
            return await asyncio.to_thread(self._outcome)

        return awaited().__await__()

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Return the lines of the job's log.

        Args:
            follow: Whether to wait for further lines until the job has ended, instead of returning only the present
                lines.
        """
        return self._follow(self._watch()) if follow else self.log_follower().lines(ended=True)

    def metrics(self) -> list[MetricPoint]:
        """Return the metrics of the training so far, by step: of each boosting round, or those that a function has
        logged.

        The driver stores new metrics every 5 s. An attempt that repeats steps of an earlier one replaces these steps.
        The series has at most 100,000 points and 200 names an attempt. Usage of CPUs and memory is only in MLflow.

        Raises:
            StoreError: The state store cannot be used.
        """
        return metric_points.read(self._store, self._key)

    def log_follower(self, position: int = 0) -> LogFollower:
        """Return a reader of the job's log that returns only new lines at each call.

        Args:
            position: Position at which the reader begins, from :attr:`LogFollower.position`.
        """
        return look.log_follower(self.target, position)

    def cancel(self, reason: str = "cancelled on request", *, unless_resubmitted: bool = False) -> bool:
        """Cancel the job and end its driver and workers; return False if the job had ended already.

        If the pool is on another host, the driver reads the cancellation from the job's row and ends by itself. In that
        case this method does not wait for the driver's end, and :attr:`left` contains a sentence about the driver.

        Args:
            reason: Text that is stored as the job's error.
            unless_resubmitted: Do not cancel the job, and return False, if the job was submitted again after this
                handle was created. In that case a newer try of the same task waits for the job.

        Raises:
            TeamError: The job belongs to another team than the one for which this process acts, and this process does
                not act for the run of a workflow engine that has submitted the job.
        """
        job = attempts.load(self._store, self._key)
        by_user = owners.require(job, self.target.actor)
        done = acts.cancel(
            self.target,
            job,
            reason,
            most_submissions=self.submissions if unless_resubmitted else None,
            by_user=by_user,
        )
        self.left = done.left
        return done.is_done

    def _follow(self, steps: Iterator[str | float], stop: Event | None = None) -> Iterator[str]:
        """Wait until the job has ended, and meanwhile yield the lines of its log."""
        for step in steps:
            if isinstance(step, str):
                yield step
            elif stop is None:
                self.target.sleep(step, self._driver)
            elif stop.wait(step):
                raise JobTimeoutError(
                    f'the wait for job "{self.job_id}" was stopped on request. The job goes on: reattach with '
                    f"shoal.jobs.attach({self.job_id!r})"
                )

    def _watch(
        self,
        timeout: float | None = None,
        with_log: bool = True,
        on_progress: OnProgress | None = None,
        log_position: int = 0,
    ) -> Iterator[str | float]:
        """Check the job again and again until it has ended. Yield new lines of its log, and after each check the
        seconds to pause.

        The caller pauses between two checks, either by sleeping or in an event loop.
        """
        follower = self.log_follower(log_position)
        started = self.target.monotonic()
        head_check = started
        job: Job | None = None
        shown: Place | None = None
        last_progress = ""
        away_since: float | None = None
        while True:
            try:
                if self.target.monotonic() >= head_check:
                    job = self._waiter.round()
                    wait_s = self._waiter.turn_check_s if is_waiting(job) else HEAD_CHECK_S
                    head_check = self.target.monotonic() + wait_s
                else:
                    job = self._waiter.poll()
                if with_log and is_waiting(job) and self.place is not None and self.place != shown:
                    shown = self.place
                    yield f"waiting for room on pool {self.pool}: {shown}"
                ended = job.state in JOB_ENDED
                self._driver = ProcessId.from_json(job.driver) if job.driver else None
                # The log of a pending job contains no lines of the driver, but only lines of Ray, which do not help the
                # user.
                if with_log and job.state is not JobState.PENDING:
                    yield from follower.lines(ended=ended)
                progress = progress_of(job)
                # Progress is compared as text, because a NaN is not equal to another NaN and would count as a change.
                if on_progress is not None and progress is not None and str(progress) != last_progress:
                    on_progress(progress)
                    last_progress = str(progress)
                if ended:
                    return
                away_since = None
                waited = self.target.monotonic() - started
                pause = bounded_pause(self._waiter.turn_check_s if is_waiting(job) else waited / 10)
            except StoreUnreachableError as error:
                # The job goes on while this process cannot reach the store. The driver also retries for
                # `STORE_PATIENCE` seconds.
                if away_since is None:
                    away_since = self.target.monotonic()
                    log.warning(
                        "job %s goes on, and this process waits for the store, which cannot be reached: %s",
                        self.job_id,
                        error,
                    )
                elif waited_since(away_since, self.target.monotonic()) > STORE_PATIENCE:
                    raise
                pause = STORE_PERIOD
            if timeout is not None and self.target.monotonic() - started > timeout:
                raise JobTimeoutError(
                    f'job "{self.job_id}" is still {job.state.value if job else "unfinished"} after {timeout:.0f} s. '
                    f"The job goes on: reattach with shoal.jobs.attach({self.job_id!r})"
                )
            yield pause

    def _outcome(self, collect: bool = True) -> JobResult:
        job = attempts.load(self._store, self._key)
        about = f" for {job.label}" if job.label else ""
        what = f'job "{self.job_id}"{about} (attempt {self.attempt})'
        if job.state is JobState.CANCELLED:
            raise JobCancelledError(f"{what} was cancelled: {job.error}", permanent=bool(job.error_is_permanent))
        if job.state is JobState.FAILED:
            error = JobFailedError(f"{what} failed: {job.error}", permanent=bool(job.error_is_permanent))
            for traceback in self.log_follower().tracebacks():
                error.add_note(traceback)
            raise error
        # If the driver runs on this host, wait until it has ended the MLflow run and exited. Otherwise the caller could
        # take the pool down before.
        until = self.target.monotonic() + CLEAN_UP_PATIENCE_S
        driver = ProcessId.from_json(job.driver) if job.driver else None
        while driver and driver.alive() and self.target.monotonic() < until:
            self.target.sleep(CLEAN_UP_PERIOD_S, driver)
        result = JobResult.model_validate(job.result)
        # The result is marked as returned to a caller only in this last step. If this process is killed before this
        # step, a new submission of the same job still gets the result.
        if collect:
            self.collect()
        return result
