"""Requests to the Kubernetes API about the RayCluster of one pool."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from shoal.errors import InvalidArgumentError, PoolUnreachableError
from shoal.pool.backends.kuberay import resources, scaling
from shoal.pool.backends.kuberay.head_access import access, api_client, forget_credentials
from shoal.pool.backends.kuberay.resources import CLUSTER_LABEL, FIELD_MANAGER, MADE, Pod, RayCluster, status_in
from shoal.pool.backends.kuberay.scaling import Patch
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import CLUSTER_PATIENCE
from shoal.secrets.redaction import redact

_GROUPS = {"rayclusters": "ray.io", "leases": "coordination.k8s.io"}
"""API group of each kind of objects that shoal changes. All of them have the version v1."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_RIGHT = re.compile(r'User ".*" cannot ')
"""Text of a refusal for lack of a right. The text of an admission policy or a quota has the same status, and no such
words."""

_LOG_LINES = 5
"""Number of lines of a container's log in a reason."""

_PAGE = 500
"""Number of objects in one answer to a list request."""

WATCH_LIFE = 300
"""Longest time in seconds that one request for changes is answered."""

_MOST_EXPLAINED = 5
"""Number of objects whose events are requested in one look at a pool: one request each."""


class ConflictError(Exception):
    """The RayCluster has changed since it was read, so the patch was refused."""


