"""Look at an unfinished attempt: ask the pool's head and the processes of this host about it."""

from __future__ import annotations

from shoal.errors import PoolDownError, PoolElsewhereError, PoolNotFoundError, ShoalError
from shoal.jobs.files.logs import LogFollower
from shoal.jobs.head_client import HeadBusyError, HeadGoneError, HeadUnreachableError, JobClient
from shoal.jobs.journal import attempts
from shoal.jobs.journal.job_queue import why_waited_too_long
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.reconcile.decide import Facts, Silence, View
from shoal.jobs.reconcile.target import Target
from shoal.jobs.timeouts import (
    FAR_SUBMISSION_GRACE_S,
    LIVE_SUBMITTER_SILENT_AFTER_S,
    SUBMISSION_GRACE_S,
    UNPOLLED_AFTER_S,
)
from shoal.os_processes import ProcessId
from shoal.pool.backends.ray_http import last_line
from shoal.pool.endpoint import Endpoint
from shoal.state import stamps
from shoal.state.schema import Job, JobState, Pool, PoolState


def facts(target: Target, job: Job, view: View, silent_for: float = 0.0) -> Facts:
    """Return what this process knows of an unfinished attempt."""
    now = target.clock()
    return Facts(
        job,
        view,
        now,
        silent_for,
        unpolled_for=_unpolled_for(job, now),
        waited_too_long=why_waited_too_long(job, now),
        submitter_is_gone=job.state is JobState.PENDING and _submitter_is_gone(job, now),
        last_words=lambda: last_line("\n".join(log_follower(target).lines(ended=True))),
    )


def view(target: Target, job: Job) -> View:
    """Ask the pool's head about an attempt. For an attempt in the queue, only find out whether there is a head."""
    head = find_head(target)
    if isinstance(head, Silence):
        return View(silence=head)
    if is_waiting(job):
        return View()
    if address(head) != job.endpoint:
        return View(silence=Silence.HEAD_REPLACED)
    try:
        return View(ray_job=JobClient.at(head).status(target.key.submission_id))
    except HeadUnreachableError:
        # A connection to this machine needs no network link. So if a head on this machine does not answer, the head
        # hangs.
        return View(silence=Silence.NO_ANSWER if head.is_on_loopback else Silence.NO_CONNECTION)
    except (HeadBusyError, HeadGoneError, PoolDownError):
        return View(silence=Silence.NO_ANSWER)


def find_head(target: Target) -> Endpoint | Silence:
    """Return the endpoint of the head of the attempt's pool, or the reason why there is none."""
    try:
        return target.endpoint_of(target.pool)
    except PoolNotFoundError:
        return Silence.POOL_GONE
    except PoolElsewhereError:
        return Silence.ELSEWHERE
    except PoolDownError:
        with target.store.reading() as session:
            pool = session.get(Pool, target.pool)
        # If the pool's state is UP although it has no endpoint, its head node is being replaced and may answer later.
        gone = pool is None or pool.state is not PoolState.UP
        return Silence.POOL_GONE if gone else Silence.NO_ANSWER


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
    except ShoalError:
        return ""


def is_awaited(job: Job, now: float) -> bool:
    """Return whether a process still waits for the attempt: it has polled the attempt a short time ago."""
    is_alive = ProcessId.from_json(job.submitter).alive()
    return _age_of_poll(job, now) < (LIVE_SUBMITTER_SILENT_AFTER_S if is_alive else UNPOLLED_AFTER_S)


def _unpolled_for(job: Job, now: float) -> float | None:
    """Return the seconds since a process last polled the job. None: not known, and not needed, because the driver
    itself ends a job that no process polls.
    """
    measured = stamps.silence(job.last_polled_at, job.last_polled_clock)
    if measured is not None or job.heartbeat_at is not None:
        return measured
    return now - job.last_polled_at


def _submitter_is_gone(job: Job, now: float) -> bool:
    """Return whether the process that has to send the attempt to the head seems to be dead.

    The attempt is sent by the submitter, or by the process that has taken the attempt out of the queue. The sending
    process counts as dead if it has ended and no process has polled the job for 20 s. If the sending process is on
    another host, it cannot be checked, and counts as dead if no process has polled the job for 300 s.
    """
    submitter = ProcessId.from_json(job.submitter)
    if submitter.alive():
        return False
    return _age_of_poll(job, now) > (SUBMISSION_GRACE_S if submitter.known_dead() else FAR_SUBMISSION_GRACE_S)


def _age_of_poll(job: Job, now: float) -> float:
    """Return the seconds since a process last polled the attempt. On another host, the clocks of both hosts count."""
    measured = stamps.silence(job.last_polled_at, job.last_polled_clock)
    return now - job.last_polled_at if measured is None else measured
