"""Submit, look up and stop jobs through the HTTP API of a pool's head, so that the submitter needs no Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from shoal.errors import JobError
from shoal.jobs.timeouts import HEAD_TIMEOUT_S
from shoal.pool.backends.ray_http import Failure, Problem, RayHead
from shoal.pool.endpoint import Endpoint, HeadAccess

SUBMIT_ATTEMPTS = 6
"""Tries to submit a job, 15 s in total. A new head refuses submissions with status 500 for about 5 s."""


class HeadGoneError(JobError):
    """Error for a request that the head did not answer.

    If the head's machine refused the connection, the head has ended.
    """


class HeadBusyError(JobError):
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
            api, token, ca=ca, timeout_s=HEAD_TIMEOUT_S, retrying=retrying, error=self._job_error, access=access
        )

    @classmethod
    def at(cls, endpoint: Endpoint) -> Self:
        """Return the client of a pool's head.

        Raises:
            PoolDownError: The token file is gone because the pool went down.
        """
        return cls(endpoint.api, endpoint.token(), ca=endpoint.ca_path, access=endpoint.access)

    def _job_error(self, failure: Failure) -> JobError:
        head, refused = f"the pool's head at {self._api}", f"the pool's head refused ({failure.status})"
        match failure.problem:
            case Problem.SLOW:
                return _SlowError(f"{head} has not answered for {HEAD_TIMEOUT_S:.0f} s")
            case Problem.NOTHING_LISTENS | Problem.NO_CONNECTION | Problem.NO_ANSWER as problem:
                return (HeadGoneError if problem is Problem.NOTHING_LISTENS else HeadUnreachableError)(
                    f"the pool's head does not answer at {self._api} ({failure.reason}): "
                    "check the pool with `shoal pool describe`"
                )
            case Problem.TOKEN_REFUSED:
                return JobError(
                    f"{head} refused the token, which belongs to another pool or to an earlier head: check the pool "
                    "with `shoal pool describe`"
                )
            case Problem.BUSY:
                return HeadBusyError(f"{refused}: {failure.reason}")
            case Problem.REFUSED:
                return JobError(f"{refused}: {failure.reason}")
        return JobError(f"{head} does not answer like a Ray head: check the pool with `shoal pool describe`")
