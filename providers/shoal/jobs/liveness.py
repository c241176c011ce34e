"""Find out whether a pending or running attempt was lost: a driver that was killed cannot record its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from shoal.errors import PoolDownError, PoolElsewhereError, PoolNotFoundError
from shoal.jobs.client import HeadBusyError, HeadGoneError, JobClient
from shoal.jobs.journal.attempts import Key
from shoal.pool.backends.ray_http import RayJob, last_line
from shoal.pool.endpoint import Endpoint
from shoal.state import Store
from shoal.state.schema import Job, JobState, Pool, PoolState

HEAD_PATIENCE_S = 45.0
"""Seconds without an answer from the head until its jobs are lost: replacing a head took 8 to 20 s on 2 busy cores."""


_SIGKILLED = (-9, 137)
"""Exit codes of a process that SIGKILL ended, as Python and as a shell report them."""


class Silence(Enum):
    """Reason why the head gave no answer about a job."""

    POOL_GONE = auto()
    """The pool is down or does not exist: none of its jobs runs any more."""
    HEAD_REPLACED = auto()
    """The pool's head is not the one that the job was submitted to."""
    NO_ANSWER = auto()
    """The head does not answer, or is being replaced; it may answer later."""


@dataclass(frozen=True)
class View:
    """The head's answer about a submission, or the reason why there is no answer."""

    ray_job: RayJob | None = None
    silence: Silence | None = None


@dataclass(frozen=True)
class Lost:
    """Verdict: the attempt has ended without its driver recording the end."""

    state: JobState
    reason: str


class Missing(Enum):
    """Verdict: the head does not know the attempt, because its submitter died or has not sent it yet."""

    SUBMISSION = auto()


def judge(job: Job, view: View, *, silent_for: float, last_words: Callable[[], str]) -> Lost | Missing | None:
    """Decide whether an attempt was lost or never submitted; return None while it runs or while that is uncertain.

    Args:
        job: The attempt's row, pending or running.
        view: The head's answer.
        silent_for: Seconds for which the head has not answered.
        last_words: Reads the last line of the attempt's log.
    """
    match view:
        case View(silence=Silence.POOL_GONE):
            return Lost(JobState.FAILED, f'pool "{job.pool}" went down while the job was {job.state.value}')
        case View(silence=Silence.HEAD_REPLACED):
            return Lost(JobState.FAILED, f'pool "{job.pool}" got a new head while the job was {job.state.value}')
        case View(silence=Silence.NO_ANSWER):
            if silent_for < HEAD_PATIENCE_S:
                return None
            return Lost(JobState.FAILED, f'the head of pool "{job.pool}" has not answered for {HEAD_PATIENCE_S:.0f} s')
        case View(ray_job=None):
            if job.state is JobState.PENDING:
                return Missing.SUBMISSION
            return Lost(JobState.FAILED, f'the head of pool "{job.pool}" does not know the job any more')
        case View(ray_job=RayJob(status="STOPPED")):
            return Lost(JobState.CANCELLED, "the job was stopped through Ray")
        case View(ray_job=RayJob(ended=True, exit_code=code, message=message)):
            if code is None:
                return Lost(JobState.FAILED, f"the driver could not be started: {last_line(message or '')}")
            if code in _SIGKILLED:
                return Lost(JobState.FAILED, "the driver was killed, by a person or because its host ran out of memory")
            return Lost(JobState.FAILED, f"the driver ended with exit code {code}; its log ends with: {last_words()}")
    return None


def pool_endpoint(name: str, store: Store | None = None) -> Endpoint:
    """Return the endpoint of a pool's head.

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
    """Return the addresses that a job's row stores to distinguish this head from later ones."""
    return {"api": endpoint.api, "gcs": endpoint.gcs}


def look(store: Store, job: Job, endpoint_of: Callable[[str], Endpoint]) -> View:
    """Ask the head about an attempt.

    Raises:
        PoolElsewhereError: The pool is bound to another machine, whose head cannot be asked from here.
    """
    try:
        endpoint = endpoint_of(job.pool)
    except PoolNotFoundError:
        return View(silence=Silence.POOL_GONE)
    except PoolElsewhereError:
        raise
    except PoolDownError:
        with store.reading() as session:
            pool = session.get(Pool, job.pool)
        # A pool that is up but has no endpoint is replacing its head node.
        gone = pool is None or pool.state is not PoolState.UP
        return View(silence=Silence.POOL_GONE if gone else Silence.NO_ANSWER)
    if address(endpoint) != job.endpoint:
        return View(silence=Silence.HEAD_REPLACED)
    try:
        client = JobClient(endpoint.api, endpoint.token())
        return View(ray_job=client.status(Key(job.id, job.attempt).submission_id))
    except (HeadBusyError, HeadGoneError, PoolDownError):
        return View(silence=Silence.NO_ANSWER)
