"""Client for the jobs of a pool's head. The submitting process does not need Ray."""

from __future__ import annotations

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from shoal.errors import JobError
from shoal.pool.backends.ray_http import Failure, Problem, RayHead

_TIMEOUT_S = 30.0
"""For one request: a submission waits for the head's agent, which took up to 10 s on a busy 2-core machine."""

_SUBMIT_ATTEMPTS = 6
"""Right after the head answers its first request, submissions still get a 500 for about 5 s; 6 tries span 15 s."""


class HeadGoneError(JobError):
    """Nothing answers at the address of the pool's head."""


class HeadBusyError(JobError):
    """The head failed to answer this request (5xx); another try may succeed."""


class _SlowError(HeadGoneError):
    """No answer within the time limit."""


class JobClient(RayHead):
    """Client of one head; its methods raise `HeadGoneError`, `HeadBusyError`, or `JobError` if the head refuses.

    Args:
        api: The head's Job API, ``http://host:port``.
        token: The pool's bearer token; empty where the head asks for none.
        wait: Seconds between tries of a submission; tests pass zero.
    """

    def __init__(self, api: str, token: str, *, wait: float = 1.0) -> None:
        retrying = Retrying(
            retry=retry_if_exception_type((HeadBusyError, _SlowError)),
            stop=stop_after_attempt(_SUBMIT_ATTEMPTS),
            wait=wait_exponential(multiplier=wait, max=4 * wait),
            reraise=True,
        )
        super().__init__(api, token, timeout_s=_TIMEOUT_S, retrying=retrying, error=self._job_error)

    def _job_error(self, failure: Failure) -> JobError:
        head, refused = f"the pool's head at {self._api}", f"the pool's head refused ({failure.status})"
        match failure.problem:
            case Problem.SLOW:
                return _SlowError(f"{head} has not answered for {_TIMEOUT_S:.0f} s")
            case Problem.NOTHING_LISTENS | Problem.NO_CONNECTION | Problem.NO_ANSWER:
                return HeadGoneError(
                    f"the pool's head does not answer at {self._api} ({failure.reason}): "
                    "look at it with `shoal pool describe`"
                )
            case Problem.TOKEN_REFUSED:
                return JobError(f"{head} refused the token: it belongs to another life of the pool, or to another pool")
            case Problem.BUSY:
                return HeadBusyError(f"{refused}: {failure.reason}")
            case Problem.REFUSED:
                return JobError(f"{refused}: {failure.reason}")
        return JobError(f"{head} does not answer as a Ray head does: look at it with `shoal pool describe`")
