"""Client for the HTTP API of a Ray head, used for the jobs of all pools and for the nodes of `ray://` pools. The client
works without Ray installed."""

from __future__ import annotations

import shlex
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tenacity import Retrying

from shoal.errors import PoolUnreachableError

T = TypeVar("T")


class Problem(Enum):
    """Kind of a failed HTTP request to a Ray head."""

    NOTHING_LISTENS = auto()
    """The head's machine refused the connection, because nothing listens at the address."""
    NO_CONNECTION = auto()
    """The connection to the head failed, but the head's machine did not refuse it."""
    SLOW = auto()
    """The connection was made, but no answer came within the time limit."""
    NO_ANSWER = auto()
    """The head did not answer, but the time limit was not reached."""
    TOKEN_REFUSED = auto()
    """The head does not accept the token, or the request has no token and the head needs one."""
    BUSY = auto()
    """The head answered with an internal error (HTTP status 5xx). Another try may succeed."""
    REFUSED = auto()
    """The head refused the request, but not because of the token."""
    NOT_RAY = auto()
    """The answer does not have the format of a Ray head's answer."""


@dataclass(frozen=True)
class Failure:
    """Description of a failed HTTP request to a Ray head.

    Attributes:
        problem: Kind of the failure.
        reason: Error message of the connection, or the last line of the head's answer (which may be a traceback).
        method: HTTP method of the request.
        status: HTTP status of the answer; None without an answer.
    """

    problem: Problem
    reason: str
    method: str
    status: int | None = None


@dataclass(frozen=True)
class RayJob:
    """Status of a submitted job, as the head reports it."""

    status: str
    """Ray's name of the job's state: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""
    message: str | None = None
    exit_code: int | None = None
    """Exit code of the driver; None while the driver runs, and if it was never started."""
    why_ended: str = ""
    """Reason why the driver was killed, if a head of shoal's own knows it."""

    @property
    def ended(self) -> bool:
        """Return whether the job has ended. Its status then no longer changes."""
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


