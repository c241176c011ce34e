"""Client for Ray's Job API over HTTP. The submitting process does not need Ray."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from shoal.errors import JobError

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


@dataclass(frozen=True)
class RayJob:
    """Status of a submission, as the head reports it."""

    status: str
    """PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""
    message: str | None = None
    exit_code: int | None = None
    """Exit code of the driver; None while it runs, and if it was never started."""

    @property
    def ended(self) -> bool:
        """Whether its driver has ended."""
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


class JobClient:
    """Client of one head.

    Args:
        api: The head's Job API, ``http://host:port``.
        token: The pool's bearer token; empty where the head asks for none.
        wait: Seconds between tries of a submission; tests pass zero.
    """

    def __init__(self, api: str, token: str, *, wait: float = 1.0) -> None:
        self._api = api
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Straight to the head: a proxy set for the internet knows no loopback address.
        # Loading certificates takes 40 ms of CPU, which plain HTTP does not need.
        verify = not api.lower().startswith("http:")
        self._http = httpx.Client(base_url=api, headers=headers, timeout=_TIMEOUT_S, trust_env=False, verify=verify)
        self._retrying = Retrying(
            retry=retry_if_exception_type((HeadBusyError, _SlowError)),
            stop=stop_after_attempt(_SUBMIT_ATTEMPTS),
            wait=wait_exponential(multiplier=wait, max=4 * wait),
            reraise=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def submit(self, argv: Sequence[str], submission_id: str, metadata: Mapping[str, str]) -> bool:
        """Start a job unless one with this id exists.

        Args:
            argv: The command, run on the head.
            submission_id: Id of the submission; Ray accepts each id only once.
            metadata: Shown in Ray's dashboard, so it must not contain secrets.

        Returns:
            False if a submission with this id existed.

        Raises:
            HeadGoneError: Nothing answers.
            JobError: The head refused it.
        """
        body = {"entrypoint": shlex.join(argv), "submission_id": submission_id, "metadata": dict(metadata)}
        return self._retrying(self._submit_once, body)

    def status(self, submission_id: str) -> RayJob | None:
        """Return the status of a submission; None if the head does not know its id."""
        answer = self._ask("GET", submission_id)
        if answer is None:
            return None
        return RayJob(str(answer["status"]), answer.get("message"), answer.get("driver_exit_code"))

    def logs(self, submission_id: str) -> str:
        """Return everything a submission has printed so far; empty if the head does not know its id."""
        answer = self._ask("GET", submission_id, "/logs")
        return "" if answer is None else str(answer["logs"])

    def stop(self, submission_id: str) -> bool:
        """Stop a submission (SIGTERM, after 3 s SIGKILL); return False if it does not run."""
        answer = self._ask("POST", submission_id, "/stop")
        return answer is not None and bool(answer["stopped"])

    def delete(self, submission_id: str) -> bool:
        """Delete a submission that has ended; return False if the head does not know its id."""
        return self._ask("DELETE", submission_id) is not None

    def _submit_once(self, body: Mapping[str, Any]) -> bool:
        response = self._send("POST", "/api/jobs/", json=body)
        # Ray wraps its own 400 for a duplicate into a 500, so the text decides.
        if response.is_error and "already exists" in response.text:
            # Two submissions at the same moment can both be refused (ray#31356): it counts only if it is there.
            if self.status(str(body["submission_id"])) is not None:
                return False
            raise HeadBusyError(_refusal(response))
        _check(response)
        return True

    def _ask(self, method: str, submission_id: str, what: str = "") -> dict[str, Any] | None:
        response = self._send(method, f"/api/jobs/{submission_id}{what}")
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        _check(response)
        answer = response.json()
        assert isinstance(answer, dict)
        return answer

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **options)
        except httpx.ReadTimeout as error:
            raise _SlowError(f"the pool's head at {self._api} has not answered for {_TIMEOUT_S:.0f} s") from error
        except httpx.TransportError as error:
            raise HeadGoneError(
                f"the pool's head does not answer at {self._api} ({error or type(error).__name__}): "
                "look at it with `shoal pool describe`"
            ) from error


def _check(response: httpx.Response) -> None:
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise JobError(
            f"the pool's head at {response.url.copy_with(path='/')} refused the token: "
            "it belongs to another life of the pool, or to another pool"
        )
    if response.is_server_error:
        raise HeadBusyError(_refusal(response))
    if response.is_error:
        raise JobError(_refusal(response))


def _refusal(response: httpx.Response) -> str:
    """Return the last line of a response, which may be a whole traceback."""
    lines = [line for line in response.text.splitlines() if line.strip()]
    return f"the pool's head refused ({response.status_code}): {lines[-1] if lines else 'without a reason'}"
