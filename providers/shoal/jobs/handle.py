"""The client handle of one attempt of a job: its status, log, result, and cancelling it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.errors import (
    JobCancelledError,
    JobError,
    JobFailedError,
    PoolDownError,
    PoolElsewhereError,
    PoolNotFoundError,
    ShoalError,
)
from shoal.jobs import credentials
from shoal.jobs.client import HeadBusyError, HeadGoneError, JobClient
from shoal.jobs.credentials import Secrets
from shoal.jobs.files import artifacts, staging
from shoal.jobs.files.logs import LogFollower
from shoal.jobs.function_spec import parse_spec
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import JobStep, act
from shoal.jobs.liveness import Lost, Missing, Silence, address, judge, look, pool_endpoint
from shoal.jobs.polling import Asking
from shoal.jobs.spec import JobResult
from shoal.pool.endpoint import Endpoint
from shoal.redaction import redact
from shoal.state import Store, stamps
from shoal.state.process import ProcessId
from shoal.state.schema import JOB_ACTIVE, JOB_ENDED, Job, JobState

log = logging.getLogger(__name__)

_POLL_S = 0.5
"""Between looks at a job's row, which take no lock; a wait of more than 5 s looks after a tenth of the time waited."""

_POLL_MOST_S = 2.0
"""The longest pause between two looks: 200 waiters that looked every second tripled the time of `shoal jobs list`."""

_HEAD_CHECK_S = 3.0
"""Between two questions to the head whether the driver still runs; needed only for a driver that was killed."""

_ORPHAN_GRACE_S = 60.0
"""Past `orphan_after`, how long a driver has to end itself: its watchdog looks every 2 s."""

_SUBMISSION_GRACE_S = 20.0
"""How long a job may be pending and unknown to its head before whoever waits for it submits it: its asker's own tries
take up to 15 s, and the asker alone has the credentials that stood in the spec's URIs."""

_FAR_SUBMISSION_GRACE_S = 300.0
"""The same where the asker is another host's process, which cannot be looked at: far above its 15 s, and above what two
hosts' clocks differ by."""

_STOP_PATIENCE_S = 15.0
"""How long `cancel` waits for the driver's end: Ray kills it 3 s after SIGTERM."""

_CLEAN_UP_PATIENCE_S = 5.0
"""How long `wait` leaves a driver that has stored its result to clean up: it takes 0.1 s here."""

_CLEAN_UP_POLL_S = 0.05

_DRIVER = 'exec "${SHOAL_PYTHON:-$0}" -P -m shoal.jobs.driver "$@"'
"""Run on the head by `sh`: with the head's own Python where the pool names it, which need not be the submitter's."""


class JobTimeoutError(JobError, TimeoutError):
    """`wait` gave up; the job goes on."""


