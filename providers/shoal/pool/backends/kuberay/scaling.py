"""Decide how a RayCluster has to change so that a pool gets its size, and which row has which pod. All of it is pure.

The operator has traps, which the JSON patches avoid:

- It deletes any pods if `replicas` gets smaller, busy ones, too. So pods that have to go are named in `workersToDelete`
  in the same patch, and stay named as long as they exist: a terminating pod that is not named counts as a replica.
- It limits `replicas` to `minReplicas` and `maxReplicas` without an error. So sizes are checked before.
- With Ray's autoscaler, `replicas` belongs to the autoscaler, and the pool raises `minReplicas`.

Each patch tests the identity and version of the RayCluster, and writes the pool's decision into an annotation. So of
two processes that patch at the same time, one fails and looks again, and a process with an older decision changes
nothing.

The name of a Lease contains the identity of one start of a pool. So no request of another pool, or of an earlier start
of this pool, reaches it. Whether it has expired is judged by the clock of the Kubernetes API alone, which records the
time of each change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.pool.backends.interface import NodeRef, PoolRef
from shoal.pool.backends.kuberay.resources import CLAIM, MADE, Claim, Pod, RayCluster, WorkerGroup
from shoal.pool.backends.ray_http import ClusterNode
from shoal.pool.timeouts import RAY_CLUSTER_LEASE
from shoal.state.schema import NodeState


def name_of(ray_cluster: str, life: str = "") -> str:
    """Return the name of the Lease of a RayCluster in one life of its pool (see `PoolRef.life`)."""
    return f"shoal-{ray_cluster}-{sha256(life.encode()).hexdigest()[:10]}"


def made(ray_cluster: str, life: str) -> dict[str, Any]:
    """Return a new Lease."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name_of(ray_cluster, life), "labels": dict(MADE)},
        "spec": {"holderIdentity": life, "leaseDurationSeconds": int(RAY_CLUSTER_LEASE), "renewTime": now()},
    }


