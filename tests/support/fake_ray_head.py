"""A small real HTTP server that keeps jobs as Ray's head does, and refuses what it refuses."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shoal.pool.endpoint import Endpoint

TOKEN = "let-me-in"


@dataclass
class FakeJob:
    entrypoint: str
    metadata: dict[str, str]
    status: str = "PENDING"
    message: str | None = None
    exit_code: int | None = None
    logs: str = ""
    runtime_env: dict[str, Any] = field(default_factory=dict)


@dataclass
class FakeHead:
    """Jobs by submission id; `failures` are answers to give, first to last, before it works."""

    token_path: Path
    jobs: dict[str, FakeJob] = field(default_factory=dict)
    failures: list[tuple[int, str]] = field(default_factory=list)
    submissions: int = 0
    stops: list[str] = field(default_factory=list)
    packages: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.token_path.write_text(TOKEN)
        head = self

        class Handler(BaseHTTPRequestHandler):
            def _handle(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                sent = self.rfile.read(length)
                is_package = self.command == "PUT"
                body = {"package": sent} if is_package else json.loads(sent or b"{}")
                status, answer = head.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
                content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = _handle

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def endpoint(self) -> Endpoint:
        port = self._server.server_address[1]
        return Endpoint(f"http://127.0.0.1:{port}", f"127.0.0.1:{port + 1}", self.token_path)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, authorization: str, body: dict[str, Any]) -> tuple[int, Any]:
        if not authorization:
            return 401, "Unauthorized: Missing authentication token"
        if authorization != f"Bearer {TOKEN}":
            return 403, "Forbidden: Invalid authentication token"
        if self.failures:
            return self.failures.pop(0)
        if (method, path) == ("POST", "/api/jobs/"):
            return self._submit(body)
        if method == "PUT" and path.startswith("/api/packages/gcs/"):
            self.packages[path.removeprefix("/api/packages/")] = body["package"]
            return 200, ""
        submission_id, _, what = path.removeprefix("/api/jobs/").partition("/")
        job = self.jobs.get(submission_id)
        if job is None:
            return 404, f"Job {submission_id} does not exist"
        return self._about(method, what, submission_id, job)

    def _submit(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.submissions += 1
        submission_id = body["submission_id"]
        if submission_id in self.jobs:
            # The agent's 400 arrives as the head's 500, wrapped in two tracebacks.
            said = f"ValueError: Job with submission_id {submission_id} already exists. Please use another."
            return (
                500,
                f"Traceback (most recent call last):\nRuntimeError: Request failed with status code 400: {said}\n.",
            )
        self.jobs[submission_id] = FakeJob(
            body["entrypoint"], body["metadata"], runtime_env=body.get("runtime_env", {})
        )
        return 200, {"job_id": submission_id, "submission_id": submission_id}

    def _about(self, method: str, what: str, submission_id: str, job: FakeJob) -> tuple[int, Any]:
        running = job.status in ("PENDING", "RUNNING")
        if method == "GET" and what == "logs":
            return 200, {"logs": job.logs}
        if method == "GET":
            return 200, {"status": job.status, "message": job.message, "driver_exit_code": job.exit_code}
        if method == "POST" and what == "stop":
            self.stops.append(submission_id)
            if running:
                job.status = "STOPPED"
            return 200, {"stopped": running}
        if method == "DELETE":
            if running:
                return (
                    500,
                    f"RuntimeError: Attempted to delete job '{submission_id}', but it is in a non-terminal state",
                )
            del self.jobs[submission_id]
            return 200, {"deleted": True}
        return 405, "Method Not Allowed"