@dataclass(frozen=True)
class JobStatus:
    """How far one attempt of a job is; times in seconds since the epoch.

    Attributes:
        job_id: The job.
        attempt: Its number, from 1.
        pool: Where it runs.
        holder: Who asked for it.
        state: See `shoal.state.schema.JobState`.
        error: Why it has no result.
        result: What it returned.
        mlflow_run_id: Its run, from its start on.
        created_at: When it was asked for.
        started_at: When its driver began.
        ended_at: When it ended.
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

    @classmethod
    def of(cls, job: Job) -> JobStatus:
        """What a row says."""
        return cls(
            job_id=job.id,
            attempt=job.attempt,
            pool=job.pool,
            holder=job.holder,
            state=job.state,
            error=job.error and redact(job.error),  # a row of 0.1 may hold credentials
            result=JobResult.model_validate(job.result) if job.result else None,
            mlflow_run_id=job.mlflow_run_id,
            created_at=job.created_at,
            started_at=job.started_at,
            ended_at=job.ended_at,
        )


class JobHandle:
    """One attempt of a job. Made by :func:`shoal.jobs.submit` and :func:`shoal.jobs.attach`.

    Args:
        store: Where its row is.
        job: Its row.
        secrets: What its driver needs and its spec does not say; None in the hand of another than its asker.
        cancel_on_interrupt: Whether Ctrl-C in :meth:`wait` ends the job.
        endpoint_of: Finds the head of a pool; :func:`shoal.jobs.liveness.pool_endpoint` by default.
        clock: Seconds since the epoch.
        monotonic: Seconds by a clock that never jumps.
        sleep: How to wait.
    """

    def __init__(
        self,
        store: Store,
        job: Job,
        *,
        secrets: Secrets | None = None,
        cancel_on_interrupt: bool = False,
        endpoint_of: Callable[[str], Endpoint] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._key = Key(job.id, job.attempt)
        self._pool = job.pool
        self._secrets = secrets
        self._cancel_on_interrupt = cancel_on_interrupt
        self._endpoint_of = endpoint_of or partial(pool_endpoint, store=store)
        self._clock = clock
        self._monotonic = monotonic
        self._sleep = sleep
        self._silent_since: float | None = None
        self._left: str | None = None
        self._asking = Asking()

    @property
    def job_id(self) -> str:
        """The job."""
        return self._key.job_id

    @property
    def attempt(self) -> int:
        """Which attempt of it, from 1."""
        return self._key.attempt

    @property
    def pool(self) -> str:
        """Where it runs."""
        return self._pool

    @property
    def left(self) -> str | None:
        """What :meth:`cancel` had to leave to the driver itself, in a sentence; None where nothing is left."""
        return self._left

    def status(self) -> JobStatus:
        """How far it is; asking keeps a job alive that has `orphan_after`."""
        return JobStatus.of(self.settle())

    def wait(self, timeout: float | None = None, on_log: Callable[[str], Any] | None = print) -> JobResult:
        """Wait for the job's end, and hand out its result.

        Ctrl-C cancels a job that plain Python or the CLI submitted, and leaves any other alone.

        Args:
            timeout: Seconds after which to give up; the job goes on.
            on_log: Called with each line of the job's log as it comes; None leaves the log aside.

        Raises:
            JobFailedError: It ended without a result; the message ends with the cause.
            JobCancelledError: It was cancelled.
            JobTimeoutError: It has not ended within `timeout`.
        """
        try:
            for line in self._follow(timeout, with_log=on_log is not None):
                if on_log is not None:
                    on_log(line)
        except KeyboardInterrupt:
            if self._cancel_on_interrupt:
                self.cancel("interrupted by whoever waited for it")
            raise
        return self._outcome()

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """The lines of its log; with `follow` until the job has ended."""
        if follow:
            return self._follow(None)
        return self._log().lines(ended=True)

    def cancel(self, reason: str = "cancelled on request") -> bool:
        """End the job, its gang and its driver; False when it had ended already.

        A driver on another host's pool is told by its row, and its end is not waited for; :attr:`left` says so.
        """
        return self._cancel(attempts.load(self._store, self._key), JOB_ACTIVE, reason)

    def _cancel(self, job: Job, seen: Collection[JobState], reason: str) -> bool:
        """End the job if it is in one of the states that were seen."""
        if not attempts.end(self._store, self._key, JobState.CANCELLED, self._clock(), seen=seen, error=reason):
            return False
        try:
            self._see_driver_end(job)
        except PoolElsewhereError as error:
            self._left = f"the driver of job {self.job_id} ends itself on host {error.host} within seconds"
            return True
        except JobError as error:  # the head is there, and refuses: the row tells the driver
            self._left = f"the driver of job {self.job_id} ends itself within seconds; it was not waited for: {error}"
        self._tidy(job)
        return True

    def _see_driver_end(self, job: Job) -> None:
        """Stop the driver through Ray and wait for its end; without that its own watchdog ends it a little later.

        Raises:
            PoolElsewhereError: The pool is bound to another machine.
            JobError: The head refuses to answer.
        """
        until = self._monotonic() + _STOP_PATIENCE_S
        stopped = False
        while self._monotonic() < until:
            view = look(self._store, job, self._endpoint_of)
            if view.silence in (Silence.POOL_GONE, Silence.HEAD_REPLACED) or (view.ray_job and view.ray_job.ended):
                break
            if view.silence is None and view.ray_job is None:
                break  # it was never submitted
            if not stopped:
                stopped = self._stop()
            self._sleep(_POLL_S)

    def send(self) -> bool:
        """Submit the attempt to its pool's head, unless that was done already.

        Returns:
            False where it was, by this process or another.

        Raises:
            PoolDownError: The pool is down.
            JobError: The head does not answer or refused; the attempt has failed.
        """
        try:
            if self._secrets is not None:
                with act(JobStep.HAND_OVER):
                    credentials.hand_over(self._key.submission_id, self._secrets)
            endpoint = self._endpoint_of(self._pool)
            with JobClient(endpoint.api, endpoint.token()) as client, act(JobStep.SEND):
                submitted = client.submit(
                    self._entrypoint(),
                    self._key.submission_id,
                    {"shoal_job": self.job_id, "attempt": str(self.attempt)},
                )
            if not submitted:
                self._discard_unneeded_credentials()
            return submitted
        except BaseException as error:
            # Another process may have submitted it meanwhile. Should this submission arrive after all, its driver finds
            # that the attempt has ended, and does nothing.
            reason = f"it could not be submitted: {str(error) or type(error).__name__}"
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
        """Delete the credentials' file unless a driver has yet to take it. Returns the job's row."""
        job = attempts.load(self._store, self._key)
        # A driver takes the file before its row leaves PENDING, and removes at its end what was written since.
        if job.state is not JobState.PENDING:
            credentials.discard(self._key.submission_id)
        return job

    def settle(self) -> Job:
        """Read the row, and end an attempt whose driver died without recording an end.

        The row of a job on another host's pool is only read: that host sets it right.
        """
        job = self._ask()
        if job.state in JOB_ENDED or (job.driver and ProcessId.from_json(job.driver).alive()):
            return job  # a driver that lives will record its end: no question to the head is needed
        try:
            is_missing = self._judge(job) is Missing.SUBMISSION
        except PoolElsewhereError:
            return job
        if is_missing and self._clock() - job.created_at > _SUBMISSION_GRACE_S:
            self.send()
        return attempts.load(self._store, self._key)

    def end_if_lost(self) -> bool:
        """End an attempt that was lost, without asking for the job; a sweep calls it.

        Returns:
            Whether the attempt was lost: its driver died without recording an end, or it was never submitted and nobody
            asks for it.

        Raises:
            PoolElsewhereError: The pool is bound to another machine.
        """
        job = attempts.load(self._store, self._key)
        if job.state in JOB_ENDED:
            return False
        verdict = self._judge(job)
        if isinstance(verdict, Lost):
            return True
        if verdict is Missing.SUBMISSION and (why := self._why_never_sent(job)):
            if not attempts.end(
                self._store, self._key, JobState.FAILED, self._clock(), seen={JobState.PENDING}, error=why
            ):
                return False  # its driver has begun since
            self._tidy(job)
            return True
        reason = "nobody asked about it any more, and it did not end itself"
        return self._is_orphan(job) and self._cancel(job, {job.state}, reason)

    def _why_never_sent(self, job: Job) -> str | None:
        """Why a pending attempt that its head does not know will never be sent; None while it may yet be."""
        if job.submitter is None:  # of shoal 0.1
            return None
        submitter = ProcessId.from_json(job.submitter)
        if submitter.alive():
            return None
        unasked = stamps.age(job.last_polled_at, job.last_polled_clock)
        if unasked is None:
            unasked = self._clock() - job.last_polled_at
        if unasked <= (_SUBMISSION_GRACE_S if submitter.known_dead() else _FAR_SUBMISSION_GRACE_S):
            return None
        return f"its submitter (pid {submitter.pid}) ended before the job was sent to the pool's head: submit it again"

    def _is_orphan(self, job: Job) -> bool:
        """Whether nobody asked about the attempt for `orphan_after`, and its driver does not see to it."""
        if job.orphan_after is None:
            return False
        unasked = stamps.age(job.last_polled_at, job.last_polled_clock)
        if unasked is None:
            if job.heartbeat_at is not None:
                return False  # only its driver has watched the row for long enough to judge
            unasked = self._clock() - job.last_polled_at
        return unasked > job.orphan_after + _ORPHAN_GRACE_S

    def _ask(self) -> Job:
        """Read the row, and note there at intervals that the job is asked for."""
        job = attempts.load(self._store, self._key)
        if job.state not in JOB_ENDED and self._asking.is_due(job, self._clock()):
            return attempts.touch(self._store, self._key, self._clock())
        return job

    def _judge(self, job: Job) -> Lost | Missing | None:
        view = look(self._store, job, self._endpoint_of)
        now = self._monotonic()
        if view.silence is not Silence.NO_ANSWER:
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
            return None  # its driver has begun or ended since
        self._tidy(job)
        return verdict

    def _follow(self, timeout: float | None, *, with_log: bool = True) -> Iterator[str]:
        """Wait until the job has ended, and yield the lines of its log meanwhile."""
        follower = self._log()
        started = self._monotonic()
        head_check = started
        while True:
            if self._monotonic() >= head_check:
                job = self.settle()
                head_check = self._monotonic() + _HEAD_CHECK_S
            else:
                job = self._ask()
            ended = job.state in JOB_ENDED
            if with_log and job.state is not JobState.PENDING:  # before its driver runs there is only Ray's own chatter
                yield from follower.lines(ended=ended)
            if ended:
                return
            waited = self._monotonic() - started
            if timeout is not None and waited > timeout:
                raise JobTimeoutError(
                    f'job "{self.job_id}" is still {job.state.value} after {timeout:.0f} s; it goes on: '
                    f"shoal.jobs.attach({self.job_id!r}) finds it again"
                )
            self._sleep(min(max(_POLL_S, waited / 10), _POLL_MOST_S))

    def _outcome(self) -> JobResult:
        job = attempts.load(self._store, self._key)
        what = f'job "{self.job_id}" (attempt {self.attempt})'
        if job.state is JobState.CANCELLED:
            raise JobCancelledError(f"{what} was cancelled: {job.error}")
        if job.state is JobState.FAILED:
            raise JobFailedError(f"{what} failed: {job.error}")
        attempts.collect(self._store, self._key, self._clock())
        self._await_clean_up(job)
        return JobResult.model_validate(job.result)

    def _await_clean_up(self, job: Job) -> None:
        """Give a driver on this host the time to finish its MLflow run: the caller may take the pool down next."""
        until = self._monotonic() + _CLEAN_UP_PATIENCE_S
        while job.driver and ProcessId.from_json(job.driver).alive() and self._monotonic() < until:
            self._sleep(_CLEAN_UP_POLL_S)

    def _entrypoint(self) -> list[str]:
        return ["sh", "-c", _DRIVER, sys.executable, self.job_id, str(self.attempt)]

    def _stop(self) -> bool:
        try:
            endpoint = self._endpoint_of(self._pool)
            with JobClient(endpoint.api, endpoint.token()) as client, act(JobStep.STOP):
                return client.stop(self._key.submission_id)
        except (HeadBusyError, HeadGoneError, PoolDownError, PoolNotFoundError):
            return False

    def _log(self) -> LogFollower:
        return LogFollower(self._key, self._log_over_http)

    def _log_over_http(self) -> str:
        job = attempts.load(self._store, self._key)
        try:
            endpoint = self._endpoint_of(self._pool)
            if address(endpoint) != job.endpoint:
                return ""
            with JobClient(endpoint.api, endpoint.token()) as client:
                return client.logs(self._key.submission_id)
        except (JobError, PoolDownError, PoolNotFoundError):
            return ""

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log().lines(ended=True) if line.strip()]
        return lines[-1] if lines else "(nothing)"

    def _tidy(self, job: Job) -> None:
        """Remove what the driver would have removed; a failure is logged, because the row says already how it ended."""
        with act(JobStep.TIDY):
            try:
                credentials.discard(self._key.submission_id)
                spec = parse_spec(job.spec)
                staging.discard(spec.staged())
                folder = artifacts.folder(self._key, spec.run_config.artifact_location)
                artifacts.discard_unfinished(folder, artifacts.claim_of(self._store, self._key))
            except (ShoalError, OSError) as error:
                log.warning("job %s, attempt %d: not everything was removed: %s", self.job_id, self.attempt, error)
