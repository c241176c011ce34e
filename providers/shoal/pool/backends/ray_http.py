"""Client for the HTTP API of a Ray head: the jobs of all pools, and the nodes of `ray://` pools. It needs no Ray."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from tenacity import Retrying

T = TypeVar("T")


class HeadError(Exception):
    """Base class of the problems with a head. Callers see the error into which their `translate` turns it."""


class NoAnswerError(HeadError):
    """The head did not answer; the message has the reason."""


class NoConnectionError(NoAnswerError):
    """No connection to the head could be made."""


class NothingListensError(NoConnectionError):
    """The head's machine refused the connection, because nothing listens at the address."""


class SlowHeadError(NoAnswerError):
    """The connection was made, but no answer came within the time limit."""


class RefusedError(HeadError):
    """The head refused the request; the message is the last line of its answer, which may be a whole traceback.

    Args:
        response: The head's answer.

    Attributes:
        status: HTTP status of the answer.
        method: HTTP method of the request.
    """

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(last_line(response.text, empty="without a reason"))
        self.status = response.status_code
        self.method = response.request.method


class TokenRefusedError(RefusedError):
    """The head accepts no request with this token, or none without a token."""


class BusyHeadError(RefusedError):
    """The head failed to answer this request (5xx); another try may succeed."""


class NotRayError(HeadError):
    """The answer is not that of a Ray head."""


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


class RayHead:
    """Client of one head.

    Args:
        api: URL of the head's HTTP API, ``http://host:port``.
        token: Bearer token; empty where the head asks for none.
        timeout_s: Seconds to wait for the connection, and for the answer to one request.
        retrying: When to try a submission again, by the `HeadError` of the last try.
        translate: Returns the exception to raise instead of a `HeadError`.
    """

    def __init__(
        self, api: str, token: str, *, timeout_s: float, retrying: Retrying, translate: Callable[[HeadError], Exception]
    ) -> None:
        self._api = api
        self._retrying = retrying
        self._translate = translate
        self._options: dict[str, Any] = {
            "headers": {"Authorization": f"Bearer {token}"} if token else {},
            "timeout": timeout_s,
            # Straight to the head: a proxy set for the internet knows no loopback address.
            "trust_env": False,
            # Loading certificates takes 40 ms of CPU, which plain HTTP does not need.
            "verify": not api.lower().startswith("http:"),
        }

    def get(self, path: str, read: Callable[[Any], T], params: Mapping[str, str] | None = None) -> T:
        """Return what `read` takes from the JSON document at a path."""
        with self._translated():
            return _read(self._accepted("GET", path, params=params), read)

    def submit(self, argv: Sequence[str], submission_id: str, metadata: Mapping[str, str]) -> bool:
        """Start a job unless one with this id exists.

        Args:
            argv: The command, run on the head.
            submission_id: Id of the submission; Ray accepts each id only once.
            metadata: Shown in Ray's dashboard, so it must not contain secrets.

        Returns:
            False if a submission with this id existed.
        """
        body = {"entrypoint": shlex.join(argv), "submission_id": submission_id, "metadata": dict(metadata)}
        with self._translated():
            return self._retrying(self._submit_once, body)

    def status(self, submission_id: str) -> RayJob | None:
        """Return the status of a submission; None if the head does not know its id."""
        with self._translated():
            return self._status(submission_id)

    def logs(self, submission_id: str) -> str:
        """Return everything a submission has printed so far; empty if the head does not know its id."""
        with self._translated():
            return self._about("GET", submission_id, "/logs", lambda answer: str(answer["logs"])) or ""

    def stop(self, submission_id: str) -> bool:
        """Stop a submission (SIGTERM, after 3 s SIGKILL); return False if it does not run."""
        with self._translated():
            return self._about("POST", submission_id, "/stop", lambda answer: bool(answer["stopped"])) or False

    def delete(self, submission_id: str) -> bool:
        """Delete a submission that has ended; return False if the head does not know its id."""
        with self._translated():
            return self._about("DELETE", submission_id, "", lambda answer: True) or False

    def _submit_once(self, body: Mapping[str, Any]) -> bool:
        response = self._send("POST", "/api/jobs/", json=body)
        # Ray wraps its own 400 for a duplicate into a 500, so the text decides.
        if response.is_error and "already exists" in response.text:
            # Two submissions at the same moment can both be refused (ray#31356): it counts only if it is there.
            if self._status(str(body["submission_id"])) is not None:
                return False
            raise BusyHeadError(response)
        _check(response)
        return True

    def _status(self, submission_id: str) -> RayJob | None:
        return self._about(
            "GET",
            submission_id,
            "",
            lambda answer: RayJob(str(answer["status"]), answer.get("message"), answer.get("driver_exit_code")),
        )

    def _about(self, method: str, submission_id: str, what: str, read: Callable[[Any], T]) -> T | None:
        """Send a request about a submission; return None if the head does not know its id."""
        try:
            return _read(self._accepted(method, f"/api/jobs/{submission_id}{what}"), read)
        except RefusedError as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise

    def _accepted(self, method: str, path: str, **options: Any) -> httpx.Response:
        response = self._send(method, path, **options)
        _check(response)
        return response

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return httpx.request(method, self._api + path, **self._options, **options)
        except httpx.ReadTimeout as error:
            raise SlowHeadError(_reason(error)) from error
        except httpx.ConnectError as error:
            raise (NothingListensError if _is_refusal(error) else NoConnectionError)(_reason(error)) from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise NoAnswerError(_reason(error)) from error

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except HeadError as error:
            raise self._translate(error) from error


def last_line(text: str, *, empty: str = "(nothing)") -> str:
    """Return the last line of a text that is not blank; `empty` if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else empty


def _check(response: httpx.Response) -> None:
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise TokenRefusedError(response)
    if response.is_server_error:
        raise BusyHeadError(response)
    if not response.is_success:
        raise RefusedError(response)


def _read(response: httpx.Response, read: Callable[[Any], T]) -> T:
    try:
        return read(response.json())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NotRayError(f"{response.url} returned no answer of a Ray head") from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether the cause of an error is that nothing listens at the address."""
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    return _is_refusal(error.__cause__ or error.__context__)
