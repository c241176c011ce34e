"""RayClusters and pods, as far as the backend reads them from the objects of the Kubernetes API, and the RayCluster
that shoal creates for a pool with `image` or `template`. Pure, except that it reads the template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.pool.backends.interface import PoolRef
from shoal.pool.backends.versions import TESTED_RAY
from shoal.pool.spec import PoolSpec

CLAIM = "shoal.readthedocs.io/pool"
"""Annotation of a RayCluster: the pool that uses it, and the pool's last decision about its size."""

MADE = {"app.kubernetes.io/managed-by": "shoal"}
"""Label of all objects that shoal has created. It deletes no others."""

FIELD_MANAGER = "shoal"
"""Name with which shoal's changes are recorded in the `managedFields` of objects."""

QUEUE = "kueue.x-k8s.io/queue-name"
"""Label of a RayCluster: the Kueue queue that admits it."""

ELASTIC = "kueue.x-k8s.io/elastic-job"
"""Annotation of a RayCluster whose size may change after Kueue has admitted it."""

CLUSTER_LABEL = "ray.io/cluster"
GROUP_LABEL = "ray.io/group"
_TYPE_LABEL = "ray.io/node-type"
_LOST_MACHINE = "DeletionByTaintManager"


@dataclass(frozen=True)
class Claim:
    """Content of the annotation `CLAIM`.

    Attributes:
        id: Identity of the pool (see `PoolRef.id`).
        epoch: Epoch of the pool.
        decision: Number of the last decision that was sent. Older decisions are refused.
        at: Time of this decision, in seconds since the epoch.
        replicas: Replicas of the worker group when the pool came up; None if the pool is down.
        min_replicas: The group's `minReplicas` at that time.
    """

    id: str
    epoch: int
    decision: int
    at: float
    replicas: int | None = None
    min_replicas: int | None = None

    @property
    def is_held(self) -> bool:
        """Return whether the pool is up, so that no other pool may use the RayCluster."""
        return self.replicas is not None

    def is_newer(self, pool: str, epoch: int, decision: int) -> bool:
        """Return whether the claim has a newer decision of the same pool."""
        return self.id == pool and (self.epoch, self.decision) > (epoch, decision)

    def to_json(self) -> str:
        """Return the annotation's value."""
        return json.dumps(vars(self), sort_keys=True)

    @classmethod
    def of(cls, text: str | None) -> Claim | None:
        """Read the annotation's value. None if there is none, or if shoal has not written it."""
        try:
            claim = cls(**json.loads(text)) if text else None
        except (ValueError, TypeError):
            return None
        if claim is None or not isinstance(claim.id, str):
            return None
        numbers = (claim.epoch, claim.decision, claim.at, claim.replicas or 0, claim.min_replicas or 0)
        return claim if all(isinstance(number, int | float) for number in numbers) else None


@dataclass(frozen=True)
class WorkerGroup:
    """One worker group of a RayCluster.

    Attributes:
        index: Place of the group in the list of groups.
        name: Name of the group.
        replicas: Number of workers that the operator starts, within the limits.
        min_replicas: Smallest number of workers.
        max_replicas: Largest number of workers.
        hosts: Pods per replica (``numOfHosts``).
        has_strategy: Whether the group has a `scaleStrategy`.
        named: Pods in `workersToDelete`.
        is_suspended: Whether the group is suspended, so that it has no pods.
    """

    index: int
    name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    hosts: int = 1
    has_strategy: bool = False
    named: tuple[str, ...] = ()
    is_suspended: bool = False

    @classmethod
    def of(cls, index: int, spec: Mapping[str, Any]) -> WorkerGroup:
        """Read a group. The operator limits the replicas to `minReplicas` and `maxReplicas`, and so does this."""
        low, high = int(spec.get("minReplicas") or 0), int(spec.get("maxReplicas", 2**31 - 1))
        given = spec.get("replicas")
        strategy = spec.get("scaleStrategy")
        return cls(
            index,
            str(spec["groupName"]),
            min(max(low if given is None else int(given), low), high),
            low,
            high,
            int(spec.get("numOfHosts") or 1),
            strategy is not None,
            tuple((strategy or {}).get("workersToDelete") or ()),
            bool(spec.get("suspend")),
        )


