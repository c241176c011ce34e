"""Client for the jobs of a pool's head. The submitting process does not need Ray."""

from __future__ import annotations

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from shoal.errors import JobError
from shoal.pool.backends.ray_http import (
    BusyHeadError,
    HeadError,
    NoAnswerError,
    RayHead,
    RefusedError,
    SlowHeadError,
    TokenRefusedError,
)

_TIMEOUT_S = 30.0
"""For one request: a submission waits for the head's agent, which took up to 10 s on a busy 2-core machine."""

_SUBMIT_ATTEMPTS = 6
"""Right after the head answers its first request, submissions still get a 500 for about 5 s; 6 tries span 15 s."""


class HeadGoneError(JobError):
    """Nothing answers at the address of the pool's head."""


class HeadBusyError(JobError):
    """The head failed to answer this request (5xx); another try may succeed."""


class JobClient(RayHead):
    """Client of one head; its methods raise `HeadGoneError`, `HeadBusyError`, or `JobError` if the head refuses.

    Args:
        api: The head's Job API, ``http://host:port``.
        token: The pool's bearer token; empty where the head asks for none.
        wait: Seconds between tries of a submission; tests pass zero.
    """

    def __init__(self, api: str, token: str, *, wait: float = 1.0) -> None:
        retrying = Retrying(
            retry=retry_if_exception_type((BusyHeadError, SlowHeadError)),
            stop=stop_after_attempt(_SUBMIT_ATTEMPTS),
            wait=wait_exponential(multiplier=wait, max=4 * wait),
            reraise=True,
        )
        super().__init__(api, token, timeout_s=_TIMEOUT_S, retrying=retrying, translate=lambda e: _job_error(api, e))


def _job_error(api: str, error: HeadError) -> JobError:
    """Return the error that users of jobs see."""
    match error:
        case SlowHeadError():
            return HeadGoneError(f"the pool's head at {api} has not answered for {_TIMEOUT_S:.0f} s")
        case NoAnswerError():
            return HeadGoneError(
                f"the pool's head does not answer at {api} ({error}): look at it with `shoal pool describe`"
            )
        case TokenRefusedError():
            return JobError(
                f"the pool's head at {api} refused the token: it belongs to another life of the pool, or to another "
                "pool"
            )
        case RefusedError():
            kind = HeadBusyError if isinstance(error, BusyHeadError) else JobError
            return kind(f"the pool's head refused ({error.status}): {error}")
    return JobError(f"{api} answers, but not as the head of a pool does: look at it with `shoal pool describe`")
