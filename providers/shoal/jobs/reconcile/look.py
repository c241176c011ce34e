"""Look at an unfinished attempt: ask the HTTP API of the pool's head and the processes of this host about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Self

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from shoal import errors
from shoal.jobs import timeouts
from shoal.jobs.files.logs import LogFollower
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.job_queue import why_waited_too_long
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.reconcile.decide import Facts, Silence, View
from shoal.os_processes import ProcessId, sleep_until_end
from shoal.pool.backends.ray_http import Failure, Problem, RayHead, last_line
from shoal.pool.endpoint import Endpoint, HeadAccess
from shoal.pool.timeouts import CLUSTER_UNKNOWN_PATIENCE
from shoal.state import Store, stamps
from shoal.state.schema import Job, JobState, Pool, PoolState

SUBMIT_ATTEMPTS = 6
"""Tries to submit a job, 15 s in total. A new head refuses submissions with status 500 for about 5 s."""


class HeadGoneError(errors.JobError):
    """Error for a request that the head did not answer.

    If the head's machine refused the connection, the head has ended.
    """


class HeadBusyError(errors.JobError):
    """Error for a request that the head answered with status 5xx; another try may succeed."""


class HeadUnreachableError(HeadGoneError):
    """Error for a request that got no reply at all, not even a refused connection; the head may still run."""


class _SlowError(HeadUnreachableError):
    """Error for a request that got no answer within the time limit. If the request was a submission, it is sent
    again."""


class JobClient(RayHead):
    """Client of the Job API (Ray's HTTP interface to submit and stop jobs) of one pool's head.

    The methods raise `HeadGoneError` if there is no answer, `HeadBusyError` for an answer with status 5xx, and
    `JobError` if the head refuses the request.

    Args:
        api: The head's Job API, ``http://host:port``.
        token: The pool's bearer token; empty if the head needs no token.
        ca: File with the certificates of the authorities (CAs) to trust for an https address. None: the CAs of this
            machine.
        access: Way to the head through another server. None: requests go to `api`.
        wait: Seconds to wait before the second try of a submission; later waits are up to four times as long. Tests
            pass zero.
    """

    def __init__(
        self, api: str, token: str, *, ca: Path | None = None, wait: float = 1.0, access: HeadAccess | None = None
    ) -> None:
        retrying = Retrying(
            retry=retry_if_exception_type((HeadBusyError, _SlowError)),
            stop=stop_after_attempt(SUBMIT_ATTEMPTS),
            wait=wait_exponential(multiplier=wait, max=4 * wait),
            reraise=True,
        )
        super().__init__(
            api,
            token,
            ca=ca,
            timeout_s=timeouts.HEAD_TIMEOUT_S,
            retrying=retrying,
            error=self._job_error,
            access=access,
        )

    @classmethod
    def at(cls, endpoint: Endpoint) -> Self:
        """Return the client of a pool's head."""
        return cls(endpoint.api, endpoint.token(), ca=endpoint.ca_path, access=endpoint.access)

    def _job_error(self, failure: Failure) -> errors.JobError:
        head, refused = f"the pool's head at {self._api}", f"the pool's head refused ({failure.status})"
        match failure.problem:
            case Problem.SLOW:
                return _SlowError(f"{head} has not answered for {timeouts.HEAD_TIMEOUT_S:.0f} s")
            case Problem.NOTHING_LISTENS | Problem.NO_CONNECTION | Problem.NO_ANSWER as problem:
                return (HeadGoneError if problem is Problem.NOTHING_LISTENS else HeadUnreachableError)(
                    f"the pool's head does not answer at {self._api} ({failure.reason}): "
                    "check the pool with `shoal pool describe`"
                )
            case Problem.TOKEN_REFUSED:
                return errors.JobError(
                    f"{head} refused the token, which belongs to another pool or to an earlier head: check the pool "
                    "with `shoal pool describe`"
                )
            case Problem.BUSY:
                return HeadBusyError(f"{refused}: {failure.reason}")
            case Problem.REFUSED:
                return errors.JobError(f"{refused}: {failure.reason}")
        return errors.JobError(f"{head} does not answer like a Ray head: check the pool with `shoal pool describe`")


@dataclass(frozen=True)
class Target:
    """The attempt that a process reconciles, and the means to do it.

    Attributes:
        store: Store that has the attempt's row.
        key: The attempt.
        pool: Name of the attempt's pool.
        actor: Name of the holder to record if this process ends the attempt. None: this process.
        find_endpoint: Function that finds the head of a pool. None: `pool_endpoint`.
        clock: Function that returns the present time in seconds since the epoch.
        monotonic: Function that returns the seconds of a clock that never jumps.
        sleep: Function that waits for a given number of seconds, or until the given process has ended.
    """

    store: Store
    key: Key
    pool: str
    _: KW_ONLY
    actor: str | None = None
    find_endpoint: Callable[[str], Endpoint] | None = None
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float, ProcessId | None], None] = sleep_until_end

    def endpoint_of(self, pool: str) -> Endpoint:
        """Return the endpoint of a pool's head; see `pool_endpoint` for the errors."""
        return self.find_endpoint(pool) if self.find_endpoint else pool_endpoint(pool, self.store)


