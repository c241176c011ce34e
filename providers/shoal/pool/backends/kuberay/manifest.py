"""The RayCluster that shoal creates for a pool with `image` or `template`: pure, except that it reads the template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.pool.backends.base import PoolRef
from shoal.pool.backends.kuberay.resources import CLAIM, MADE, QUEUE, Claim, RayCluster
from shoal.pool.backends.versions import TESTED_RAY
from shoal.pool.spec import PoolSpec

Manifest = dict[str, Any]
"""An object of the Kubernetes API, as JSON."""

_GROUP = "workers"
_CLUSTER_NAME = re.compile(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?")
"""Names of RayClusters that KubeRay accepts. The Kubernetes API accepts more."""

_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_MEMORY = "4Gi"
"""Memory of a node if the pool names none: enough for Ray and a training on some hundred MB."""

_MOST_REPLICAS = 999
"""The group's `maxReplicas`. The limit of the pool is its `max_nodes`, which can be changed while the pool is up."""

_GPU = "nvidia.com/gpu"


def ray_cluster(pool: PoolRef, owner: Mapping[str, str] | None) -> Manifest:
    """Return the RayCluster of a pool that is coming up.

    Args:
        pool: The pool, with the decision that starts it.
        owner: Name and uid of the Kubernetes Lease whose end removes the RayCluster; None for a dry run.

    Raises:
        InvalidArgumentError: The template cannot be read, or is no RayCluster, or a name is not valid.
    """
    spec = pool.spec
    _check_names(spec)
    made = _of_template(spec) if spec.template else _of_image(spec)
    made["spec"].pop("suspend", None)
    if not made["spec"].get("enableInTreeAutoscaling"):
        made["spec"]["enableInTreeAutoscaling"] = False
    given = made.get("metadata") or {}
    claim = Claim(pool.id, pool.epoch, pool.decision, pool.stamp, replicas=0, min_replicas=0)
    labels = {**(given.get("labels") or {}), **MADE, **({QUEUE: spec.queue} if spec.queue else {})}
    made["metadata"] = {
        "name": spec.ray_cluster,
        "namespace": spec.namespace,
        "labels": labels,
        "annotations": {**(given.get("annotations") or {}), CLAIM: claim.to_json()},
    }
    if owner is not None:
        reference = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **owner}
        made["metadata"]["ownerReferences"] = [reference]
    _set_size(made, pool)
    return made


def _check_names(spec: PoolSpec) -> None:
    """Check the names that the Kubernetes API does not check, because KubeRay uses them later."""
    for option, name, pattern in (
        ("cluster", spec.ray_cluster, _CLUSTER_NAME),
        ("service_account", spec.service_account, _NAME),
        ("env_secret", spec.env_secret, _NAME),
    ):
        if name is not None and not pattern.fullmatch(name):
            raise InvalidArgumentError(
                f'pool "{spec.name}": KubeRay accepts no {option}={name}: use up to 53 of a-z, 0-9 and -, with a '
                "letter first and no - at the end (the names of Secrets and service accounts may be longer, with .)"
            )


def _set_size(made: Manifest, pool: PoolRef) -> None:
    """Give the pool's worker group its number of workers, and the limits that belong to the pool."""
    group = as_created(made).group(pool.spec)
    made["spec"]["workerGroupSpecs"][group.index] |= {
        "replicas": max(pool.size - 1, 0),
        "minReplicas": 0,
        "maxReplicas": _MOST_REPLICAS,
    }


def as_created(made: Manifest) -> RayCluster:
    """Return a RayCluster as it will be read when it is created."""
    return RayCluster.of({**made, "metadata": {**made["metadata"], "resourceVersion": ""}})


def _of_image(spec: PoolSpec) -> Manifest:
    parameters = {"num-cpus": str(spec.cpus_per_node), "object-store-memory": str(spec.object_store_mb * 10**6)}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "spec": {
            "rayVersion": f"{TESTED_RAY}.0",
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                "rayStartParams": {**parameters, "dashboard-host": "0.0.0.0"},
                "template": _pod(spec, "ray-head"),
            },
            "workerGroupSpecs": [
                {"groupName": _GROUP, "rayStartParams": parameters, "template": _pod(spec, "ray-worker")}
            ],
        },
    }


def _pod(spec: PoolSpec, container: str) -> Manifest:
    """Return the template of a node's pod. Requests are equal to limits: Ray takes its CPUs and memory from the
    limits, and Kubernetes evicts pods of this class last."""
    resources = {"cpu": str(spec.cpus_per_node), "memory": spec.memory_per_node or _MEMORY}
    if spec.gpus_per_node:
        resources[_GPU] = str(spec.gpus_per_node)
    node: Manifest = {"name": container, "image": spec.image, "resources": {"requests": resources, "limits": resources}}
    if spec.env_secret:
        node["envFrom"] = [{"secretRef": {"name": spec.env_secret}}]
    pod: Manifest = {"containers": [node]}
    if spec.service_account:
        pod["serviceAccountName"] = spec.service_account
    return {"metadata": {"labels": dict(MADE)}, "spec": pod}


def _of_template(spec: PoolSpec) -> Manifest:
    path = Path(str(spec.template))
    try:
        found = _parsed(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f'pool "{spec.name}": template={path} cannot be read: {error}. Each host that starts nodes needs this file'
        ) from error
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind != "RayCluster" or not isinstance(found.get("spec"), dict):
        raise InvalidArgumentError(
            f'pool "{spec.name}": template={path} contains {kind or "no object"}, and has to contain one RayCluster'
        )
    found["spec"].setdefault("workerGroupSpecs", [])
    return dict(found)


def _parsed(text: str) -> Any:
    """Read JSON or YAML. The official client of Kubernetes depends on PyYAML."""
    try:
        return json.loads(text)
    except ValueError:
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"it is neither YAML nor JSON ({error})") from None
