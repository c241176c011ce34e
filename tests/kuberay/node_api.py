"""The part of the Kubernetes API that a node uses, in a small HTTP server: the agent is tested with it without Go."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Object = dict[str, Any]


class NodeApi:
    """Pods of one node, and what the node writes about itself and about them.

    Attributes:
        node: The node's object; None until it has registered.
        pods: By name, those that exist.
        seen: By name, the last status of each pod, also of those that are gone.
        events: Reasons and messages of events.
        secrets: Keys and values in base64 of each Secret.
    """

    def __init__(self) -> None:
        self.node: Object | None = None
        self.leases: list[Object] = []
        self.pods: dict[str, Object] = {}
        self.seen: dict[str, Object] = {}
        self.events: list[tuple[str, str]] = []
        self.secrets: dict[str, dict[str, str]] = {}
        self.slices: list[Object] = []
        self._changes: list[tuple[str, str, Object]] = []
        self._changed = threading.Condition()
        self._is_closed = False
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                sent = self.rfile.read(size)
                if len(sent) < size:
                    return  # the agent has given the request up, as when a pod ends while its status is written
                body = json.loads(sent or b"null")
                if "watch=true" in self.path:
                    self._watch()
                    return
                status, answer = api.answer(self.command, self.path.partition("?")[0], body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def _watch(self) -> None:
                self.close_connection = True
                self.send_response(200)
                self.end_headers()
                for kind, made in api.changes(self.path.partition("?")[0].rpartition("/")[2]):
                    self.wfile.write(json.dumps({"type": kind, "object": made}).encode() + b"\n")

            do_GET = do_POST = do_PATCH = do_DELETE = _handle

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """End the server."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def create_pod(self, manifest: Object) -> None:
        """Bind a pod to the node."""
        name = manifest["metadata"]["name"]
        manifest["metadata"] |= {"namespace": "default", "uid": f"{name}-uid"}
        self.pods[name] = manifest
        self._publish("pods", "ADDED", manifest)

    def change_pod(self, name: str, **metadata: Any) -> None:
        """Change the metadata of a pod: annotations, or the wish that it ends."""
        self.pods[name]["metadata"] |= metadata
        self._publish("pods", "MODIFIED", self.pods[name])

    def publish_service(self, name: str, *addresses: str) -> None:
        """Let the name of a service lead to addresses."""
        made = {
            "metadata": {"name": name, "namespace": "default", "labels": {"kubernetes.io/service-name": name}},
            "endpoints": [{"addresses": [each]} for each in addresses],
        }
        self._publish("endpointslices", "MODIFIED", made)

    def changes(self, resource: str) -> Iterator[tuple[str, Object]]:
        """All changes of a resource, until the server closes."""
        sent = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or len(self._changes) > sent)  # noqa: B023
                if self._is_closed:
                    return
                new, sent = self._changes[sent:], len(self._changes)
            for of, kind, made in new:
                if of == resource:
                    yield kind, made

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """The answer to a request."""
        parts = path.strip("/").split("/")
        match method, parts[-1]:
            case "GET", "pods" | "endpointslices":
                # Everything comes by the watch, which starts with the first change.
                return 200, {"metadata": {"resourceVersion": "0"}, "items": []}
            case "POST", "nodes":
                self.node = body
            case "POST", "leases":
                self.leases.append(body)
            case "POST", "events":
                self.events.append((body["reason"], body["message"]))
            case "POST", "token":
                return 201, {"status": {"token": f"token of {body['spec']['boundObjectRef']['name']}"}}
            case "PATCH", "status" if "pods" in parts:
                self.seen[parts[-2]] = body["status"]
            case "PATCH", "status":
                assert self.node is not None
                self.node["status"] = self.node.get("status", {}) | body["status"]
            case "PATCH", _ if "leases" in parts:
                if not self.leases:
                    return 404, {}
                self.leases.append(body)
            case "GET", name if "secrets" in parts and name in self.secrets:
                return 200, {"data": self.secrets[name]}
            case "DELETE", name:
                self._publish("pods", "DELETED", self.pods.pop(name))
            case _:
                return 404, {}
        return 200, {}

    def _publish(self, resource: str, kind: str, made: Object) -> None:
        with self._changed:
            self._changes.append((resource, kind, json.loads(json.dumps(made))))
            self._changed.notify_all()
