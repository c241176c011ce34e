"""Requests to the Kubernetes API about the RayCluster of one pool."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError, PoolUnreachableError
from shoal.pool.backends.kuberay import leases
from shoal.pool.backends.kuberay.credentials import api_client
from shoal.pool.backends.kuberay.resources import CLUSTER_LABEL, MADE, Pod, RayCluster
from shoal.pool.backends.kuberay.scaling import Patch
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import CLUSTER_PATIENCE
from shoal.redaction import redact

if TYPE_CHECKING:
    from kubernetes.client import V1DeleteOptions

_API = ("ray.io", "v1")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LOG_LINES = 5
"""Number of lines of a container's log in a reason."""


class ConflictError(Exception):
    """The RayCluster has changed since it was read, so the patch was refused."""


class KubeClient:
    """Client for the RayCluster of one pool.

    Raises:
        PoolUnreachableError: Raised by every method if the Kubernetes API does not answer or refuses the request.
    """

    def __init__(self, spec: PoolSpec) -> None:
        from kubernetes import client

        self._spec = spec
        self._namespace = str(spec.namespace)
        kube = api_client(spec)
        self._server = kube.configuration.host
        self._core = client.CoreV1Api(kube)
        self._custom = client.CustomObjectsApi(kube)
        self._coordination = client.CoordinationV1Api(kube)

    def ray_cluster(self) -> RayCluster | None:
        """Return the RayCluster, or None if it does not exist."""
        found = self._call(
            "get rayclusters",
            lambda: self._custom.get_namespaced_custom_object(
                *_API, self._namespace, "rayclusters", self._spec.ray_cluster, _request_timeout=CLUSTER_PATIENCE
            ),
            missing=self._is_missing,
        )
        return None if found is None else RayCluster.of(found)

    def check_rights(self) -> None:
        """Check that the pods of the RayCluster may be listed, and the RayCluster be changed. Nothing is changed."""
        self.pods()
        self.patch([{"op": "test", "path": "/metadata/name", "value": self._spec.ray_cluster}], dry_run="All")

    def patch(self, patch: Patch, **options: Any) -> RayCluster:
        """Change the RayCluster, and return it.

        Raises:
            ConflictError: The RayCluster has changed since it was read.
        """
        found = self._call(
            "patch rayclusters",
            lambda: self._custom.patch_namespaced_custom_object(
                *_API,
                self._namespace,
                "rayclusters",
                self._spec.ray_cluster,
                patch,
                field_manager="shoal",
                _content_type="application/json-patch+json",
                _request_timeout=CLUSTER_PATIENCE,
                **options,
            ),
        )
        return RayCluster.of(found)

    def create_ray_cluster(self, body: dict[str, Any], **options: Any) -> None:
        """Create the RayCluster.

        Raises:
            ConflictError: It exists already.
            InvalidArgumentError: Its schema or an admission webhook refuses it.
        """
        self._call(
            "create rayclusters",
            lambda: self._custom.create_namespaced_custom_object(
                *_API,
                self._namespace,
                "rayclusters",
                body,
                field_manager="shoal",
                _request_timeout=CLUSTER_PATIENCE,
                **options,
            ),
        )

    def try_creation(self, body: dict[str, Any]) -> None:
        """Check that the RayCluster and its Lease may be created, and its pods be listed. Nothing is changed."""
        self.pods()
        self._create_lease("", dry_run="All")
        self.create_ray_cluster(body, dry_run="All")

    def delete_ray_cluster(self, cluster: RayCluster) -> None:
        """Delete the RayCluster in the version that was read, then the Lease that owns it. If the RayCluster has
        changed, the next round tries again."""
        self._call(
            "delete rayclusters",
            lambda: self._custom.delete_namespaced_custom_object(
                *_API,
                self._namespace,
                "rayclusters",
                cluster.name,
                body=_only(cluster.uid, cluster.version),
                _request_timeout=CLUSTER_PATIENCE,
            ),
            missing=self._is_missing,
        )
        if cluster.lease_name:
            self._delete_lease(cluster.lease_name, body=_only(cluster.lease_uid))

    def hold_lease(self, life: str) -> dict[str, str]:
        """Create or renew the Lease of the RayCluster, and return its name and uid."""
        try:
            found = self._create_lease(life)
        except ConflictError:
            found = self.renew_lease(life) or self._create_lease(life)
        return {key: found["metadata"][key] for key in ("name", "uid")}

    def renew_lease(self, life: str) -> dict[str, Any] | None:
        """Renew the Lease of the RayCluster, and return it. Return None if it does not exist."""
        patch = [{"op": "add", "path": "/spec/renewTime", "value": leases.now()}]
        found: dict[str, Any] | None = self._call(
            "patch leases",
            lambda: self._json(
                self._coordination.patch_namespaced_lease,
                leases.name_of(self._spec.ray_cluster, life),
                self._namespace,
                patch,
                _content_type="application/json-patch+json",
            ),
            missing=self._is_missing,
        )
        return found

    def release_lease(self, life: str) -> None:
        """Delete the Lease of the RayCluster, after the RayCluster."""
        self._delete_lease(leases.name_of(self._spec.ray_cluster, life))

    def leases(self) -> tuple[list[dict[str, Any]], datetime]:
        """Return the Leases of all RayClusters in the namespace that shoal has created, and the time of the API."""
        selector = ",".join(f"{key}={value}" for key, value in MADE.items())

        def request() -> tuple[list[dict[str, Any]], datetime]:
            list_leases: Callable[..., Any] = self._coordination.list_namespaced_lease
            answer = list_leases(
                self._namespace, label_selector=selector, _preload_content=False, _request_timeout=CLUSTER_PATIENCE
            )
            return json.loads(answer.data)["items"], parsedate_to_datetime(answer.headers["Date"])

        found: tuple[list[dict[str, Any]], datetime] = self._call("list leases", request)
        return found

    def delete_lease(self, lease: Mapping[str, Any]) -> bool:
        """Delete a Lease in the version that was read. Return False if it was renewed meanwhile."""
        meta = lease["metadata"]
        try:
            self._delete_lease(meta["name"], body=_only(meta["uid"], meta["resourceVersion"]))
        except ConflictError:
            return False
        return True

    def _create_lease(self, life: str, **options: Any) -> dict[str, Any]:
        body = leases.made(self._spec.ray_cluster, life)
        found: dict[str, Any] = self._call(
            "create leases",
            lambda: self._json(self._coordination.create_namespaced_lease, self._namespace, body, **options),
        )
        return found

    def _delete_lease(self, name: str, **options: Any) -> None:
        self._call(
            "delete leases",
            lambda: self._json(self._coordination.delete_namespaced_lease, name, self._namespace, **options),
            missing=self._is_missing,
        )

    def pods(self) -> list[Pod]:
        """Return the pods of the RayCluster, the oldest first."""
        found = self._core_list(
            "list pods", self._core.list_namespaced_pod, label_selector=f"{CLUSTER_LABEL}={self._spec.ray_cluster}"
        )
        return Pod.all_of(found)

    def warnings(self) -> dict[str, str]:
        """Return the newest warning about each object of the namespace, by the object's name. The result is empty if
        shoal may not read events, because they only explain more."""
        try:
            found = self._core_list(
                "list events", self._core.list_namespaced_event, field_selector="type=Warning", limit=500
            )
        except PoolUnreachableError:
            return {}
        # Newer events have `eventTime` and no `lastTimestamp`.
        found.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
        return {
            event["involvedObject"]["name"]: f"{event.get('reason')}: {event.get('message') or event.get('note')}"
            for event in found
        }

    def token(self, secret: str) -> str:
        """Return Ray's token from a Secret."""
        found = self._call(
            "get secrets",
            lambda: self._json(self._core.read_namespaced_secret, secret, self._namespace),
        )
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
            read: Callable[..., Any] = self._core.read_namespaced_pod_log
            response = read(
                pod,
                self._namespace,
                container=container,
                previous=True,
                tail_lines=_LOG_LINES,
                _preload_content=False,
                _request_timeout=CLUSTER_PATIENCE,
            )
            lines = redact(_COLOURS.sub("", response.data.decode(errors="replace"))).splitlines()
            return " | ".join(line.strip() for line in lines if line)
        except Exception:  # the client raises its own errors and those of urllib3
            return ""

    def _core_list(self, what: str, method: Callable[..., Any], **options: Any) -> list[dict[str, Any]]:
        found = self._call(what, lambda: self._json(method, self._namespace, **options))
        items: list[dict[str, Any]] = found["items"]
        return items

    @staticmethod
    def _json(method: Callable[..., Any], *args: Any, **options: Any) -> dict[str, Any]:
        """Call a method of the client, and return the answer as JSON. The client's own classes would refuse values that
        a later version of Kubernetes adds."""
        response = method(*args, _preload_content=False, _request_timeout=CLUSTER_PATIENCE, **options)
        answer: dict[str, Any] = json.loads(response.data)
        return answer

    def _call(self, what: str, request: Callable[[], Any], missing: Callable[[Any], bool] = lambda error: False) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return request()
        except ApiException as error:
            if missing(error):
                return None
            if error.status == HTTPStatus.UNPROCESSABLE_ENTITY and what.startswith("create"):
                raise InvalidArgumentError(self._explained(what, error)) from error
            # A failed `test` of a JSON patch has status 422, as have changes that the RayCluster's schema refuses.
            if error.status in (HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY):
                raise ConflictError(self._explained(what, error)) from error
            raise PoolUnreachableError(self._explained(what, error)) from error
        except (HTTPError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise PoolUnreachableError(
                f'the Kubernetes API at {self._server} does not answer, so pool "{self._spec.name}" cannot be checked: '
                f"{reason}"
            ) from error

    def _explained(self, what: str, error: Any) -> str:
        """Return the message for an answer with an error."""
        message = _status(error).get("message") or error.reason
        place = f"the Kubernetes API at {self._server}"
        match error.status:
            case HTTPStatus.UNAUTHORIZED:
                return (
                    f'{place} does not accept the credentials of pool "{self._spec.name}": log in again, or choose '
                    "another kubeconfig= or context= in the pool's URI"
                )
            case HTTPStatus.FORBIDDEN:
                return (
                    f"{place} does not allow to {what} in namespace {self._namespace}: {message}. Apply the Role in "
                    "docs/kubernetes.md to this user or service account"
                )
            case HTTPStatus.NOT_FOUND if "rayclusters" in what and not self._is_missing(error):
                return f"{place} knows no RayClusters: install KubeRay's operator first, then try again"
        return f"{place} cannot {what} in namespace {self._namespace}: {error.status} {message}"

    def _is_missing(self, error: Any) -> bool:
        """Return whether an answer says that the object does not exist. Without KubeRay, the API does not know the
        resource at all, and names no object."""
        return error.status == HTTPStatus.NOT_FOUND and bool((_status(error).get("details") or {}).get("name"))


def _only(uid: str, version: str | None = None) -> V1DeleteOptions:
    """Return the options of a request that deletes an object only if it is this one, in the version that was read."""
    from kubernetes.client import V1DeleteOptions, V1Preconditions

    return V1DeleteOptions(preconditions=V1Preconditions(uid=uid, resource_version=version))


def _status(error: Any) -> Mapping[str, Any]:
    """Return the object `Status` in an answer with an error; empty if there is none."""
    try:
        status = json.loads(error.body)
    except (TypeError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}