@dataclass(frozen=True)
class RayCluster:
    """One RayCluster.

    Attributes:
        name: Name of the RayCluster.
        version: Its `resourceVersion`.
        generation: Number of changes of its spec.
        observed: Generation that the operator has last seen; 0 if none.
        groups: Its worker groups.
        claim: The pool that uses or has used the cluster; None if there is none.
        has_annotations: Whether it has any annotation.
        is_suspended: Whether the cluster is suspended, so that it has no pods.
        is_autoscaled: Whether Ray's autoscaler changes the replicas.
        is_deleted: Whether the cluster is being deleted.
        has_token: Whether requests to Ray need a token.
        token_secret: Name of the Secret with this token.
        head_service: Name of the head's service.
        problem: Message of the operator about pods that it cannot create or delete; empty if there is none.
        manager: Controller that manages the cluster instead of KubeRay's operator; None for the operator.
        is_made: Whether shoal has created the cluster.
        uid: Identity of the cluster.
        lease_name: Name of the Lease of shoal that owns the cluster; empty if there is none.
        lease_uid: Identity of this Lease.
        is_rigid: Whether Kueue admits the cluster as a whole, so that it ends all pods if the size changes.
        changed_by: Program that has changed the worker groups after shoal's last change; empty if there is none.
    """

    name: str
    version: str
    generation: int
    observed: int
    groups: tuple[WorkerGroup, ...]
    claim: Claim | None = None
    has_annotations: bool = False
    is_suspended: bool = False
    is_autoscaled: bool = False
    is_deleted: bool = False
    has_token: bool = False
    token_secret: str = ""
    head_service: str = ""
    problem: str = ""
    manager: str | None = None
    is_made: bool = False
    uid: str = ""
    lease_name: str = ""
    lease_uid: str = ""
    is_rigid: bool = False
    changed_by: str = ""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> RayCluster:
        """Read a RayCluster as the API returns it."""
        meta, spec, status = found["metadata"], found["spec"], found.get("status") or {}
        labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
        leases = (
            owner
            for owner in meta.get("ownerReferences") or ()
            if owner.get("kind") == "Lease" and owner["name"].startswith(f"shoal-{meta['name']}-")
        )
        lease = next(leases, {"name": "", "uid": ""})
        auth = spec.get("authOptions")
        failures = [
            ": ".join(str(condition.get("message") or condition.get("reason")).splitlines())
            for condition in status.get("conditions") or ()
            if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True"
        ]
        return cls(
            name=meta["name"],
            version=meta["resourceVersion"],
            generation=int(meta.get("generation") or 0),
            observed=int(status.get("observedGeneration") or 0),
            groups=tuple(
                WorkerGroup.of(index, group) for index, group in enumerate(spec.get("workerGroupSpecs") or ())
            ),
            claim=Claim.of(annotations.get(CLAIM)),
            has_annotations=bool(annotations),
            is_suspended=bool(spec.get("suspend")),
            is_autoscaled=bool(spec.get("enableInTreeAutoscaling")),
            is_deleted=bool(meta.get("deletionTimestamp")),
            has_token=auth is not None and auth.get("mode", "token") == "token",
            token_secret=(auth or {}).get("secretName") or meta["name"],
            head_service=(status.get("head") or {}).get("serviceName") or f"{meta['name']}-head-svc",
            problem="; ".join(failures),
            manager=spec.get("managedBy"),
            is_made=MADE.items() <= labels.items(),
            uid=meta.get("uid", ""),
            lease_name=lease["name"],
            lease_uid=lease["uid"],
            is_rigid=QUEUE in labels and annotations.get(ELASTIC) != "true",
            changed_by=_later_writer(meta.get("managedFields") or ()),
        )

    def group(self, spec: PoolSpec) -> WorkerGroup:
        """Return the worker group whose pods are nodes of a pool.

        Raises:
            InvalidArgumentError: There is no such group, there are several and the pool names none, or a replica of the
                group has several pods.
        """
        names = ", ".join(group.name for group in self.groups) or "none"
        place = f"RayCluster {spec.namespace}/{self.name}"
        if spec.group is None and len(self.groups) > 1:
            raise InvalidArgumentError(
                f"{place} has several worker groups ({names}), and shoal scales only one: give group= in the URI of "
                f'pool "{spec.name}"'
            )
        found = next((group for group in self.groups if spec.group in (None, group.name)), None)
        if found is None:
            raise InvalidArgumentError(f"{place} has no worker group {spec.group or ''}; its groups: {names}")
        if found.hosts > 1:
            raise InvalidArgumentError(
                f"worker group {found.name} of {place} has numOfHosts={found.hosts}, and shoal scales only groups with "
                "one pod per replica: use another group"
            )
        return found