def now() -> str:
    """Return the present time as Leases have it. Each renewal changes it, and nothing else depends on it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def has_expired(lease: Mapping[str, Any], at: datetime) -> bool:
    """Return whether nobody has changed a Lease for its duration. `at` is the present time of the Kubernetes API."""
    meta = lease["metadata"]
    changes = [entry["time"] for entry in meta.get("managedFields") or () if "time" in entry]
    changed = datetime.fromisoformat(max([meta["creationTimestamp"], *changes]))
    return at - changed > timedelta(seconds=lease["spec"].get("leaseDurationSeconds") or RAY_CLUSTER_LEASE)


Patch = list[dict[str, Any]]
"""Operations of a JSON patch."""


@dataclass(frozen=True)
class Plan:
    """How a RayCluster changes.

    Attributes:
        patch: The JSON patch; None if nothing has to change.
        doomed: Identities of the pods that are deleted.
        problem: Why the pool cannot get its size; None if it can.
    """

    patch: Patch | None = None
    doomed: frozenset[str] = frozenset()
    problem: str | None = None


def is_own(cluster: RayCluster, pool: PoolRef) -> bool:
    """Return whether shoal has created a RayCluster in this life of a pool. The Lease that owns the RayCluster decides.
    If somebody has removed this owner, label and annotation decide."""
    if cluster.lease_name:
        return cluster.lease_name == name_of(cluster.name, pool.life)
    claim = cluster.claim
    return cluster.is_made and claim is not None and (claim.id, claim.epoch) == (pool.id, pool.epoch)


def plan_start(cluster: RayCluster, pods: Sequence[Pod], pool: PoolRef) -> Plan:
    """Return the patch that raises the group to the size of the pool. The group never gets smaller here.

    Pods that are being deleted are named, because the operator creates no other pods in their place until they are
    named or gone. On a machine that is gone, they stay until somebody deletes them. With Ray's autoscaler they are not
    named, because it starts no pods as long as a named pod exists.

    Raises:
        InvalidArgumentError: Another pool uses the RayCluster, or Kueue would end its pods.
    """
    if refused := used_by_another(cluster, pool):
        raise InvalidArgumentError(refused)
    if cluster.claim and cluster.claim.is_newer(pool.id, pool.epoch, pool.decision):
        return Plan()
    group = cluster.group(pool.spec)
    found = _found(cluster, group, pool)
    target = _target(found, group, pool)
    if cluster.is_rigid and target > group.replicas:
        raise InvalidArgumentError(rigid(pool.spec.namespace, cluster))
    changes = _sizes(cluster, group, found, target, max(group.replicas, target))
    mine = [pod for pod in pods if pod.group == group.name and not pod.is_head]
    ending = {pod.name for pod in mine if pod.is_deleted}
    if not cluster.is_autoscaled and sum(pod.is_alive for pod in mine) < target:
        changes += _named(group, mine, ending)
    return Plan(_patch(cluster, group, _claim(cluster, found, pool), changes))


def plan_end(cluster: RayCluster, pods: Sequence[Pod], pool: PoolRef, ending: Sequence[NodeRef]) -> Plan:
    """Return the patch that lowers the group to the size of the pool, and names the pods to delete.

    A pod of an ending node stays if the cluster had it when the pool came up, or if the pool's size needs it: for
    example if only Ray has ended in the pod. A later row then gets this pod. Where Kueue admits the RayCluster as a
    whole, all pods stay until the pool goes down.
    """
    is_known = bool(_recorded(cluster, pool)) or (cluster.claim is not None and cluster.claim.id == pool.id)
    if not is_known and pool.size == 0:
        return Plan()  # The pool has never used the RayCluster.
    if refused := used_by_another(cluster, pool):
        return Plan(problem=refused if is_known else None)
    if cluster.claim and cluster.claim.is_newer(pool.id, pool.epoch, pool.decision):
        return Plan(problem=f"the annotation {CLAIM} of RayCluster {cluster.name} has a newer decision of this pool")
    group = cluster.group(pool.spec)
    found = _found(cluster, group, pool)
    target = _target(found, group, pool)
    if cluster.is_rigid and pool.size > 0:
        return Plan()
    mine = [pod for pod in pods if pod.group == group.name and not pod.is_head]
    of_rows = {(node.endpoint or {}).get("pod_uid") for node in ending}
    alive = [pod for pod in mine if pod.is_alive]
    # Ray's autoscaler starts pods, too, and ends them itself. Without it, pods without a row are those that were
    # created for rows that end now.
    spare = [pod for pod in alive if pod.uid in of_rows or not (pod.uid in pool.held or cluster.is_autoscaled)]
    spare.sort(key=lambda pod: (pod.uid in of_rows, pod.ip == "", pod.created, pod.name), reverse=True)
    gone = [pod for pod in mine if pod.uid in of_rows and not pod.is_alive]
    doomed = [*spare[: max(0, len(alive) - target)], *gone]
    replicas = min(group.replicas, max(target, len(alive) - (len(doomed) - len(gone))))
    changes = _sizes(cluster, group, found, target, replicas)
    changes += _named(group, mine, {pod.name for pod in doomed})
    return Plan(_patch(cluster, group, _claim(cluster, found, pool), changes), frozenset(pod.uid for pod in doomed))


def rigid(namespace: str | None, cluster: RayCluster) -> str:
    """Return why the size of a RayCluster cannot change under Kueue."""
    return (
        f"Kueue admits RayCluster {namespace}/{cluster.name} as a whole, and ends all its pods if its size changes: "
        "take the pool down, and bring it up with another size, or use Kueue's elastic jobs (see docs/kubernetes.md)"
    )


def used_by_another(cluster: RayCluster, pool: PoolRef) -> str | None:
    """Return why a pool must not change a RayCluster that another pool uses or has created. Return None if none has."""
    claim, place = cluster.claim, f"-n {pool.spec.namespace} {cluster.name}"
    if pool.spec.makes_cluster:
        is_used, cure = not is_own(cluster, pool), f"delete raycluster {place}"
    else:
        is_used = claim is not None and claim.is_held and claim.id != pool.id
        cure = f"annotate raycluster {place} {CLAIM}-"
    if not is_used:
        return None
    return (
        f"RayCluster {pool.spec.namespace}/{cluster.name} is used by another pool, perhaps of another store: "
        f'"{claim.id.partition("/")[0] if claim else "unknown"}". Run `shoal pool down` there, or give pool '
        f'"{pool.spec.name}" another RayCluster; if that pool no longer exists, run `kubectl {cure}`'
    )


def _recorded(cluster: RayCluster, pool: PoolRef) -> tuple[int, int] | None:
    """Return replicas and `minReplicas` that this start of the pool has found in this RayCluster, as the store has
    recorded them: a RayCluster that was deleted and created again is another one."""
    uid, epoch, *found = pool.found.split() or ("", "0", "0", "0")
    return (int(found[0]), int(found[1])) if (uid, int(epoch)) == (cluster.uid, pool.epoch) else None


def _found(cluster: RayCluster, group: WorkerGroup, pool: PoolRef) -> tuple[int, int]:
    """Return replicas and `minReplicas` of the group when the pool came up: at its first decision, the present ones.
    The store has them, too, because other users of the RayCluster may change its annotation."""
    claim = cluster.claim
    if pool.spec.makes_cluster:
        return 0, 0
    if recorded := _recorded(cluster, pool):
        return recorded
    if claim and claim.id == pool.id and claim.replicas is not None:
        return claim.replicas, claim.min_replicas or 0
    return group.replicas, group.min_replicas


def _claim(cluster: RayCluster, found: tuple[int, int], pool: PoolRef) -> Claim:
    """Return the claim of this decision."""
    before = cluster.claim
    is_sent = before and (before.id, before.epoch, before.decision) == (pool.id, pool.epoch, pool.decision)
    at = before.at if before and is_sent else pool.stamp
    return Claim(pool.id, pool.epoch, pool.decision, at, *(found if pool.size else (None, None)))


def _target(found: tuple[int, int], group: WorkerGroup, pool: PoolRef) -> int:
    """Return the number of workers for the size of the pool: never fewer than were found."""
    return min(max(found[0], pool.size - 1), max(group.max_replicas, found[0]))


def _sizes(cluster: RayCluster, group: WorkerGroup, found: tuple[int, int], target: int, replicas: int) -> Patch:
    changes = {"replicas": (group.replicas, replicas)}
    if cluster.is_autoscaled:
        changes["minReplicas"] = (group.min_replicas, max(found[1], target if target > found[0] else 0))
    path = f"/spec/workerGroupSpecs/{group.index}"
    return [{"op": "add", "path": f"{path}/{name}", "value": new} for name, (old, new) in changes.items() if old != new]


def _named(group: WorkerGroup, mine: Sequence[Pod], doomed: set[str]) -> Patch:
    """Return the change that names pods to delete, if they are not named yet. Pods that are named stay named."""
    if doomed <= set(group.named):
        return []
    names = sorted({pod.name for pod in mine if pod.name in group.named} | doomed)
    path = f"/spec/workerGroupSpecs/{group.index}/scaleStrategy"
    if group.has_strategy:
        return [{"op": "add", "path": f"{path}/workersToDelete", "value": names}]
    return [{"op": "add", "path": path, "value": {"workersToDelete": names}}]


def _patch(cluster: RayCluster, group: WorkerGroup, claim: Claim, changes: Patch) -> Patch | None:
    """Return the whole patch, or None if the RayCluster has all of it already."""
    if not changes and cluster.claim == claim:
        return None
    annotation = CLAIM.replace("~", "~0").replace("/", "~1")
    return [
        {"op": "test", "path": "/metadata/uid", "value": cluster.uid},
        {"op": "test", "path": "/metadata/resourceVersion", "value": cluster.version},
        {"op": "test", "path": f"/spec/workerGroupSpecs/{group.index}/groupName", "value": group.name},
        *([] if cluster.has_annotations else [{"op": "add", "path": "/metadata/annotations", "value": {}}]),
        {"op": "add", "path": f"/metadata/annotations/{annotation}", "value": claim.to_json()},
        *changes,
    ]


@dataclass(frozen=True)
class Matched:
    """Result of `match`, by the id of the row.

    Attributes:
        lost: Rows of ready nodes whose pod or Ray node is gone, with the pod if it still exists.
        joined: Rows that wait, and whose pod has a Ray node now.
        waiting: Rows that wait for their pod's Ray node; None for rows without a pod.
    """

    lost: Mapping[str, Pod | None] = field(default_factory=dict)
    joined: Mapping[str, tuple[Pod, ClusterNode]] = field(default_factory=dict)
    waiting: Mapping[str, Pod | None] = field(default_factory=dict)


def match(rows: Sequence[NodeRef], pods: Sequence[Pod], ray: Sequence[ClusterNode] | None, group: str) -> Matched:
    """Match the rows of a pool with pods and Ray nodes.

    A row keeps its pod as long as the pod exists. The other rows get the pods without a row, the head's row the head's
    pod, in an order that is the same in every process. A Ray node belongs to the pod with its address.

    Args:
        rows: The rows of the pool that do not end.
        pods: Pods of the RayCluster, the oldest first.
        ray: Ray's nodes that are alive; None if Ray's head does not answer, so that only lost pods are noticed.
        group: Worker group whose pods are nodes of the pool.
    """
    by_uid = {pod.uid: pod for pod in pods}
    by_ip = {node.ip: node for node in ray or ()}
    lost: dict[str, Pod | None] = {}
    joined: dict[str, tuple[Pod, ClusterNode]] = {}
    waiting: dict[str, Pod | None] = {}
    taken = {(row.endpoint or {}).get("pod_uid") for row in rows}
    free = [pod for pod in pods if pod.is_alive and pod.uid not in taken]
    free.sort(key=lambda pod: (pod.ip not in by_ip, not pod.ip, pod.created, pod.name))
    for row in rows:
        endpoint = row.endpoint or {}
        pod = by_uid.get(endpoint.get("pod_uid", ""))
        if row.state in (NodeState.ENDING, NodeState.FAILED):
            continue
        if ray_node := endpoint.get("ray_node_id"):
            node = by_ip.get(pod.ip) if pod else None
            is_same = ray is None or (node is not None and node.id == ray_node)
            if pod is None or not pod.is_alive or not is_same:
                lost[row.id] = pod
            continue
        if pod is None or not pod.is_alive:
            fits = (pod for pod in free if pod.is_head is row.is_head and (pod.is_head or pod.group == group))
            pod = next(fits, None)
            free = [other for other in free if other is not pod]
        node = by_ip.get(pod.ip) if pod else None
        if pod and node and node.is_head is row.is_head:
            joined[row.id] = pod, node
        else:
            waiting[row.id] = pod
    return Matched(lost, joined, waiting)
