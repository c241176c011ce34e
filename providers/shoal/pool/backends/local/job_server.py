"""Run the drivers of jobs on a pool's head, and answer the requests of Ray's Job API for them.

Ray's own implementation of this API, its dashboard, takes several processes on each head, and starts a further one for
each job, before the job's driver.
"""

from __future__ import annotations

import hmac
import json
import os
import shlex
import signal
import subprocess
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_STOP_PATIENCE_S = 3.0
"""Seconds that a driver has to end after SIGTERM. Ray gives it the same time."""

_LARGEST_REQUEST = 2**20
"""Limit of a request's size in bytes. A request contains a command and some names."""

_Answer = tuple[HTTPStatus, dict[str, Any]]


class _Driver:
    """A submitted command, which runs in a process group of its own."""

    def __init__(self, command: str, folder: Path, log: Path) -> None:
        self.log = log
        self._is_stopped = False
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                shlex.split(command),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def runs(self) -> bool:
        return self._process.poll() is None

    def status(self) -> dict[str, Any]:
        """Return the state of the command as Ray's Job API reports it."""
        code = self._process.poll()
        if code is None:
            return {"status": "RUNNING"}
        status = "STOPPED" if self._is_stopped else "FAILED" if code else "SUCCEEDED"
        return {"status": status, "driver_exit_code": code}

    def stop(self) -> bool:
        """Send SIGTERM to the command, and SIGKILL to all of its processes if it has not ended then.

        Returns:
            False if the command has ended before.
        """
        if not self.runs():
            return False
        self._is_stopped = True
        self._process.terminate()
        killing = threading.Timer(_STOP_PATIENCE_S, self._kill)
        killing.daemon = True
        killing.start()
        return True

    def _kill(self) -> None:
        if self.runs():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class JobServer:
    """HTTP server on loopback that starts the drivers of jobs as child processes of this process.

    Args:
        folder: Folder of the node, in which the drivers run and their output is written.
        token: Bearer token that each request needs.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self._folder = folder
        self._drivers: dict[str, _Driver] = {}
        self._lock = threading.Lock()
        server, expected = self, f"Bearer {token}".encode()

        class Handler(BaseHTTPRequestHandler):
            def _handle(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), expected):
                    answer: _Answer = HTTPStatus.UNAUTHORIZED, {}
                elif length > _LARGEST_REQUEST:
                    answer = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {}
                else:
                    answer = server._answer(self.command, self.path, self.rfile.read(length))
                content = json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = _handle

            def log_message(self, *_: object) -> None:
                """Write no line for each request into the supervisor's log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="shoal-jobs", daemon=True).start()

    @property
    def url(self) -> str:
        """URL of the Job API."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def busy(self) -> bool:
        """Return whether a driver runs."""
        with self._lock:
            return any(driver.runs() for driver in self._drivers.values())

    def close(self) -> None:
        """Accept no further requests. The drivers go on, until the supervisor kills all processes of the node."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, method: str, path: str, body: bytes) -> _Answer:
        """Answer a request as Ray's Job API does."""
        if (method, path) == ("POST", "/api/jobs/"):
            return self._submit(json.loads(body))
        submission_id, _, what = path.removeprefix("/api/jobs/").partition("/")
        with self._lock:
            driver = self._drivers.get(submission_id)
        match method, what:
            case _ if driver is None:
                return HTTPStatus.NOT_FOUND, {}
            case "GET", "":
                return HTTPStatus.OK, driver.status()
            case "GET", "logs":
                return HTTPStatus.OK, {"logs": driver.log.read_text(errors="replace")}
            case "POST", "stop":
                return HTTPStatus.OK, {"stopped": driver.stop()}
            case "DELETE", "" if not driver.runs():
                with self._lock:
                    self._drivers.pop(submission_id, None)
                return HTTPStatus.OK, {}
        return HTTPStatus.BAD_REQUEST, {}

    def _submit(self, job: dict[str, str]) -> _Answer:
        submission_id = job["submission_id"]
        with self._lock:
            if submission_id in self._drivers:
                return HTTPStatus.BAD_REQUEST, {"error": f"the job {submission_id} already exists"}
            log = self._folder / f"driver-{len(self._drivers)}.log"
            self._drivers[submission_id] = _Driver(job["entrypoint"], self._folder, log)
        return HTTPStatus.OK, {"submission_id": submission_id}
