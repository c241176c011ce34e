"""A stand-in for the command `ray` in pods: a head that knows its nodes and answers as Ray's HTTP API, and nodes that
register with it. It starts in a tenth of a second, so that tests of pools need no real Ray.

It has no tasks and no jobs. Run as `ray start --head …`, `ray start --address=… …` or `ray health-check --address …`.
It imports nothing but the standard library, and runs with `-I -S`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

GCS_PORT, API_PORT, AGENT_PORT = 6379, 8265, 52365
HEARTBEAT_S, LOST_AFTER_S, HEAD_LOST_AFTER_S = 0.3, 2.0, 6.0

Node = dict[str, Any]


class Head:
    """The nodes of a cluster, by their ids, and when each was heard of last."""

    def __init__(self, own: Node) -> None:
        self.cluster = uuid.uuid4().hex
        self._own = own
        self._nodes: dict[str, Node] = {}
        self._heard: dict[str, float] = {}

    def register(self, node: Node) -> str:
        """Take over a node's sign of life; return the cluster's id."""
        self._nodes[node["node_id"]] = node
        self._heard[node["node_id"]] = time.monotonic()
        return self.cluster

    def nodes(self) -> list[Node]:
        """The nodes that are alive."""
        since = time.monotonic() - LOST_AFTER_S
        return [self._own, *(node for name, node in list(self._nodes.items()) if self._heard[name] > since)]

    def api(self, path: str) -> tuple[int, Any]:
        """The answer of the HTTP API."""
        if path.startswith("/api/v0/nodes"):
            return 200, {"data": {"result": {"result": self.nodes()}}}
        if path.startswith("/api/v0/cluster_metadata"):
            return 200, {"data": {"pythonVersion": sys.version.split()[0]}}
        if path.startswith("/api/version"):
            return 200, {"ray_version": "2.60.0"}
        return 404, {"error": "not in the stand-in for Ray"}


def main() -> int:
    """Do what the command line asks for."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    command, options = sys.argv[1], _options(sys.argv[2:])
    if command == "health-check":
        return 0 if _answers(options["address"]) else 1
    node = {
        "node_id": uuid.uuid4().hex,
        "node_name": socket.gethostname(),
        "node_ip": socket.gethostbyname(socket.gethostname()),
        "is_head_node": "head" in options,
        "state": "ALIVE",
        "resources_total": {"CPU": float(options.get("num-cpus", 1)), "memory": float(options.get("memory", 2**30))},
    }
    _serve(AGENT_PORT, lambda handler, body: (200, "success"))
    if "head" not in options:
        return _follow(options["address"], node)
    head = Head(node)
    _serve(GCS_PORT, lambda handler, body: (200, head.register(json.loads(body))) if body else (200, ""))
    _serve(API_PORT, lambda handler, body: head.api(handler.path) if _allowed(handler) else (401, "Unauthorized"))
    print("Ray runtime started.", flush=True)
    threading.Event().wait()
    return 0


def _follow(address: str, node: Node) -> int:
    """Register with the head again and again; end if it is lost, or another one."""
    cluster, heard = None, time.monotonic()
    while time.monotonic() - heard < HEAD_LOST_AFTER_S:
        try:
            with urlopen(Request(f"http://{address}/", json.dumps(node).encode()), timeout=2) as answer:
                found = json.load(answer)
            heard = time.monotonic()
        except OSError:
            found = None
        if found and cluster and found != cluster:
            print("the head is another one", file=sys.stderr)
            return 1
        cluster = cluster or found
        time.sleep(HEARTBEAT_S)
    print("the head does not answer", file=sys.stderr)
    return 1


def _allowed(handler: BaseHTTPRequestHandler) -> bool:
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return True
    given = handler.headers.get("X-Ray-Authorization") or handler.headers.get("Authorization")
    return given == f"Bearer {os.environ['RAY_AUTH_TOKEN']}"


def _answers(address: str) -> bool:
    try:
        with urlopen(f"http://{address}/", timeout=2):
            return True
    except OSError:
        return False


def _options(words: list[str]) -> dict[str, str]:
    """Options as `--name=value`, `--name value` or `--name`."""
    found: dict[str, str] = {}
    for position, word in enumerate(words):
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            following = words[position + 1 : position + 2]
            found[name] = value if has_value else following[0] if following and following[0][0] != "-" else ""
    return found


def _serve(port: int, answer: Any) -> None:
    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, content = answer(self, body)
            written = json.dumps(content).encode() if content != "success" else b"success"
            self.send_response(status)
            self.send_header("Content-Length", str(len(written)))
            self.end_headers()
            self.wfile.write(written)

        do_GET = do_POST = _handle

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
