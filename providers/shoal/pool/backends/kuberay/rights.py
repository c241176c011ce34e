"""Rights of the Kubernetes API that a pool needs: pure, without requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.pool.backends.kuberay import leases
from shoal.pool.backends.kuberay.head_access import access
from shoal.pool.backends.kuberay.resources import RayCluster
from shoal.pool.spec import PoolSpec

_RAY = "ray.io"
_COORDINATION = "coordination.k8s.io"


@dataclass(frozen=True)
class Right:
    """Right to use one verb on one resource.

    Attributes:
        verb: The verb, such as ``get``.
        resource: The resource, such as ``pods`` or ``services/proxy``.
        group: API group of the resource; empty for the core group.
        name: Name of the object; empty for all objects.
    """

    verb: str
    resource: str
    group: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f" named {self.name}" if self.name else "")

    def review(self, namespace: str) -> dict[str, Any]:
        """Return the request (``SelfSubjectAccessReview``) that asks whether this process has the right."""
        resource, _, subresource = self.resource.partition("/")
        asked = {"verb": self.verb, "group": self.group, "resource": resource, "subresource": subresource}
        return {"spec": {"resourceAttributes": asked | {"name": self.name, "namespace": namespace}}}


def needed(spec: PoolSpec, cluster: RayCluster) -> list[Right]:
    """Return the rights without which a pool cannot work. Those to events and logs only explain more."""
    name, lease = cluster.name, leases.name_of(cluster.name)
    found = [*_of("rayclusters", _RAY, name, "get", "patch"), Right("list", "pods")]
    if spec.makes_cluster:
        found += [Right("create", "rayclusters", _RAY), Right("delete", "rayclusters", _RAY, name)]
        found += [Right("create", "leases", _COORDINATION), *_of("leases", _COORDINATION, lease, "patch", "delete")]
    if cluster.has_token:
        found.append(Right("get", "secrets", name=cluster.token_secret))
    if way := access(spec, cluster.head_service):
        found += _of("services/proxy", "", way.target, "get", "create", "update", "delete")
    return found


def _of(resource: str, group: str, name: str, *verbs: str) -> list[Right]:
    return [Right(verb, resource, group, name) for verb in verbs]
