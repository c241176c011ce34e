"""Client for the HTTP API of a Ray head, used for the jobs of all pools, and for the nodes and small scripts of pools
on existing Ray clusters. The client works without Ray installed.
"""

from __future__ import annotations

import json
import shlex
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from shoal.errors import PoolUnreachableError
from shoal.pool.endpoint import HeadAccess
from shoal.pool.timeouts import CLUSTER_JOB_PATIENCE, CLUSTER_PATIENCE, CLUSTER_UNKNOWN_PATIENCE

T = TypeVar("T")


class BusyClusterError(PoolUnreachableError):
    """The head of a cluster could not answer the request at this time. A later try may succeed."""


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
    """The head answered with an internal error (HTTP status 5xx), or the server on the way to it had too many requests
    (429). Another try may succeed."""
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


@dataclass(frozen=True)
class _Answer:
    """Answer of a Ray head to an HTTP request."""

    method: str
    status: int
    text: str


class RayHead:
    """HTTP client of one Ray head. If a request fails, the methods raise the exception that the argument `error`
    creates.

    Args:
        api: URL of the head's HTTP API, ``http://host:port``.
        token: Bearer token; empty if the head needs none.
        ca: File with the CA certificates to trust for an https URL. None: the CA certificates of this machine.
        timeout_s: Seconds to wait for the connection, and for the answer to one request.
        retrying: Rule that decides, from the exception of the last try, whether a job submission is tried again. None:
            for some time while `error` returns a `BusyClusterError`.
        error: Function that returns the exception to raise for a failed request.
        access: Way to the head through another server. None: requests go to `api`.
    """

    def __init__(
        self,
        api: str,
        token: str,
        *,
        ca: Path | None = None,
        timeout_s: float = CLUSTER_PATIENCE,
        retrying: Retrying | None = None,
        error: Callable[[Failure], Exception],
        access: HeadAccess | None = None,
    ) -> None:
        self._api = access.url if access else api
        # A head answers submissions with status 500 shortly after its start.
        self._retrying = retrying or Retrying(
            retry=retry_if_exception_type(BusyClusterError),
            stop=stop_after_delay(CLUSTER_JOB_PATIENCE),
            wait=wait_fixed(0.5),
            reraise=True,
        )
        self._error = error
        own = {"Authorization": f"Bearer {token}"} if token else {}
        self._headers: Callable[[], Mapping[str, str]] = partial(access.headers, token) if access else lambda: own
        # This is the standard library's client, because httpx takes 200 ms of CPU time in each process that uses it.
        # http.client ignores the proxies in environment variables. They could not reach a head at a loopback address.
        # Certificates are loaded only for https, because loading them takes 40 ms of CPU time.
        kind: Callable[..., HTTPConnection] = HTTPConnection
        if not self._api.lower().startswith("http:"):
            kind = partial(HTTPSConnection, context=access.certificates() if access else _trusted(ca))
        self._connection = partial(kind, timeout=timeout_s)

    def get(self, path: str, read: Callable[[Any], T], params: Mapping[str, str] | None = None) -> T:
        """Send a GET request, and return the part of the JSON answer that the function `read` extracts."""
        return self._read(self._send("GET", f"{path}?{urlencode(params)}" if params else path), read)

    def upload(self, package: str, content: bytes) -> None:
        """Upload a package with code for a job. The job's submission must name the package. Ray removes the package
        after the job.
        """
        self._check(self._send("PUT", f"/api/packages/gcs/{package}", content))

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

        def submit_once() -> bool:
            answer = self._send("POST", "/api/jobs/", json.dumps(body).encode(), {"Content-Type": "application/json"})
            # Ray answers a duplicate id with status 500 instead of 400, so duplicates are recognized by the answer's
            # text. If two processes submit the same id at the same time, Ray may refuse both submissions (ray#31356).
            # So a submission counts as a duplicate only if the head has a job with this id.
            duplicate = answer.status >= HTTPStatus.BAD_REQUEST and "already exists" in answer.text
            if duplicate and self.status(submission_id) is not None:
                return False
            self._check(answer)
            return True

        return self._retrying(submit_once)

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

    def _about(self, method: str, submission_id: str, what: str, read: Callable[[Any], T]) -> T | None:
        """Send a request about a submitted job. Return None if the head does not know the job's id."""
        answer = self._send(method, f"/api/jobs/{quote(submission_id, safe='')}{what}")
        return None if answer.status == HTTPStatus.NOT_FOUND else self._read(answer, read)

    def _read(self, answer: _Answer, read: Callable[[Any], T]) -> T:
        self._check(answer)
        try:
            return read(json.loads(answer.text))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._failure(Problem.NOT_RAY, repr(error), answer) from error

    def _check(self, answer: _Answer) -> None:
        status = answer.status
        if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            return
        is_token = status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        is_busy = status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS
        problem = Problem.TOKEN_REFUSED if is_token else Problem.BUSY if is_busy else Problem.REFUSED
        raise self._failure(problem, last_line(answer.text, empty="without a reason"), answer)

    def _failure(self, problem: Problem, reason: str, answer: _Answer) -> Exception:
        return self._error(Failure(problem, reason, answer.method, answer.status))

    def _send(
        self, method: str, path: str, content: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> _Answer:
        api = urlsplit(self._api)
        with closing(self._connection(api.hostname or "", api.port)) as connection:
            try:
                connection.connect()
            except ConnectionRefusedError as error:
                raise self._no_answer(Problem.NOTHING_LISTENS, method, error) from error
            except TimeoutError as error:
                raise self._no_answer(Problem.NO_ANSWER, method, error) from error
            except (OSError, UnicodeError) as error:  # UnicodeError: the host's name is too long for DNS
                raise self._no_answer(Problem.NO_CONNECTION, method, error) from error
            try:
                connection.request(method, api.path + path, content, {**self._headers(), **(headers or {})})
                response = connection.getresponse()
                return _Answer(method, response.status, response.read().decode(errors="replace"))
            except TimeoutError as error:
                raise self._no_answer(Problem.SLOW, method, error) from error
            except (OSError, HTTPException) as error:
                raise self._no_answer(Problem.NO_ANSWER, method, error) from error

    def _no_answer(self, problem: Problem, method: str, error: Exception) -> Exception:
        return self._error(Failure(problem, str(error) or type(error).__name__, method))


def _trusted(ca: Path | None) -> ssl.SSLContext:
    """Return the certificates by which the certificate of a head is checked."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # SSLError is a subclass
        raise PoolUnreachableError(
            f"ca_file={ca} cannot be used: {error}. The file has to contain CA certificates in PEM format"
        ) from None


def _ray_job(answer: Mapping[str, Any]) -> RayJob:
    return RayJob(
        str(answer["status"]), answer.get("message"), answer.get("driver_exit_code"), answer.get("why_ended", "")
    )


def last_line(text: str, *, empty: str = "(nothing)") -> str:
    """Return the last non-blank line of a text. If all lines are blank, return the argument `empty`."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else empty


GCS_PORT = 6379
"""Default port of the GCS (Ray's control service)."""

_MOST_NODES = 10_000
"""Largest number of nodes to request from Ray's state API. Without a limit in the request, the API returns only 100."""


@dataclass(frozen=True)
class ClusterNode:
    """One node that is alive in a Ray cluster, as the cluster's head reports it."""

    id: str
    name: str
    is_head: bool
    ip: str
    cpus: int
    gpus: int
    memory_bytes: int = 0


def alive_nodes(head: RayHead) -> list[ClusterNode]:
    """Return the cluster's nodes that are alive: first the head, then the other nodes, sorted by name."""
    found = head.get(
        "/api/v0/nodes",
        lambda answer: [_node(row) for row in answer["data"]["result"]["result"]],
        params={
            "detail": "true",
            "limit": str(_MOST_NODES),
            "filter_keys": "state",
            "filter_predicates": "=",
            "filter_values": "ALIVE",
        },
    )
    return sorted(found, key=lambda node: (not node.is_head, node.name, node.id))


def python_version(head: RayHead) -> str | None:
    """Return the full version of the cluster's Python, such as 3.11.7, or None if the head does not report it."""
    with suppress(PoolUnreachableError):
        return head.get("/api/v0/cluster_metadata", lambda answer: str(answer["data"]["pythonVersion"]))
    return None


def _node(row: Mapping[str, Any]) -> ClusterNode:
    resources = row["resources_total"] or {}
    return ClusterNode(
        id=str(row["node_id"]),
        name=str(row["node_name"]),
        is_head=bool(row["is_head_node"]),
        ip=str(row["node_ip"]),
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        memory_bytes=int(resources.get("memory", 0)),
    )


_RUN = 'exec env PYTHONSAFEPATH=1 "${SHOAL_PYTHON:-python}" -c "$0" "$@"'
"""Shell command that runs a script with the cluster's Python: `$SHOAL_PYTHON` if this variable is set on the cluster,
else `python`. The script imports nothing from the head's current folder. The variable replaces the option -P, which an
old Python would refuse, so that the preflight check can name the version."""


class ScriptRunner:
    """Runner of scripts on one Ray cluster.

    Args:
        head: Client of the cluster's head.
        cluster: The cluster in error messages, such as ``the Ray cluster at http://10.0.0.1:8265``.
        pool: Name of the pool, which marks the jobs.
        gcs: Address of the cluster's control service. None: the script finds it on its node.

    Raises:
        PoolUnreachableError: Raised by every method if the cluster does not answer or refuses the request.
    """

    def __init__(self, head: RayHead, cluster: str, pool: str, gcs: str | None = None) -> None:
        self._head = head
        self._cluster = cluster
        self._pool = pool
        self._gcs = gcs

    def run(self, what: str, script: Path, order: Mapping[str, Any]) -> dict[str, Any]:
        """Run a script that changes nothing, and return its answer. If it fails, it runs once more, because on a busy
        head Ray may fail to start a job."""

        def answer() -> dict[str, Any]:
            job_id = f"shoal-{what}-{self._pool}-{time.time_ns()}"
            self.submit(job_id, script, order)
            found = self.answer(job_id)
            self.forget(job_id)
            return found

        try:
            return answer()
        except PoolUnreachableError:
            return answer()

    def submit(self, job_id: str, script: Path, order: Mapping[str, Any]) -> None:
        """Start a script as a Ray job with the id `job_id`, unless the cluster already has a job with this id."""
        argv = ["sh", "-c", _RUN, script.read_text(), json.dumps({"gcs": self._gcs, **order})]
        self._head.submit(argv, job_id, {"shoal_pool": self._pool})

    def answer(self, job_id: str) -> dict[str, Any]:
        """Wait until a submitted script has ended, and return its answer: the last line of its log, read as JSON."""
        status, log = self.outcome(job_id)
        if status != "SUCCEEDED":
            job = self._head.status(job_id)  # says why a script without a log was not run
            reason = last_line(log if log.strip() or job is None else job.message or "")
            raise PoolUnreachableError(
                f"shoal's job on {self._cluster} ended with status {status}: {reason} (the cluster's dashboard shows "
                "the whole log)"
            )
        return dict(json.loads(last_line(log)))

    def outcome(self, job_id: str) -> tuple[str, str]:
        """Wait until a submitted script has ended, and return its status and its log."""
        until = time.monotonic() + CLUSTER_JOB_PATIENCE
        known_at = time.monotonic()
        while (job := self._head.status(job_id)) is None or not job.ended:
            now = time.monotonic()
            known_at = known_at if job is None else now
            if now > known_at + CLUSTER_UNKNOWN_PATIENCE:
                raise PoolUnreachableError(
                    f"{self._cluster} has lost shoal's job {job_id}: check whether the cluster's head was restarted, "
                    "and try again"
                )
            if now > until:
                raise PoolUnreachableError(
                    f"{self._cluster} did not complete a small job of shoal within {CLUSTER_JOB_PATIENCE:.0f} s: check "
                    "in the cluster's dashboard whether the cluster can start jobs"
                )
            time.sleep(0.2)
        return job.status, self._head.logs(job_id)

    def forget(self, job_id: str) -> None:
        """Delete an ended job from the cluster's list of jobs. If this fails, the job stays in the list."""
        with suppress(PoolUnreachableError):
            self._head.delete(job_id)
