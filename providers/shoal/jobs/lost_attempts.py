"""Find out whether an unfinished attempt was lost, that is, whether its driver died without recording the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from shoal.errors import PoolDownError, PoolElsewhereError, PoolNotFoundError
from shoal.exit_status import how_ended
from shoal.jobs.head_client import HeadBusyError, HeadGoneError, HeadUnreachableError, JobClient
from shoal.jobs.journal.attempts import Key
from shoal.jobs.timeouts import FAR_HEAD_PATIENCE_S, FAR_SUBMISSION_GRACE_S, HEAD_PATIENCE_S, SUBMISSION_GRACE_S
from shoal.pool.backends.ray_http import RayJob, last_line
from shoal.pool.endpoint import Endpoint
from shoal.state import Store, stamps
from shoal.state.process import ProcessId
from shoal.state.schema import Job, JobState, Pool, PoolState

_SIGKILLED = (-9, 137)
"""Exit codes of a process that SIGKILL ended: -9 as Python reports it, 137 as a shell reports it."""


class Silence(Enum):
    """Reason why the pool's head gave no answer about a job. For some of the reasons, the job may still run."""

    POOL_GONE = auto()
    """The pool is down or does not exist: none of its jobs runs any more."""
    HEAD_REPLACED = auto()
    """The pool has a new head, which does not know the jobs that were submitted to the old one."""
    NO_ANSWER = auto()
    """The head does not answer, or is being replaced; the head may answer later."""
    NO_CONNECTION = auto()
    """There is no network connection to the machine of the head; the head and its jobs may still run."""


PATIENCE_S = {Silence.NO_ANSWER: HEAD_PATIENCE_S, Silence.NO_CONNECTION: FAR_HEAD_PATIENCE_S}
"""Time limits in seconds, one for each reason why the head gives no answer. If the head has not answered and the driver
has sent no heartbeat for this time, the job counts as lost."""


@dataclass(frozen=True)
class View:
    """The head's answer about an attempt, or the reason why there is no answer.

    Attributes:
        ray_job: State of the attempt as Ray reports it; None if Ray does not know the attempt or there is no answer.
        silence: Reason why there is no answer; None if the head has answered.
    """

    ray_job: RayJob | None = None
    silence: Silence | None = None


@dataclass(frozen=True)
class Lost:
    """Result of `judge` for an attempt that has ended although its driver has not recorded the end.

    Attributes:
        state: Final state to record for the attempt.
        reason: Explanation that is stored as the attempt's error.
    """

    state: JobState
    reason: str


class Missing(Enum):
    """Result of `judge` for a pending attempt that no process has sent to the pool's head.

    The submitting process has died, or has not sent the attempt yet.
    """

    SUBMISSION = auto()


def judge(job: Job, view: View, *, silent_for: float, last_words: Callable[[], str]) -> Lost | Missing | None:
    """Decide whether an attempt was lost, or was never sent to the pool's head. Return None if neither is certain.

    Args:
        job: The attempt's row, pending or running.
        view: The head's answer, or the reason why there is none.
        silent_for: Seconds for which neither the head has answered nor the driver has sent a heartbeat.
        last_words: Function that returns the last line of the attempt's log.
    """
    match view:
        case View(silence=Silence.POOL_GONE):
            return Lost(JobState.FAILED, f'pool "{job.pool}" went down while the job was {job.state.value}')
        case View(silence=Silence.HEAD_REPLACED):
            return Lost(JobState.FAILED, f'pool "{job.pool}" got a new head while the job was {job.state.value}')
        case View(silence=Silence.NO_ANSWER | Silence.NO_CONNECTION as silence):
            if silent_for < PATIENCE_S[silence]:
                return None
            return Lost(
                JobState.FAILED,
                f'the head of pool "{job.pool}" has not answered for {PATIENCE_S[silence]:.0f} s: check the pool with '
                "`shoal pool describe`",
            )
        case View(ray_job=None):
            if job.state is JobState.PENDING:
                return Missing.SUBMISSION
            return Lost(JobState.FAILED, f'the head of pool "{job.pool}" does not know the job any more')
        case View(ray_job=RayJob(status="STOPPED")):
            return Lost(JobState.CANCELLED, "the job was stopped through the head's Job API")
        case View(ray_job=RayJob(ended=True, exit_code=code, message=message, why_ended=why)):
            if code is None:
                return Lost(JobState.FAILED, f"the driver could not be started: {last_line(message or '')}")
            if code in _SIGKILLED:
                why = f": {why}" if why else ", by a person or because its host ran out of memory"
                return Lost(JobState.FAILED, f"the driver was killed by SIGKILL{why}")
            return Lost(JobState.FAILED, f"the driver {how_ended(code)}; its log ends with: {last_words()}")
    return None


