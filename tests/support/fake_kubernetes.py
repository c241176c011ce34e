"""A small Kubernetes API in a real HTTP server: it keeps objects, refuses what the real API refuses, and does what
KubeRay's operator 1.6, the scheduler and the machines do.

These act one step at each request, and nothing happens between requests: so a change is not yet carried out in the
answer to the request that makes it, and tests need no pauses.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.json_patch import Object, Refused, apply

USER_TOKEN = "kube-user"
RAY_TOKEN = "ray-token"
NAMESPACE = "ml"

_TIME = "%Y-%m-%dT%H:%M:%SZ"
_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))/namespaces/(?P<ns>[^/]+)/(?P<kind>[a-z]+)"
    r"(?:/(?P<name>[^/]+)(?P<sub>/.*)?)?"
)
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_PROXY = re.compile(r"(?:http:)?(?P<service>[^:]+):8265")


def ray_cluster(name: str, *, replicas: int = 0, max_replicas: int = 3, low: int = 0, **spec: Any) -> Object:
    """A RayCluster with one worker group."""
    group = {"groupName": "small", "replicas": replicas, "minReplicas": low, "maxReplicas": max_replicas}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"rayVersion": "2.60.0", "headGroupSpec": {}, "workerGroupSpecs": [group], **spec},
    }


@dataclass
class FakeKubernetes:
    """The API server, the operator and the machines.

    Attributes:
        folder: Folder for the kubeconfig file.
        refused: Verbs and resources that the user may not use, such as ``patch rayclusters``.
        allowed: The only verbs and resources that the user may use; None: all that are not refused.
        operates: Whether the operator runs.
        has_crd: Whether the API knows RayClusters.
        pod_quota: Largest number of pods.
        become: What the machines make of a new pod: the fields of its status. None: it runs, and Ray joins.
        stuck: Pods whose machine is gone, so that their end is never confirmed.
        user_token: The token that is accepted.
        next_answers: What the next requests are answered with: a status with an error, 0 for no answer, or None for the
            usual answer.
        before_patch: Called before a patch is tried, as another writer that is faster.
        requests: Verb and resource of each request.
        cuts: How often all watches were cut.
        is_silent: Whether watches report nothing, as over a dead connection.
    """

    folder: Path
    refused: set[str] = field(default_factory=set)
    allowed: set[str] | None = None
    operates: bool = True
    has_crd: bool = True
    answers: bool = True
    pod_quota: int = 100
    become: Callable[[Object], Object | None] = lambda pod: None
    stuck: set[str] = field(default_factory=set)
    user_token: str = USER_TOKEN
    next_answers: list[int | None] = field(default_factory=list)
    before_patch: Callable[[], None] = lambda: None
    requests: list[str] = field(default_factory=list)
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    log: str = ""
    ray_restarts: int = 0
    cuts: int = 0
    is_silent: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._count = 0
        self._gone: set[str] = set()
        self._awaited: set[str] = set()
        """Pods that the operator has deleted. It does nothing in their group until they are gone."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                other = fake.next_answers.pop(0) if fake.next_answers else None
                if other == 0:
                    self.close_connection = True
                    return
                try:
                    if other:
                        raise Refused(other, "Other", "an answer with an error")
                    status, answer = fake.answer(
                        self.command, self.path, {key.lower(): value for key, value in self.headers.items()}, body
                    )
                except Refused as refused:
                    status, answer = refused.status, refused.body
                if "watch=" in self.path and status == 200:
                    self._watch(answer)
                    return
                content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
                self.send_header("Content-Length", str(len(content)))
                if status == 429:
                    self.send_header("Retry-After", "1")
                self.end_headers()
                self.wfile.write(content)

            def _watch(self, selected: Callable[[], list[Object]]) -> None:
                """Send the selected objects and each change of them, until the connection is cut."""
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                known: dict[str, Object] = {}
                cuts = fake.cuts
                while cuts == fake.cuts:
                    time.sleep(0.02)
                    if fake.is_silent:
                        continue
                    with fake._lock:
                        now = {made["metadata"]["uid"]: made for made in selected()}
                    gone = [("DELETED", made) for uid, made in known.items() if uid not in now]
                    changed = [("MODIFIED", made) for uid, made in now.items() if known.get(uid) != made]
                    for kind, made in gone + changed:
                        line = json.dumps({"type": kind, "object": made}).encode() + b"\n"
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                    known = copy.deepcopy(now)
                self.close_connection = True

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.kubeconfig = self.folder / "kubeconfig"
        self.write_kubeconfig()

    def write_kubeconfig(self, token: str = USER_TOKEN, server: str | None = None) -> None:
        """Write the file with the API's address and the user's token."""
        address = server or f"http://127.0.0.1:{self._server.server_address[1]}"
        entry = {"cluster": "c", "user": "u", "namespace": "default"}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": entry}],
        }  # fmt: skip
        self.kubeconfig.write_text(json.dumps(config))

    def close(self) -> None:
        self.cuts += 1
        self._server.shutdown()
        self._server.server_close()

    def uri(self, name: str, **options: Any) -> str:
        """The URI of a pool on a RayCluster."""
        given = {"kubeconfig": self.kubeconfig, **options}
        return f"kuberay://{NAMESPACE}/{name}?" + "&".join(f"{key}={value}" for key, value in given.items())

    # What tests do and see

    def add(self, kind: str, made: Object) -> Object:
        with self._lock:
            meta = made.setdefault("metadata", {})
            self._count += 1
            meta |= {
                "uid": f"uid-{self._count}",
                "generation": 1,
                "resourceVersion": str(self._count),
                "creationTimestamp": self._now(),
            }
            self.objects[kind, meta["name"]] = made
            _record_change(kind, made)
            return made

    def change(self, kind: str, name: str, change: Callable[[Object], None], *, is_status: bool = False) -> Object:
        """Change an object as another client of the API does."""
        with self._lock:
            return self._store(kind, name, change, is_status=is_status)

    def spec(self, name: str) -> Object:
        return self.objects["rayclusters", name]["spec"]

    def group(self, name: str) -> Object:
        return self.spec(name)["workerGroupSpecs"][0]

    def pods(self, *, heads: bool = False) -> list[str]:
        """The names of the workers' pods, also of those that are being deleted."""
        return [
            pod["metadata"]["name"] for pod in self._pods() if heads or _labels(pod)["ray.io/node-type"] == "worker"
        ]

    def delete_pod(self, name: str) -> None:
        with self._lock:
            self._delete_pod(self.objects["pods", name])

    def settle(self) -> None:
        """Let everything happen that needs no request of shoal."""
        with self._lock:
            for _ in range(6):
                self._step()

    # The API

    def answer(self, method: str, url: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        with self._lock:
            self._step()
            if not self.answers:
                return 503, "the server is currently unable to handle the request"
            if headers.get("authorization") != f"Bearer {self.user_token}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            parts = urlsplit(url)
            if parts.path == _REVIEWS:
                return self._review(json.loads(body)["spec"]["resourceAttributes"])
            found = _PATH.fullmatch(parts.path)
            if found is None:
                return 404, "404 page not found"
            kind, name, sub = found["kind"], unquote(found["name"] or ""), found["sub"] or ""
            query = parse_qs(parts.query)
            verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(method) or (
                "get" if name else "watch" if "watch" in query else "list"
            )
            resource = kind + ("/" + sub.split("/")[1] if sub else "")
            self.requests.append(f"{verb} {resource}")
            if not self._may(f"{verb} {resource}"):
                said = f'{resource} is forbidden: User "u" cannot {verb} resource "{resource}"'
                raise Refused(403, "Forbidden", said, name)
            if kind == "rayclusters" and not self.has_crd:
                return 404, "404 page not found"
            if sub.startswith("/proxy"):
                return self._ray(_PROXY.fullmatch(name)["service"], sub.removeprefix("/proxy"), headers)
            if sub == "/log":
                return 200, self.log
            if verb == "watch":
                return 200, lambda: self._selected(kind, query)
            return self._object(verb, kind, name, query, headers, body)

    def _may(self, use: str) -> bool:
        return use not in self.refused and (self.allowed is None or use in self.allowed)

    def _review(self, asked: Object) -> tuple[int, Any]:
        """Answer whether the user may do something. Real accounts may always ask."""
        resource = asked["resource"] + (f"/{asked['subresource']}" if asked["subresource"] else "")
        return 201, {"status": {"allowed": self._may(f"{asked['verb']} {resource}")}}

    def _object(
        self, verb: str, kind: str, name: str, query: dict[str, list[str]], headers: dict[str, str], body: bytes
    ) -> tuple[int, Any]:
        if verb == "list":
            return 200, {"kind": "List", "metadata": {}, "items": self._selected(kind, query)}
        if verb == "create":
            made = json.loads(body)
            if (kind, made["metadata"]["name"]) in self.objects:
                raise Refused(409, "AlreadyExists", "already exists", made["metadata"]["name"])
            if kind == "rayclusters" and "headGroupSpec" not in made["spec"]:
                raise Refused(422, "Invalid", "spec.headGroupSpec: Required value", made["metadata"]["name"])
            return 201, made if query.get("dryRun") else self.add(kind, made)
        if (kind, name) not in self.objects:
            raise Refused(404, "NotFound", f'{kind} "{name}" not found', name)
        if verb == "delete":
            expected = (json.loads(body or b"{}").get("preconditions") or {}).items()
            if not expected <= self.objects[kind, name]["metadata"].items():
                raise Refused(409, "Conflict", "the object has changed", name)
            return 200, self.objects.pop((kind, name))
        if verb == "patch":
            self.before_patch()
            if headers.get("content-type") != "application/json-patch+json":
                raise Refused(415, "UnsupportedMediaType", "only JSON patches are known here")
            if query.get("dryRun"):
                apply(made := copy.deepcopy(self.objects[kind, name]), json.loads(body))
                return 200, made
            return 200, self._store(kind, name, lambda made: apply(made, json.loads(body)))
        return 200, self.objects[kind, name]

    def _selected(self, kind: str, query: dict[str, list[str]]) -> list[Object]:
        items = [made for (one, _), made in self.objects.items() if one == kind]
        for selector in query.get("labelSelector", []):
            key, _, value = selector.partition("=")
            items = [made for made in items if _labels(made).get(key) == value]
        for selector in query.get("fieldSelector", []):
            field_name, _, value = selector.rpartition(",")[2].partition("=")
            first, last = field_name.split(".")
            items = [made for made in items if made[first][last] == value]
        return items

    def _store(self, kind: str, name: str, change: Callable[[Object], None], *, is_status: bool = False) -> Object:
        """Change an object: its version rises with each change, its generation only with those of its spec."""
        before = self.objects[kind, name]
        after = copy.deepcopy(before)
        change(after)
        if after == before:
            return before
        self._count += 1
        after["metadata"]["resourceVersion"] = str(self._count)
        if after.get("spec") != before.get("spec") and not is_status:
            after["metadata"]["generation"] += 1
        self.objects[kind, name] = after
        _record_change(kind, after)
        return after

    def _now(self) -> str:
        """A time that is later at each call, so that the order of objects is that of their creation."""
        return (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self._count)).strftime(_TIME)

    # Ray's head behind the proxy

    def _ray(self, service: str, path: str, headers: dict[str, str]) -> tuple[int, Any]:
        cluster = service.removesuffix("-head-svc")
        auth = self.spec(cluster).get("authOptions")
        if auth and headers.get("x-ray-authorization") != f"Bearer {RAY_TOKEN}":
            return 401, "Unauthorized: Missing authentication token"
        pods = [pod for pod in self._pods() if pod["status"].get("ray") and _labels(pod)["ray.io/cluster"] == cluster]
        if not any(_labels(pod)["ray.io/node-type"] == "head" for pod in pods):
            return 503, "no endpoints available for service"
        if path.startswith("/api/jobs/") or path.startswith("/api/packages/"):
            return 200, {"stopped": True}
        if path.startswith("/api/v0/nodes"):
            return 200, {"data": {"result": {"result": [self._ray_node(pod) for pod in pods]}}}
        return 200, {"data": {"pythonVersion": "3.11.9"}}

    def _ray_node(self, pod: Object) -> Object:
        return {
            "node_id": f"{pod['metadata']['uid']}-{self.ray_restarts}",
            "node_name": pod["metadata"]["name"],
            "node_ip": pod["status"]["podIP"],
            "is_head_node": _labels(pod)["ray.io/node-type"] == "head",
            "resources_total": {"CPU": 1.0, "memory": 2.0**30},
        }

    # The machines and the operator

    def _step(self) -> None:
        self._collect_garbage()
        for pod in self._pods():
            self._run(pod)
        if self.operates:
            for kind, name in list(self.objects):
                if kind == "rayclusters":
                    self._operate(name)

    def _collect_garbage(self) -> None:
        """Delete what has an owner that is gone, as the controller of Kubernetes does."""
        uids = {made["metadata"]["uid"] for made in self.objects.values()}
        for (kind, name), made in list(self.objects.items()):
            owners = made["metadata"].get("ownerReferences") or []
            if owners and not any(owner["uid"] in uids for owner in owners):
                if kind == "pods":
                    self._delete_pod(made)
                else:
                    del self.objects[kind, name]

    def _run(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if pod["metadata"].get("deletionTimestamp"):
            if name not in self.stuck:
                del self.objects["pods", name]
            return
        if pod["status"].get("phase") != "Pending":
            return
        other = self.become(pod)
        self._count += 1
        ip = f"10.0.{self._count // 250}.{self._count % 250}"
        status = {"phase": "Running", "podIP": ip, "ray": True} if other is None else other
        self._store("pods", name, lambda made: made["status"].update(status), is_status=True)

    def _operate(self, name: str) -> None:
        """One reconciliation, in the order of `reconcilePods` of KubeRay 1.6."""
        cluster = self.objects["rayclusters", name]
        spec = cluster["spec"]
        if spec.get("managedBy", "ray.io/kuberay-operator") != "ray.io/kuberay-operator":
            return
        if spec.get("authOptions") and spec.get("rayVersion", "0") < "2.52":
            # An invalid spec is only told in an event: no status is written.
            self._event(name, "InvalidRayClusterSpec", "The RayCluster spec is invalid: authOptions needs Ray 2.52")
            return
        if spec.get("authOptions") and ("secrets", name) not in self.objects:
            data = {"auth_token": base64.b64encode(RAY_TOKEN.encode()).decode()}
            self.add("secrets", {"metadata": {"name": name, **self._owned_by(name)}, "data": data})
        failure = self._reconcile_pods(name, spec)
        self._store("rayclusters", name, lambda made: self._write_status(made, failure), is_status=True)

    def _reconcile_pods(self, name: str, spec: Object) -> str | None:
        if spec.get("suspend"):
            for pod in self._pods(name):
                self._delete_pod(pod)
            return None
        if not self._pods(name, "headgroup") and (failed := self._create_pod(name, "headgroup")):
            return failed
        for group in spec["workerGroupSpecs"]:
            pods = self._pods(name, group["groupName"])
            if any(pod["metadata"]["name"] in self._awaited for pod in pods):
                continue
            ended = [pod for pod in pods if pod["status"].get("phase") in ("Failed", "Succeeded")]
            for pod in ended:
                self._delete_pod(pod)
            if ended:
                return None
            named = (group.get("scaleStrategy") or {}).get("workersToDelete") or []
            for pod in pods:
                if pod["metadata"]["name"] in named:
                    self._delete_pod(pod)
                    self._awaited.add(pod["metadata"]["name"])
            # A terminating pod that is not named counts as a replica.
            running = [pod for pod in pods if pod["metadata"]["name"] not in named]
            wanted = min(max(group.get("replicas", 0), group.get("minReplicas", 0)), group.get("maxReplicas", 1))
            for _ in range(wanted - len(running)):
                if failed := self._create_pod(name, group["groupName"]):
                    return failed
            if not spec.get("enableInTreeAutoscaling"):
                for pod in running[: max(0, len(running) - wanted)]:
                    self._delete_pod(pod)
        return None

    def _owned_by(self, cluster: str) -> Object:
        return {"ownerReferences": [{"uid": self.objects["rayclusters", cluster]["metadata"]["uid"]}]}

    def _write_status(self, made: Object, failure: str | None) -> None:
        status = made.setdefault("status", {})
        status["observedGeneration"] = made["metadata"]["generation"]
        status["head"] = {"serviceName": f"{made['metadata']['name']}-head-svc"}
        status["conditions"] = (
            [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreateWorkerPod", "message": failure}]
            if failure
            else []
        )
        pods = self._pods(made["metadata"]["name"])
        status["availableWorkerReplicas"] = sum(bool(pod["status"].get("ray")) for pod in pods) - 1
        if pods and all(pod["status"].get("ray") for pod in pods):
            status["state"] = "ready"  # and is never taken back

    def _pods(self, cluster: str | None = None, group: str | None = None) -> list[Object]:
        pods = [made for (kind, _), made in list(self.objects.items()) if kind == "pods"]
        return [
            pod
            for pod in pods
            if cluster in (None, _labels(pod)["ray.io/cluster"]) and group in (None, _labels(pod)["ray.io/group"])
        ]

    def _create_pod(self, cluster: str, group: str) -> str | None:
        if len(self._pods()) >= self.pod_quota:
            said = f'pods "{cluster}-{group}-worker-x" is forbidden: exceeded quota: pods, requested: pods=1'
            self._event(cluster, "FailedToCreateWorkerPod", said)
            return said
        kind = "head" if group == "headgroup" else "worker"
        labels = {"ray.io/cluster": cluster, "ray.io/group": group, "ray.io/node-type": kind}
        name = f"{cluster}-{group}-{kind}-{self._count}"
        meta = {"name": name, "labels": labels, **self._owned_by(cluster)}
        self.add("pods", {"metadata": meta, "status": {"phase": "Pending"}})
        return None

    def _delete_pod(self, pod: Object) -> None:
        self._store("pods", pod["metadata"]["name"], lambda made: made["metadata"].update(deletionTimestamp="now"))

    def _event(self, about: str, reason: str, message: str) -> None:
        name = f"{about}.{reason}"
        if ("events", name) not in self.objects:
            uid = next(made["metadata"]["uid"] for (_, each), made in self.objects.items() if each == about)
            involved = {"involvedObject": {"uid": uid}, "eventTime": self._now(), "type": "Warning"}
            self.add("events", {"metadata": {"name": name}, "reason": reason, "message": message, **involved})


def _record_change(kind: str, made: Object) -> None:
    """Write the time of a change of a Lease, as the API does it for all objects. It is that of the header `Date`."""
    if kind == "leases":
        made["metadata"]["managedFields"] = [{"manager": "shoal", "time": datetime.now(UTC).strftime(_TIME)}]


def _labels(made: Object) -> dict[str, str]:
    return made["metadata"].get("labels") or {}