@dataclass(frozen=True)
class Container:
    """State of one container of a pod.

    Attributes:
        name: Name of the container.
        image: Its image.
        is_init: Whether it runs before the other containers.
        waiting: Reason why it does not run, such as ImagePullBackOff; empty if it runs or has ended.
        message: Message about this reason.
        ended: How it ended last, such as ``OOMKilled, exit code 137``; empty if it never ended with an error.
        has_ended: Whether it has ended with an error and does not run now.
    """

    name: str
    image: str
    is_init: bool
    waiting: str = ""
    message: str = ""
    ended: str = ""
    has_ended: bool = False

    @classmethod
    def of(cls, status: Mapping[str, Any], *, is_init: bool) -> Container:
        """Read an entry of `containerStatuses`."""
        state, last = status.get("state") or {}, status.get("lastState") or {}
        waiting = state.get("waiting") or {}
        now = state.get("terminated") or {}
        failed = next((end for end in (now, last.get("terminated") or {}) if end.get("exitCode")), {})
        reason = failed.get("reason")
        return cls(
            status["name"],
            status.get("image", ""),
            is_init,
            waiting.get("reason", ""),
            waiting.get("message", ""),
            f"{f'{reason}, ' if reason and reason != 'Error' else ''}exit code {failed['exitCode']}" if failed else "",
            bool(now.get("exitCode")),
        )