def pool_endpoint(name: str, store: Store | None = None) -> Endpoint:
    """Return the endpoint (addresses and token) of a pool's head.

    Raises:
        PoolNotFoundError: There is no such pool.
        PoolElsewhereError: The pool is bound to another machine.
        PoolDownError: The pool is down, or its head is being replaced.
    """
    from shoal.pool.api import ComputePool

    return ComputePool(name, store=store, is_named=False).endpoint()


def facts(target: Target, job: Job, view: View, silent_for: float = 0.0) -> Facts:
    """Return what this process knows of an unfinished attempt."""
    now = target.clock()
    # Without a measured time, the driver itself ends a job that no process polls.
    is_measured = stamps.silence(job.last_polled_at, job.last_polled_clock) is not None
    return Facts(
        job,
        view,
        now,
        silent_for,
        unpolled_for=_age_of_poll(job, now) if is_measured or job.heartbeat_at is None else None,
        waited_too_long=why_waited_too_long(job, now),
        submitter_is_gone=job.state is JobState.PENDING and _submitter_is_gone(job, now),
        last_words=lambda: last_line("\n".join(log_follower(target).lines(ended=True))),
    )


def view(target: Target, job: Job) -> View:
    """Ask the pool's head about an attempt. For an attempt in the queue, only find out whether there is a head."""
    head = find_head(target)
    if head is Silence.NO_ANSWER and not is_waiting(job):
        head = _silent_head(target) or head
    if isinstance(head, Silence):
        return View(silence=head)
    if is_waiting(job):
        return View()
    if address(head) != job.endpoint:
        return View(silence=Silence.HEAD_REPLACED)
    try:
        ray_job = JobClient.at(head).status(target.key.submission_id)
        if ray_job is None and job.state is JobState.RUNNING:
            # Once is no proof that the job is gone: see `CLUSTER_UNKNOWN_PATIENCE`.
            target.sleep(CLUSTER_UNKNOWN_PATIENCE, None)
            ray_job = JobClient.at(head).status(target.key.submission_id)
        return View(ray_job=ray_job)
    except HeadUnreachableError:
        # A connection to this machine needs no network link. So if a head on this machine does not answer, the head
        # hangs.
        return View(silence=Silence.NO_ANSWER if head.is_on_loopback else Silence.NO_CONNECTION)
    except (HeadBusyError, HeadGoneError):
        return View(silence=Silence.NO_ANSWER if head.is_direct else Silence.NO_CONNECTION)
    except errors.PoolDownError:
        return View(silence=Silence.NO_ANSWER)


def find_head(target: Target) -> Endpoint | Silence:
    """Return the endpoint of the head of the attempt's pool, or the reason why there is none."""
    try:
        return target.endpoint_of(target.pool)
    except errors.PoolNotFoundError:
        return Silence.POOL_GONE
    except errors.PoolElsewhereError:
        return Silence.ELSEWHERE
    except errors.PoolDownError:
        pool = target.store.get(Pool, target.pool)
        # If the pool's state is UP although it has no endpoint, its head node is being replaced and may answer later.
        gone = pool is None or pool.state is not PoolState.UP
        return Silence.POOL_GONE if gone else Silence.NO_ANSWER


