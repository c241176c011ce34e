"""Find out whether an attempt that its row says is pending or running was lost: a killed driver cannot record it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from shoal.errors import PoolDownError, PoolElsewhereError, PoolNotFoundError
from shoal.jobs.client import HeadBusyError, HeadGoneError, JobClient, RayJob
from shoal.jobs.journal.attempts import Key
from shoal.pool.endpoint import Endpoint
from shoal.state import Store
from shoal.state.schema import Job, JobState, Pool, PoolState

HEAD_PATIENCE_S = 45.0
"""How long a head may not answer before its job counts as lost: a replacement took 8 to 20 s on 2 busy cores."""


_SIGKILLED = (-9, 137)
"""As Python and as a shell say it."""


class Silence(Enum):
    """Why a head said nothing."""

    POOL_GONE = auto()
    """The pool is down or was never there: nothing of its jobs is left."""
    HEAD_REPLACED = auto()
    """The pool has another head than the one the job was submitted to."""
    NO_ANSWER = auto()
    """Nothing answers, or the pool is between two heads: it may yet."""


@dataclass(frozen=True)
class View:
    """What the head says of a submission, or why it says nothing."""

    ray_job: RayJob | None = None
    silence: Silence | None = None


@dataclass(frozen=True)
class Lost:
    """An attempt ended, and its driver did not record it."""

    state: JobState
    reason: str


class Missing(Enum):
    """The attempt was never submitted: the process that wrote its row died before."""

    SUBMISSION = auto()


def judge(job: Job, view: View, *, silent_for: float, last_words: Callable[[], str]) -> Lost | Missing | None:
    """Decide whether an attempt was lost or never submitted; None while it runs, or while that is not certain.

    Args:
        job: Its row, pending or running.
        view: What its head said.
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
            return Lost(JobState.FAILED, f'the head of pool "{job.pool}" has forgotten the job')
        case View(ray_job=RayJob(status="STOPPED")):
            return Lost(JobState.CANCELLED, "it was stopped through Ray")
        case View(ray_job=RayJob(ended=True, exit_code=code, message=message)):
            if code is None:
                return Lost(JobState.FAILED, f"its driver could not be run: {_last_line(message or '')}")
            if code in _SIGKILLED:
                return Lost(JobState.FAILED, "its driver was killed: by hand, or because its host ran out of memory")
            return Lost(JobState.FAILED, f"its driver ended with exit code {code}, its log with: {last_words()}")
    return None


def pool_endpoint(name: str, store: Store | None = None) -> Endpoint:
    """Where the head of a pool is.

    Args:
        name: The pool.
        store: Where its row is; the default store if not given.

    Raises:
        PoolNotFoundError: There is no such pool.
        PoolElsewhereError: It is bound to another machine.
        PoolDownError: It is down, or between two heads.
    """
    from shoal.pool.api import ComputePool

    return ComputePool(name, store=store).endpoint()


def address(endpoint: Endpoint) -> dict[str, str]:
    """As it is kept in a job's row, to tell this head from another."""
    return {"api": endpoint.api, "gcs": endpoint.gcs}


def look(store: Store, job: Job, endpoint_of: Callable[[str], Endpoint]) -> View:
    """Ask the head about an attempt.

    Raises:
        PoolElsewhereError: The pool is bound to another machine, and nothing can be said from here.
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
        # Up without a head that answers: it is being replaced.
        gone = pool is None or pool.state is not PoolState.UP
        return View(silence=Silence.POOL_GONE if gone else Silence.NO_ANSWER)
    if address(endpoint) != job.endpoint:
        return View(silence=Silence.HEAD_REPLACED)
    try:
        with JobClient(endpoint.api, endpoint.token()) as client:
            return View(ray_job=client.status(Key(job.id, job.attempt).submission_id))
    except (HeadBusyError, HeadGoneError, PoolDownError):
        return View(silence=Silence.NO_ANSWER)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "(nothing)"