@dataclass(frozen=True)
class Pod:
    """One pod of a RayCluster.

    Attributes:
        name: Name of the pod.
        uid: Identity of the pod.
        group: Worker group of the pod.
        is_head: Whether Ray's head runs in the pod.
        ip: Address of the pod; empty if it has none yet.
        phase: Pending, Running, Succeeded, Failed or Unknown.
        machine: Name of the machine (Kubernetes node) of the pod; empty if it has none yet.
        is_deleted: Whether the pod is being deleted, or will be at once together with its machine's other pods.
        created: Time of its creation, as the API writes it.
        message: Reason and message of its phase, such as ``Evicted: …``; empty if there is none.
        unscheduled: Message of the scheduler if it has found no machine; empty otherwise.
        disruption: Message about the end of the pod that Kubernetes has decided, such as a preemption; empty if there
            is none.
        disrupted_at: Time of this decision, as the API writes it.
        is_ready: Whether the readiness probes of its containers succeed.
        finalizers: Names of the finalizers, which keep the pod until another program removes them.
        containers: State of its containers, init containers first.
    """

    name: str
    uid: str
    group: str
    is_head: bool
    ip: str = ""
    phase: str = "Pending"
    machine: str = ""
    is_deleted: bool = False
    created: str = ""
    message: str = ""
    unscheduled: str = ""
    disruption: str = ""
    disrupted_at: str = ""
    is_ready: bool = False
    finalizers: tuple[str, ...] = ()
    containers: tuple[Container, ...] = field(default=())

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Pod:
        """Read a pod as the API returns it."""
        meta, status = found["metadata"], found.get("status") or {}
        labels = meta.get("labels") or {}
        conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
        scheduled, disrupted = conditions.get("PodScheduled", {}), conditions.get("DisruptionTarget", {})
        return cls(
            name=meta["name"],
            uid=meta["uid"],
            group=labels.get(GROUP_LABEL, ""),
            is_head=labels.get(_TYPE_LABEL) == "head",
            ip=status.get("podIP") or "",
            phase=status.get("phase") or "Pending",
            machine=(found.get("spec") or {}).get("nodeName") or "",
            is_deleted=bool(meta.get("deletionTimestamp")),
            created=meta.get("creationTimestamp") or "",
            message=_sentence(status),
            unscheduled=_sentence(scheduled) if scheduled.get("status") == "False" else "",
            disruption=_sentence(disrupted) if disrupted.get("status") == "True" else "",
            disrupted_at=disrupted.get("lastTransitionTime") or "",
            is_ready=conditions.get("Ready", {}).get("status") == "True",
            finalizers=tuple(meta.get("finalizers") or ()),
            containers=tuple(
                Container.of(entry, is_init=is_init)
                for is_init, key in ((True, "initContainerStatuses"), (False, "containerStatuses"))
                for entry in status.get(key) or ()
            ),
        )

    @classmethod
    def all_of(cls, found: Iterable[Mapping[str, Any]]) -> list[Pod]:
        """Read the pods of a RayCluster, and return the oldest first.

        Kubernetes deletes the pods of a lost machine one after the other. After it has deleted one of them, KubeRay
        does nothing in the worker group until the pod's object is gone. So all pods of the group that were on this
        machine then count as deleted together.
        """
        pods = sorted(map(cls.of, found), key=lambda pod: (pod.created, pod.name))
        lost = [pod for pod in pods if pod.is_deleted and pod.disruption.startswith(_LOST_MACHINE)]

        def is_lost(pod: Pod) -> bool:
            # A later pod is there because the machine has come back.
            return any(
                (pod.group, pod.machine) == (other.group, other.machine) and pod.created <= other.disrupted_at
                for other in lost
            )

        return [replace(pod, is_deleted=pod.is_deleted or is_lost(pod)) for pod in pods]

    @property
    def is_alive(self) -> bool:
        """Return whether the pod runs or may still run."""
        return not self.is_deleted and self.phase not in ("Failed", "Succeeded")

    @property
    def ending(self) -> str:
        """Return the sentence about a pod that is being deleted."""
        held = f"; its finalizer {', '.join(self.finalizers)} holds it until the program that has set it removes it"
        return f"pod {self.name} is being deleted" + (held if self.finalizers else "")


def _sentence(source: Mapping[str, Any]) -> str:
    return ": ".join(str(source[key]) for key in ("reason", "message") if source.get(key))


def status_in(text: Any) -> Mapping[str, Any]:
    """Return the object `Status` with which the Kubernetes API explains an error; empty if a text contains none."""
    try:
        status = json.loads(text)
    except (TypeError, ValueError):
        return {}
    return status if isinstance(status, dict) and status.get("kind") == "Status" else {}


def _later_writer(fields: Iterable[Mapping[str, Any]]) -> str:
    """Return the manager that has changed the worker groups after shoal's last change; empty if there is none."""
    later, is_ours = "", False
    for entry in sorted(fields, key=lambda entry: (entry["time"], entry["manager"] != FIELD_MANAGER)):
        if entry["manager"] == FIELD_MANAGER:
            later, is_ours = "", True
        elif is_ours and "f:workerGroupSpecs" in entry["fieldsV1"].get("f:spec", {}):
            later = entry["manager"]
    return later


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
    # These are the names that the Kubernetes API does not check, because KubeRay uses them later.
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
    group = as_created(made).group(spec)
    made["spec"]["workerGroupSpecs"][group.index] |= {
        "replicas": max(pool.size - 1, 0),
        "minReplicas": 0,
        "maxReplicas": _MOST_REPLICAS,
    }
    return made


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