def pool_endpoint(name: str, store: Store | None = None) -> Endpoint:
    """Return the endpoint (addresses and token) of a pool's head.

    Args:
        name: Name of the pool.
        store: Store that has the pool's row; the default store if not given.

    Raises:
        PoolNotFoundError: There is no such pool.
        PoolElsewhereError: The pool is bound to another machine.
        PoolDownError: The pool is down, or its head is being replaced.
    """
    from shoal.pool.api import ComputePool

    return ComputePool(name, store=store).endpoint()


def address(endpoint: Endpoint) -> dict[str, str]:
    """Return the addresses of a pool's head, in the form in which a job's row stores them.

    If the addresses of the pool's present head differ from those in the row, another head has replaced the job's head.
    """
    return {"api": endpoint.api, "gcs": endpoint.gcs}


def find_head(store: Store, pool_name: str, endpoint_of: Callable[[str], Endpoint]) -> Endpoint | Silence:
    """Return the endpoint of a pool's head, or the reason why there is none.

    Raises:
        PoolElsewhereError: The pool is bound to another machine, whose head cannot be asked from here.
    """
    try:
        return endpoint_of(pool_name)
    except PoolNotFoundError:
        return Silence.POOL_GONE
    except PoolElsewhereError:
        raise
    except PoolDownError:
        with store.reading() as session:
            pool = session.get(Pool, pool_name)
        # If the pool's state is UP although it has no endpoint, its head node is being replaced and may answer later.
        gone = pool is None or pool.state is not PoolState.UP
        return Silence.POOL_GONE if gone else Silence.NO_ANSWER


def look(store: Store, job: Job, endpoint_of: Callable[[str], Endpoint]) -> View:
    """Ask the pool's head about an attempt, and return the head's answer or the reason why there is no answer.

    Raises:
        PoolElsewhereError: The pool is bound to another machine, whose head cannot be asked from here.
    """
    endpoint = find_head(store, job.pool, endpoint_of)
    if isinstance(endpoint, Silence):
        return View(silence=endpoint)
    if address(endpoint) != job.endpoint:
        return View(silence=Silence.HEAD_REPLACED)
    try:
        client = JobClient.at(endpoint)
        return View(ray_job=client.status(Key(job.id, job.attempt).submission_id))
    except HeadUnreachableError:
        # A connection to this machine needs no network link. So if a head on this machine does not answer, the head
        # hangs.
        return View(silence=Silence.NO_ANSWER if endpoint.is_on_loopback else Silence.NO_CONNECTION)
    except (HeadBusyError, HeadGoneError, PoolDownError):
        return View(silence=Silence.NO_ANSWER)


def submitter_is_gone(job: Job, now: float) -> bool:
    """Return whether the process that has to send the attempt to the head seems to be dead.

    The attempt is sent by the submitter, or by the process that has taken the attempt out of the queue. The sending
    process counts as dead if it has ended and no process has polled the job for 20 s. If the sending process is on
    another host, it cannot be checked, and counts as dead if no process has polled the job for 300 s.

    Args:
        job: The attempt's row.
        now: Present time in seconds since the epoch.
    """
    # shoal 0.1 did not record which process submitted a job, so this function cannot check whether that process runs.
    if job.submitter is None:
        return False
    submitter = ProcessId.from_json(job.submitter)
    if submitter.alive():
        return False
    unasked = stamps.age(job.last_polled_at, job.last_polled_clock)
    if unasked is None:
        unasked = now - job.last_polled_at
    return unasked > (SUBMISSION_GRACE_S if submitter.known_dead() else FAR_SUBMISSION_GRACE_S)