class RayHead:
    """HTTP client of one Ray head. If a request fails, the methods raise the exception that the argument `error`
    creates.

    Args:
        api: URL of the head's HTTP API, ``http://host:port``.
        token: Bearer token; empty if the head needs none.
        ca: File with the CA certificates to trust for an https URL. None: the CA certificates of this machine.
        timeout_s: Seconds to wait for the connection, and for the answer to one request.
        retrying: Rule that decides, from the exception of the last try, whether a job submission is tried again.
        error: Function that returns the exception to raise for a failed request.
    """

    def __init__(
        self,
        api: str,
        token: str,
        *,
        ca: Path | None = None,
        timeout_s: float,
        retrying: Retrying,
        error: Callable[[Failure], Exception],
    ) -> None:
        self._api = api
        self._retrying = retrying
        self._error = error
        self._options: dict[str, Any] = {
            "headers": {"Authorization": f"Bearer {token}"} if token else {},
            "timeout": timeout_s,
            # Connect to the head directly, and not through a proxy from the environment variables, because a proxy
            # cannot reach a head at a loopback address.
            "trust_env": False,
            # Plain HTTP needs no certificates, and loading them would take 40 ms of CPU time.
            "verify": not api.lower().startswith("http:") and _trusted(ca),
        }

    def get(self, path: str, read: Callable[[Any], T], params: Mapping[str, str] | None = None) -> T:
        """Send a GET request, and return the part of the JSON answer that the function `read` extracts."""
        return self._read(self._send("GET", path, params=params), read)

    def upload(self, package: str, content: bytes) -> None:
        """Upload a package with code for a job. The job's submission must name the package. Ray removes the package
        after the job.
        """
        self._check(self._send("PUT", f"/api/packages/gcs/{package}", content=content))

    def submit(
        self, argv: Sequence[str], submission_id: str, metadata: Mapping[str, str], *, package: str | None = None
    ) -> bool:
        """Submit a job, unless the head already has a job with this id."""
        body: dict[str, Any] = {
            "entrypoint": shlex.join(argv),
            "submission_id": submission_id,
            "metadata": dict(metadata),
        }
        if package is not None:
            body["runtime_env"] = {"working_dir": f"gcs://{package}"}
        return self._retrying(self._submit_once, body)

    def status(self, submission_id: str) -> RayJob | None:
        """Return the status of a submitted job, or None if the head does not know the job's id."""
        return self._about("GET", submission_id, "", _ray_job)

    def logs(self, submission_id: str) -> str:
        """Return everything that a submitted job has printed so far, or an empty string if the head does not know the
        job's id."""
        return self._about("GET", submission_id, "/logs", lambda answer: str(answer["logs"])) or ""

    def stop(self, submission_id: str) -> bool:
        """Stop a submitted job with SIGTERM, and with SIGKILL after 3 s. Return False if the job does not run."""
        return self._about("POST", submission_id, "/stop", lambda answer: bool(answer["stopped"])) or False

    def delete(self, submission_id: str) -> bool:
        """Delete a submitted job that has ended. Return False if the head does not know the job's id."""
        return self._about("DELETE", submission_id, "", lambda answer: True) or False

    def _submit_once(self, body: Mapping[str, Any]) -> bool:
        response = self._send("POST", "/api/jobs/", json=body)
        # Ray answers a duplicate id with status 500 instead of 400, so duplicates are recognized by the answer's text.
        # If two processes submit the same id at the same time, Ray may refuse both submissions (ray#31356). So a
        # submission counts as a duplicate only if the head has a job with this id.
        duplicate = response.is_error and "already exists" in response.text
        if duplicate and self.status(str(body["submission_id"])) is not None:
            return False
        self._check(response)
        return True

    def _about(self, method: str, submission_id: str, what: str, read: Callable[[Any], T]) -> T | None:
        """Send a request about a submitted job. Return None if the head does not know the job's id."""
        response = self._send(method, f"/api/jobs/{submission_id}{what}")
        return None if response.status_code == httpx.codes.NOT_FOUND else self._read(response, read)

    def _read(self, response: httpx.Response, read: Callable[[Any], T]) -> T:
        self._check(response)
        try:
            return read(response.json())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._failure(Problem.NOT_RAY, repr(error), response) from error

    def _check(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        is_token = response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
        problem = Problem.TOKEN_REFUSED if is_token else Problem.BUSY if response.is_server_error else Problem.REFUSED
        raise self._failure(problem, last_line(response.text, empty="without a reason"), response)

    def _failure(self, problem: Problem, reason: str, response: httpx.Response) -> Exception:
        return self._error(Failure(problem, reason, response.request.method, response.status_code))

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return httpx.request(method, self._api + path, **self._options, **options)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._error(Failure(_problem(error), str(error) or type(error).__name__, method)) from error


def _trusted(ca: Path | None) -> ssl.SSLContext | bool:
    """Return the value for httpx's option `verify`, by which httpx checks the certificate of a head."""
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:  # SSLError is a subclass
        raise PoolUnreachableError(
            f"ca_file={ca} cannot be used: {error}. The file has to contain CA certificates in PEM format"
        ) from None


def _problem(error: Exception) -> Problem:
    if isinstance(error, httpx.ConnectError):
        return Problem.NOTHING_LISTENS if _is_refusal(error) else Problem.NO_CONNECTION
    return Problem.SLOW if isinstance(error, httpx.ReadTimeout) else Problem.NO_ANSWER


def _ray_job(answer: Mapping[str, Any]) -> RayJob:
    return RayJob(
        str(answer["status"]), answer.get("message"), answer.get("driver_exit_code"), answer.get("why_ended", "")
    )


def last_line(text: str, *, empty: str = "(nothing)") -> str:
    """Return the last non-blank line of a text. If all lines are blank, return the argument `empty`."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else empty


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether an error was caused by a refused connection, which means that nothing listens at the address."""
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    return _is_refusal(error.__cause__ or error.__context__)