class KubeClient:
    """Client for the RayCluster of one pool.

    Raises:
        PoolUnreachableError: Raised by every method if the Kubernetes API does not answer or refuses the request.
    """

    def __init__(self, spec: PoolSpec) -> None:
        self._spec = spec
        self._namespace = str(spec.namespace)
        self._of_cluster = f"{CLUSTER_LABEL}={spec.ray_cluster}"
        self._connect()

    def _connect(self) -> None:
        self._kube = api_client(self._spec)
        self._server = self._kube.configuration.host

    def ray_cluster(self) -> RayCluster | None:
        """Return the RayCluster, or None if it does not exist."""
        found = self._send("get", "rayclusters", self._spec.ray_cluster, missing=self._is_missing)
        return None if found is None else RayCluster.of(found)

    def check_rights(self, cluster: RayCluster) -> None:
        """Check that shoal has every right that it needs for a RayCluster. Nothing is changed.

        Raises:
            PoolUnreachableError: A right is missing.
        """
        # A pool cannot work without these rights. The rights to events and logs only explain more.
        rayclusters, leases = ((group, kind) for kind, group in _GROUPS.items())
        used = [("get patch", *rayclusters, cluster.name), ("list", "", "pods", "")]
        if self._spec.makes_cluster:
            used += [("create", *rayclusters, ""), ("delete", *rayclusters, cluster.name)]
            used.append(("create patch delete", *leases, ""))
        if cluster.has_token:
            used.append(("get", "", "secrets", cluster.token_secret))
        if way := access(self._spec, cluster.head_service):
            used.append(("get create update delete", "", "services/proxy", way.target))
        for verb, group, resource, name in ((verb, *right) for verbs, *right in used for verb in verbs.split()):
            kind, _, subresource = resource.partition("/")
            asked = {"verb": verb, "group": group, "resource": kind, "subresource": subresource, "name": name}
            answer = self._ask(
                "create selfsubjectaccessreviews",
                *("AuthorizationV1Api", "create_self_subject_access_review"),
                {"spec": {"resourceAttributes": asked | {"namespace": self._namespace}}},
                missing=lambda error: error.status == HTTPStatus.FORBIDDEN,
            )
            if answer is None:  # An account may be forbidden to ask. The requests themselves then tell.
                return
            if not (status := answer["status"])["allowed"]:
                what = f"{verb} {resource}" + (f" named {name}" if name else "")
                given = status.get("reason") or status.get("evaluationError") or ""
                raise PoolUnreachableError(self._forbidden(what, given, is_policy=bool(status.get("denied"))))

    def patch(self, patch: Patch, **options: Any) -> RayCluster:
        """Change the RayCluster, and return it.

        Raises:
            ConflictError: The RayCluster has changed since it was read.
        """
        options |= {"field_manager": FIELD_MANAGER, "_content_type": "application/json-patch+json"}
        return RayCluster.of(self._send("patch", "rayclusters", self._spec.ray_cluster, patch, **options))

    def create_ray_cluster(self, body: dict[str, Any], **options: Any) -> None:
        """Create the RayCluster.

        Raises:
            ConflictError: It exists already.
            InvalidArgumentError: Its schema or an admission policy refuses it.
        """
        self._send("create", "rayclusters", body, field_manager=FIELD_MANAGER, **options)

    def try_creation(self, body: dict[str, Any]) -> None:
        """Check that shoal has every right that it needs for the RayCluster, and that the RayCluster and its Lease may
        be created. Nothing is changed."""
        self.check_rights(resources.as_created(body))
        self._create_lease("", dry_run="All")
        self.create_ray_cluster(body, dry_run="All")

    def delete_ray_cluster(self, cluster: RayCluster) -> None:
        """Delete the RayCluster in the version that was read, then the Lease that owns it. If the RayCluster has
        changed, the next round tries again."""
        self._delete("rayclusters", cluster.name, body=_only(cluster.uid, cluster.version))
        if cluster.lease_name:
            self._delete("leases", cluster.lease_name, body=_only(cluster.lease_uid))

    def hold_lease(self, life: str) -> dict[str, str]:
        """Create or renew the Lease of the RayCluster, and return its name and uid."""
        try:
            found = self._create_lease(life)
        except ConflictError:
            found = self.renew_lease(life) or self._create_lease(life)
        return {key: found["metadata"][key] for key in ("name", "uid")}

    def renew_lease(self, life: str) -> dict[str, Any] | None:
        """Renew the Lease of the RayCluster, and return it. Return None if it does not exist."""
        name = scaling.name_of(self._spec.ray_cluster, life)
        patch = [{"op": "add", "path": "/spec/renewTime", "value": scaling.now()}]
        options: dict[str, Any] = {"missing": self._is_missing, "_content_type": "application/json-patch+json"}
        found: dict[str, Any] | None = self._send("patch", "leases", name, patch, **options)
        return found

    def release_lease(self, life: str) -> None:
        """Delete the Lease of the RayCluster, after the RayCluster."""
        self._delete("leases", scaling.name_of(self._spec.ray_cluster, life))

    def leases(self) -> tuple[list[dict[str, Any]], datetime]:
        """Return the Leases of all RayClusters in the namespace that shoal has created, and the time of the API."""
        selector = ",".join(f"{key}={value}" for key, value in MADE.items())

        def read(answer: Any) -> tuple[list[dict[str, Any]], datetime]:
            return json.loads(answer.data)["items"], parsedate_to_datetime(answer.headers["Date"])

        found: tuple[list[dict[str, Any]], datetime] = self._send("list", "leases", label_selector=selector, read=read)
        return found

    def delete_lease(self, lease: Mapping[str, Any]) -> bool:
        """Delete a Lease in the version that was read. Return False if it was renewed meanwhile."""
        meta = lease["metadata"]
        try:
            self._delete("leases", meta["name"], body=_only(meta["uid"], meta["resourceVersion"]))
        except ConflictError:
            return False
        return True

    def _create_lease(self, life: str, **options: Any) -> dict[str, Any]:
        body = scaling.made(self._spec.ray_cluster, life)
        found: dict[str, Any] = self._send("create", "leases", body, **options)
        return found

    def pods(self) -> list[Pod]:
        """Return the pods of the RayCluster, the oldest first."""
        return Pod.all_of(self._list("pod", label_selector=self._of_cluster))

    def watch(self, kind: str, version: str | None) -> Iterator[dict[str, Any]]:
        """Watch the RayCluster or its pods.

        Args:
            kind: ``rayclusters`` or ``pods``.
            version: The version after which changes are reported. None: all present objects are reported first.

        Returns:
            The changes as they happen, for at most `WATCH_LIFE` seconds.

        Raises:
            PoolUnreachableError: Also while the changes are read, if the connection ends early.
        """
        options: dict[str, Any] = {"watch": True, "allow_watch_bookmarks": True, "timeout_seconds": WATCH_LIFE}
        if version:
            options["resource_version"] = version
        options |= {"_request_timeout": (CLUSTER_PATIENCE, WATCH_LIFE + CLUSTER_PATIENCE), "read": iter}
        what = f"watch {kind}"
        if kind == "pods":
            list_pods = ("CoreV1Api", "list_namespaced_pod", self._namespace)
            lines = self._ask(what, *list_pods, label_selector=self._of_cluster, **options)
        else:
            name = f"metadata.name={self._spec.ray_cluster}"
            lines = self._send("list", kind, what=what, field_selector=name, **options)
        # Parsed inside of the call, because a connection that ends may cut a line.
        return iter(lambda: self._call(what, lambda: json.loads(next(lines, b"null"))), None)

    def warnings(self, uids: Sequence[str]) -> dict[str, str]:
        """Return the newest warning about each of some objects, by the object's uid. Only the first of the objects are
        looked up. The result is empty if shoal may not read events, because they only explain more."""
        newest = {}
        with suppress(PoolUnreachableError):
            for uid in uids[:_MOST_EXPLAINED]:
                for event in sorted(
                    self._list("event", field_selector=f"type=Warning,involvedObject.uid={uid}"),
                    # Newer events have `eventTime` and no `lastTimestamp`.
                    key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "",
                ):
                    newest[uid] = f"{event.get('reason')}: {event.get('message') or event.get('note')}"
        return newest

    def token(self, secret: str) -> str:
        """Return Ray's token from a Secret."""
        found = self._ask("get secrets", "CoreV1Api", "read_namespaced_secret", secret, self._namespace)
        value = (found.get("data") or {}).get("auth_token")
        if value is None:
            raise PoolUnreachableError(
                f"Secret {self._namespace}/{secret} of RayCluster {self._spec.ray_cluster} has no key auth_token"
            )
        return base64.b64decode(value).decode().strip()

    def log_end(self, pod: str, container: str) -> str:
        """Return the last lines of a container's previous run, without credentials. Return an empty string if they
        cannot be read, because they only explain more."""
        try:
            options: dict[str, Any] = {"previous": True, "tail_lines": _LOG_LINES, "read": lambda sent: sent.data}
            what = ("get pods/log", "CoreV1Api", "read_namespaced_pod_log", pod, self._namespace)
            text = self._ask(*what, container=container, **options).decode(errors="replace")
            lines = redact(_COLOURS.sub("", text)).splitlines()
            return " | ".join(line.strip() for line in lines if line)
        except Exception:  # the client raises its own errors and those of urllib3
            return ""

    def _list(self, kind: str, **options: Any) -> list[dict[str, Any]]:
        """Return the objects of one kind in the namespace, read in pages."""
        items: list[dict[str, Any]] = []
        while True:
            list_kind = ("CoreV1Api", f"list_namespaced_{kind}", self._namespace)
            found = self._ask(f"list {kind}s", *list_kind, limit=_PAGE, **options)
            items += found["items"]
            options["_continue"] = found["metadata"].get("continue")
            if not options["_continue"]:
                return items

    def _send(self, verb: str, kind: str, *args: Any, what: str = "", **options: Any) -> Any:
        """Send a request about RayClusters or Leases."""
        method, of_kind = f"{verb}_namespaced_custom_object", (_GROUPS[kind], "v1", self._namespace, kind)
        return self._ask(what or f"{verb} {kind}", "CustomObjectsApi", method, *of_kind, *args, **options)

    def _delete(self, kind: str, name: str, **options: Any) -> None:
        self._send("delete", kind, name, missing=self._is_missing, **options)

    def _ask(
        self,
        what: str,
        api: str,
        method: str,
        *args: Any,
        missing: Callable[[Any], bool] | None = None,
        read: Callable[[Any], Any] = lambda sent: dict(json.loads(sent.data)),
        **options: Any,
    ) -> Any:
        """Call a method of one of the client's classes, and read the answer, by default as JSON. The client's own
        classes of objects would refuse values that a later version of Kubernetes adds."""
        from kubernetes import client

        def request() -> Any:
            ask = getattr(getattr(client, api)(self._kube), method)
            return read(ask(*args, **{"_preload_content": False, "_request_timeout": CLUSTER_PATIENCE, **options}))

        return self._call(what, request, missing)

    def _call(self, what: str, request: Callable[[], Any], missing: Callable[[Any], bool] | None = None) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            try:
                return request()
            except ApiException as error:
                if error.status != HTTPStatus.UNAUTHORIZED:
                    raise
                forget_credentials()
                self._connect()
                return request()
        except ApiException as error:
            if missing and missing(error):
                return None
            text = self._explained(what, error)
            if error.status == HTTPStatus.UNPROCESSABLE_ENTITY and what.startswith("create"):
                raise InvalidArgumentError(text) from error
            raise (ConflictError if _is_conflict(error) else PoolUnreachableError)(text) from error
        except (HTTPError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise PoolUnreachableError(
                f'the Kubernetes API at {self._server} does not answer, so pool "{self._spec.name}" cannot be checked: '
                f"{reason}"
            ) from error

    def _explained(self, what: str, error: Any) -> str:
        """Return the message for an answer with an error."""
        message = status_in(error.body).get("message") or error.reason
        place = f"the Kubernetes API at {self._server}"
        match error.status:
            case HTTPStatus.UNAUTHORIZED:
                return (
                    f'{place} does not accept the credentials of pool "{self._spec.name}": log in again, or choose '
                    "another kubeconfig= or context= in the pool's URI"
                )
            case HTTPStatus.FORBIDDEN:
                return self._forbidden(what, message, is_policy=not _RIGHT.search(message))
            case HTTPStatus.NOT_FOUND if "rayclusters" in what and not self._is_missing(error):
                return f"{place} knows no RayClusters: install KubeRay's operator first, then try again"
        return f"{place} cannot {what} in namespace {self._namespace}: {error.status} {message}"

    def _forbidden(self, what: str, message: str, is_policy: bool) -> str:
        """Return the message for a request that is not allowed."""
        return (
            f"the Kubernetes API at {self._server} does not allow to {what} in namespace {self._namespace}"
            + (f": {message}" if message else "")
            + ("" if is_policy else ". Apply the Role in docs/kubernetes.md to this user or service account")
        )

    def _is_missing(self, error: Any) -> bool:
        """Return whether an answer says that the object does not exist. Without KubeRay, the API does not know the
        resource at all, and names no object."""
        return error.status == HTTPStatus.NOT_FOUND and bool((status_in(error.body).get("details") or {}).get("name"))


def _only(uid: str, version: str | None = None) -> dict[str, Any]:
    """Return the options of a request that deletes an object only if it is this one, in the version that was read."""
    return {"preconditions": {"uid": uid} | ({"resourceVersion": version} if version else {})}


def _is_conflict(error: Any) -> bool:
    """Return whether a request was refused because the object has changed or exists. A `test` of a JSON patch that
    fails has status 422 as well, without the causes that the answers of schemas and policies have."""
    status = status_in(error.body)
    is_test = not (status.get("details") or {}).get("causes") and "denied" not in status.get("message", "")
    return error.status == HTTPStatus.CONFLICT or (error.status == HTTPStatus.UNPROCESSABLE_ENTITY and is_test)