def _silent_head(target: Target) -> Endpoint | None:
    """Return the endpoint of a head that has not answered, if its node is not lost: how it does not answer now tells
    whether it may be paused. Return None if there is no such head."""
    from shoal.pool.api import ComputePool

    if target.find_endpoint:
        return None
    with suppress(errors.PoolDownError, errors.PoolUnreachableError, errors.PoolNotFoundError):
        return ComputePool(target.pool, store=target.store, is_named=False).endpoint(may_be_silent=True)
    return None


def address(endpoint: Endpoint) -> dict[str, str]:
    """Return the addresses of a pool's head, in the form in which a job's row stores them.

    If the addresses of the pool's present head differ from those in the row, another head has replaced the job's head.
    """
    return {"api": endpoint.api, "gcs": endpoint.gcs}


def log_follower(target: Target, position: int = 0) -> LogFollower:
    """Return a reader of the attempt's log that returns only new lines at each call."""
    return LogFollower(target.key, lambda: _log_over_http(target), position)


def _log_over_http(target: Target) -> str:
    job = attempts.load(target.store, target.key)
    head = find_head(target)
    if isinstance(head, Silence) or address(head) != job.endpoint:
        return ""
    try:
        return JobClient.at(head).logs(target.key.submission_id)
    except errors.ShoalError:
        return ""


def is_awaited(job: Job, now: float) -> bool:
    """Return whether a process still waits for the attempt: it has polled the attempt a short time ago."""
    is_alive = ProcessId.from_json(job.submitter).alive()
    return _age_of_poll(job, now) < (timeouts.LIVE_SUBMITTER_SILENT_AFTER_S if is_alive else timeouts.UNPOLLED_AFTER_S)


def _submitter_is_gone(job: Job, now: float) -> bool:
    """Return whether the process that has to send the attempt to the head seems to be dead.

    The attempt is sent by the submitter, or by the process that has taken the attempt out of the queue. The sending
    process counts as dead if it has ended and no process has polled the job for 20 s. If the sending process is on
    another host, it cannot be checked, and counts as dead if no process has polled the job for 300 s.
    """
    submitter = ProcessId.from_json(job.submitter)
    if submitter.alive():
        return False
    grace_s = timeouts.SUBMISSION_GRACE_S if submitter.known_dead() else timeouts.FAR_SUBMISSION_GRACE_S
    return _age_of_poll(job, now) > grace_s


def _age_of_poll(job: Job, now: float) -> float:
    """Return the seconds since a process last polled the attempt. On another host, the clocks of both hosts count."""
    measured = stamps.silence(job.last_polled_at, job.last_polled_clock)
    return now - job.last_polled_at if measured is None else measured


POLLS_PER_ORPHAN_AFTER = 3
"""Updates of `last_polled_at` within a short `orphan_after`, so that two of them may fail."""


class PollTimer:
    """Timer that tells a waiting process when to update the job's `last_polled_at`.

    No update is due while another process that waits for the same job makes the updates. The timer measures with this
    process's clock how long `last_polled_at` has stayed unchanged; the timer does not compare the value with the clock,
    because another host with a different clock may have written the value. Only the first call compares the value with
    the clock, because no earlier value is known at the first call.
    """

    def __init__(self) -> None:
        self._seen: float | None = None
        self._since = 0.0

    def is_due(self, job: Job, now: float) -> bool:
        """Return whether the waiting process has to update the job's `last_polled_at` now."""
        if job.last_polled_at != self._seen:
            self._since = job.last_polled_at if self._seen is None else now
            self._seen = job.last_polled_at
        longest = timeouts.POLL_PERIOD_S
        period = min(longest, job.orphan_after / POLLS_PER_ORPHAN_AFTER) if job.orphan_after else longest
        # `now - self._since` is negative if this host's clock was set back, or is behind the clock that wrote
        # `last_polled_at`. In both cases the age of the last update is not known, so a new update is due.
        return not 0 <= now - self._since < period
