"""HTTP server on a pool's head that starts the drivers of jobs, and answers requests in the format of Ray's Job API.

Ray's dashboard also implements this API. But the dashboard consists of several processes on each head, and for each job
it starts a process in addition to the job's driver. Here a driver is a command, or the fork of a process that has
already imported the drivers' modules.
"""

from __future__ import annotations

import hmac
import itertools
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shoal import own_pauses
from shoal.os_processes import how_ended, python_command
from shoal.pool.endpoint import LIBRARIES, driver_arguments
from shoal.pool.timeouts import DRIVER_START_TIMEOUT, DRIVER_STOP_PATIENCE, HEAD_REQUEST_TIMEOUT, HEAD_TOKEN_TIMEOUT

_FORK_SERVER = "shoal.jobs.driver.fork_server"


class _Command(subprocess.Popen[bytes]):
    start_error = why_ended = ""


def start_command(command: Sequence[str], folder: Path, log: Path) -> Process:
    """Start a command as a process with a process group of its own."""
    try:
        with log.open("ab") as output:
            return _Command(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
    except OSError as error:
        process = _RequestedProcess()
        process.refused(str(error))
        return process


def kill_group(process: Process) -> None:
    """Kill all processes of a process group, unless the group's leader has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class _ChildProcess:
    """A forked child process, with the methods of `subprocess.Popen` that this module uses."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._lock = threading.Lock()
        self._has_ended = False

    def kill(self) -> None:
        # After `waitpid`, the kernel may give the process id to another process.
        with self._lock:
            if not self._has_ended:
                os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._has_ended = True
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _start_fork_server(requests: int, answers: int) -> subprocess.Popen[bytes] | _ChildProcess:
    """Start the program of the fork server in a session of its own.

    If this process has only one thread, apart from that of its clock, and has not imported Ray, the fork server is a
    fork of it. Then the two share the memory of the modules that both use (30 MiB), and the start takes 0.2 s of CPU
    time instead of 0.6 s. After a fork, Ray would write to the streams of this process, also in the drivers.
    """
    if len(os.listdir("/proc/self/task")) - own_pauses.threads() > 1 or "ray" in sys.modules:
        command = python_command("-m", _FORK_SERVER)
        return subprocess.Popen(command, stdin=requests, stdout=answers, start_new_session=True)
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(requests, 0)
            os.dup2(answers, 1)
            # Close the child's copies of this process's descriptors. They would keep files locked and sockets open.
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            sys.argv = [_FORK_SERVER]
            runpy.run_module(_FORK_SERVER, run_name="__main__")
        finally:
            os._exit(1)
    return _ChildProcess(pid)


class _RequestedProcess:
    """A process that was requested from the fork server. It may not have started yet.

    Attributes:
        start_error: Why the process could not be started; empty if it was started.
        why_ended: Why the process was killed; empty if this is not known.
    """

    def __init__(self) -> None:
        self._pid: int | None = None
        self._code: int | None = None
        self.start_error = self.why_ended = ""
        self._changed = threading.Event()

    @property
    def pid(self) -> int:
        """Wait until the process has started, and return its process id.

        Raises:
            ProcessLookupError: The process was not started, or not in time.
        """
        self._changed.wait(DRIVER_START_TIMEOUT)
        if self._pid is None:
            why = self.start_error or f"the fork server did not start it within {DRIVER_START_TIMEOUT:.0f} s"
            raise ProcessLookupError(f"there is no process: {why}")
        return self._pid

    def poll(self) -> int | None:
        return self._code

    def started(self, pid: int) -> None:
        self._pid = pid
        self._changed.set()

    def ended(self, code: int, why: str = "") -> None:
        self.why_ended = why
        self._code = code
        self._changed.set()

    def refused(self, reason: str) -> None:
        self.start_error = f"the head cannot start another process: {reason}"
        self.ended(1)


Process = _Command | _RequestedProcess
"""A started process, which leads a process group of its own."""


class ForkServer:
    """Handle of a fork server: a process that forks itself for each driver (see `shoal.jobs.driver.fork_server`).

    The constructor starts the fork server, so that its imports are done before the first job is submitted.

    Args:
        libraries: Libraries that are imported before the first job. With MLflow's stores, shoal's own MLflow database
            is created, too, if there is none.
    """

    def __init__(self, libraries: Sequence[str] = ()) -> None:
        self._drivers: dict[str, _RequestedProcess] = {}
        self._stamp = _package_folder_times()
        self._has_ended = False
        requests, request_to = os.pipe()
        answers_from, answers = os.pipe()
        self._requests, self._answers = os.fdopen(request_to, "wb", buffering=0), os.fdopen(answers_from, "rb")
        try:
            self._process = _start_fork_server(requests, answers)
        finally:
            os.close(requests)
            os.close(answers)
        threading.Thread(target=self._read, name="shoal-fork-server", daemon=True).start()
        # If the fork server has ended already, the first request for a driver finds out.
        with suppress(OSError):
            self._ask({"libraries": list(libraries)})

    def is_current(self) -> bool:
        """Return whether the fork server runs, and no package was installed or removed since its start."""
        return not self._has_ended and self._stamp == _package_folder_times()

    def is_busy(self) -> bool:
        """Return whether any driver that this fork server has started still runs."""
        return bool(self._drivers)

    def start(self, key: str, arguments: Sequence[str], libraries: Sequence[str], folder: Path, log: Path) -> Process:
        """Let the fork server import the libraries that it has not imported yet, and start a driver.

        Raises:
            OSError: The fork server has ended.
        """
        driver = self._drivers[key] = _RequestedProcess()
        what = {"id": key, "arguments": list(arguments), "libraries": list(libraries)}
        self._ask({**what, "folder": str(folder), "log": str(log)})
        return driver

    def close(self) -> None:
        """End the fork server and all drivers that it has started."""
        # Kill the fork server instead of closing its pipes, because it may be importing modules, and would notice the
        # closed pipes only after the import.
        self._process.kill()

    def _ask(self, request: dict[str, Any]) -> None:
        self._requests.write(json.dumps(request).encode() + b"\n")

    def _read(self) -> None:
        with self._requests, self._answers:
            for line in self._answers:
                answer: dict[str, Any] = json.loads(line)
                driver = self._drivers[answer["id"]]
                if "pid" in answer:
                    driver.started(answer["pid"])
                    continue
                if "refused" in answer:
                    driver.refused(answer["refused"])
                else:
                    driver.ended(answer["code"], answer["why"])
                del self._drivers[answer["id"]]
        self._has_ended = True
        # When the fork server ends, the kernel kills its drivers. So -SIGKILL is recorded as their exit code.
        why = f"the process that forks the drivers of the head {how_ended(self._process.wait())}"
        for driver in self._drivers.values():
            driver.ended(-signal.SIGKILL, why)


def _package_folder_times() -> list[int]:
    """Return the modification times of the folders of installed packages. They change when a package is installed or
    removed."""
    folders = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    return [os.stat(folder).st_mtime_ns for folder in sorted(folders)]


_CLOSE_S = 0.1
"""Longest time in seconds that the server needs to close."""

_LARGEST_REQUEST = 2**20
"""Largest size of a request in bytes. A request is small, because it contains only a command and some names."""

_MOST_DISCARDED = 2**26
"""Largest number of bytes of a request that is too large, which are read before the answer."""

_MOST_STRANGERS = 64
"""Largest number of connections that have not sent the token yet. The number is far above that of a pool's clients that
connect in the same millisecond, and far below the number of files that a process may open."""

_Answer = tuple[HTTPStatus, dict[str, Any]]


class _Driver:
    """The driver of a submitted job.

    Args:
        process: Process of the driver.
        log: File with the driver's output.
    """

    def __init__(self, process: Process, log: Path) -> None:
        self._log = log
        self._process = process
        self._is_stopped = False

    def runs(self) -> bool:
        return self._process.poll() is None

    def status(self) -> dict[str, Any]:
        """Return the driver's state in the format of Ray's Job API."""
        code = self._process.poll()
        if code is None:
            return {"status": "RUNNING"}
        if self._process.start_error:
            return {"status": "FAILED", "message": self._process.start_error}
        status = "STOPPED" if self._is_stopped else "FAILED" if code else "SUCCEEDED"
        return {"status": status, "driver_exit_code": code, "why_ended": self._process.why_ended}

    def output(self) -> str:
        """Return what the driver has printed; empty if there is no file, because the driver was never started."""
        with suppress(FileNotFoundError):
            return self._log.read_text(errors="replace")
        return ""

    def stop(self) -> bool:
        """Send SIGTERM to the driver. If the driver does not end within 3 s, send SIGKILL to all of its processes."""
        if not self.runs():
            return False
        self._is_stopped = True
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        killing = threading.Timer(DRIVER_STOP_PATIENCE, kill_group, [self._process])
        killing.daemon = True
        killing.start()
        return True


class _Server(ThreadingHTTPServer):
    """HTTP server whose threads and descriptors nobody can use up without the token.

    A connection without the token is closed after 10 s. If there are too many of them, the oldest one is closed. So a
    client with the token, which sends the token at once, gets an answer.
    """

    daemon_threads = True
    request_queue_size = 2 * _MOST_STRANGERS

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._strangers: dict[socket.socket, float] = {}
        self._strangers_lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer the requests of a new connection in a thread."""
        with self._strangers_lock:
            self._strangers[request] = time.monotonic()
            oldest = next(iter(self._strangers)) if len(self._strangers) > _MOST_STRANGERS else None
        if oldest:
            self._hang_up(oldest)
        super().process_request(request, client_address)

    def admit(self, connection: socket.socket) -> None:
        """Record that a connection has sent the token."""
        with self._strangers_lock:
            self._strangers.pop(connection, None)

    def service_actions(self) -> None:
        """Close the connections that have not sent the token in time; `serve_forever` calls this method every 0.1 s."""
        with self._strangers_lock:
            begun = time.monotonic() - HEAD_TOKEN_TIMEOUT
            late = [connection for connection, opened in self._strangers.items() if opened < begun]
        for connection in late:
            self._hang_up(connection)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was answered."""
        self.admit(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request, but not that of a closed connection: strangers would fill the log."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _hang_up(self, connection: socket.socket) -> None:
        """Let the thread of a connection find its end, and close it."""
        self.admit(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class JobServer:
    """HTTP server on loopback that starts the drivers of jobs as child processes of this process.

    Args:
        folder: Folder of the node, in which the drivers run and their output is written.
        token: Bearer token that each request needs.
        libraries: Libraries that are imported before the first job. With MLflow's stores, shoal's own MLflow database
            is created, too, if there is none.
    """

    def __init__(self, folder: Path, token: str, libraries: Sequence[str] = ()) -> None:
        self._folder = folder
        self._drivers: dict[str, _Driver] = {}
        self._fork_servers = [ForkServer(libraries)]
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        server, expected = self, f"Bearer {token}".encode()

        class Handler(BaseHTTPRequestHandler):
            timeout = HEAD_REQUEST_TIMEOUT

            def do_GET(self) -> None:
                answer: _Answer = HTTPStatus.UNAUTHORIZED, {}
                if hmac.compare_digest(self.headers.get("Authorization", "").encode(), expected):
                    server._server.admit(self.connection)
                    length = int(self.headers.get("Content-Length") or 0)
                    if length > _LARGEST_REQUEST:
                        # A client that cannot send all of its request would not read the answer.
                        left = min(length, _MOST_DISCARDED)
                        while left > 0 and (read := self.rfile.read(min(left, _LARGEST_REQUEST))):
                            left -= len(read)
                        answer = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {}
                    else:
                        answer = server._answer(self.command, self.path, self.rfile.read(length))
                content = json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_DELETE = do_GET

            def log_message(self, *_: object) -> None:
                """Do nothing, so that requests add no lines to the supervisor's log."""

        self._server = _Server(Handler)
        serve = partial(self._server.serve_forever, poll_interval=_CLOSE_S)
        threading.Thread(target=serve, name="shoal-jobs", daemon=True).start()

    @property
    def url(self) -> str:
        """Return the URL of the Job API."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def busy(self) -> bool:
        """Return whether any driver runs."""
        with self._lock:
            return any(driver.runs() for driver in self._drivers.values())

    def close(self) -> None:
        """Stop accepting requests, and end the drivers."""
        self._server.shutdown()
        self._server.server_close()
        for server in self._fork_servers:
            server.close()

    def _answer(self, method: str, path: str, body: bytes) -> _Answer:
        """Answer an HTTP request in the format of Ray's Job API."""
        if (method, path) == ("POST", "/api/jobs/"):
            return self._submit(body)
        submission_id, _, what = path.removeprefix("/api/jobs/").partition("/")
        with self._lock:
            driver = self._drivers.get(submission_id)
        match method, what:
            case _ if driver is None:
                return HTTPStatus.NOT_FOUND, {}
            case "GET", "":
                return HTTPStatus.OK, driver.status()
            case "GET", "logs":
                return HTTPStatus.OK, {"logs": driver.output()}
            case "POST", "stop":
                return HTTPStatus.OK, {"stopped": driver.stop()}
            case "DELETE", "" if not driver.runs():
                with self._lock:
                    self._drivers.pop(submission_id, None)
                return HTTPStatus.OK, {}
        return HTTPStatus.BAD_REQUEST, {}

    def _submit(self, body: bytes) -> _Answer:
        try:
            job = json.loads(body)
            submission_id, command = str(job["submission_id"]), shlex.split(str(job["entrypoint"]))
            libraries = str((job.get("metadata") or {}).get(LIBRARIES, "")).split()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return HTTPStatus.BAD_REQUEST, {"error": f"the request is not a job: {error!r}"}
        with self._lock:
            if submission_id in self._drivers:
                return HTTPStatus.BAD_REQUEST, {"error": f"the job {submission_id} already exists"}
            log = self._folder / f"driver-{next(self._numbers)}.log"
            process: Process | None = None
            if (arguments := driver_arguments(command)) is not None:
                with suppress(OSError):
                    process = self._fork_server().start(submission_id, arguments, libraries, self._folder, log)
            self._drivers[submission_id] = _Driver(process or start_command(command, self._folder, log), log)
        return HTTPStatus.OK, {"submission_id": submission_id}

    def _fork_server(self) -> ForkServer:
        """Return a fork server that has imported the currently installed packages. If packages have changed, start a
        new fork server. End older fork servers that have no running driver."""
        *older, newest = self._fork_servers
        if not newest.is_current():
            older, newest = [*older, newest], ForkServer()
        for server in older:
            if not server.is_busy():
                server.close()
        self._fork_servers = [*(server for server in older if server.is_busy()), newest]
        return newest
