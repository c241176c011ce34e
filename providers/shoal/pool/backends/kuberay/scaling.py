"""Decide how a RayCluster has to change so that a pool gets its size: pure, without requests.

The operator has traps, which the JSON patches avoid:

- It deletes any pods if `replicas` gets smaller, busy ones, too. So pods that have to go are named in `workersToDelete`
  in the same patch, and stay named as long as they exist: a terminating pod that is not named counts as a replica.
- It limits `replicas` to `minReplicas` and `maxReplicas` without an error. So sizes are checked before.
- With Ray's autoscaler, `replicas` belongs to the autoscaler, and the pool raises `minReplicas`.

Each patch tests the resource's version, and writes the pool's decision into an annotation. So of two processes that
patch at the same time, one fails and looks again, and a process with an older decision changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.pool.backends.base import NodeRef, PoolRef
from shoal.pool.backends.kuberay.resources import CLAIM, Claim, Pod, RayCluster, WorkerGroup

Patch = list[dict[str, Any]]
"""Operations of a JSON patch."""


@dataclass(frozen=True)
class Plan:
    """How a RayCluster changes.

    Attributes:
        patch: The JSON patch; None if nothing has to change.
        doomed: Identities of the pods that are deleted.
    """

    patch: Patch | None = None
    doomed: frozenset[str] = frozenset()


def is_outdated(cluster: RayCluster, pool: PoolRef) -> bool:
    """Return whether a newer decision about the pool's size was sent before this one.

    Raises:
        InvalidArgumentError: Another pool uses the RayCluster.
    """
    claim = cluster.claim
    if claim is None:
        return False
    if claim.id == pool.id:
        return (claim.epoch, claim.decision) > (pool.epoch, pool.decision)
    if claim.is_held and pool.size > 0:
        raise InvalidArgumentError(
            f'RayCluster {pool.spec.namespace}/{cluster.name} is used by another pool, "{claim.id.partition("/")[0]}": '
            f"run `shoal pool down` there; if that pool no longer exists, run `kubectl annotate raycluster -n "
            f"{pool.spec.namespace} {cluster.name} {CLAIM}-`"
        )
    return claim.is_held


def plan_start(cluster: RayCluster, pods: Sequence[Pod], pool: PoolRef) -> Plan:
    """Return the patch that raises the group to the size of the pool. The group never gets smaller here.

    Pods that are being deleted are named, because the operator creates no other pods in their place until they are
    named or gone. On a machine that is gone, they stay until somebody deletes them. With Ray's autoscaler they are not
    named, because it starts no pods as long as a named pod exists.

    Raises:
        InvalidArgumentError: Another pool uses the RayCluster.
    """
    if is_outdated(cluster, pool):
        return Plan()
    group = cluster.group(pool.spec)
    claim = _claim(cluster, group, pool)
    target = _target(claim, group, pool)
    changes = _sizes(cluster, group, claim, target, max(group.replicas, target))
    mine = [pod for pod in pods if pod.group == group.name and not pod.is_head]
    ending = {pod.name for pod in mine if pod.is_deleted}
    if not cluster.is_autoscaled and sum(pod.is_alive for pod in mine) < target:
        changes += _named(group, mine, ending)
    return Plan(_patch(cluster, group, claim, changes))


def plan_end(cluster: RayCluster, pods: Sequence[Pod], pool: PoolRef, ending: Sequence[NodeRef]) -> Plan:
    """Return the patch that lowers the group to the size of the pool, and names the pods to delete.

    A pod of an ending node stays if the cluster had it when the pool came up, or if the pool's size needs it: for
    example if only Ray has ended in the pod. A later row then gets this pod.
    """
    if is_outdated(cluster, pool):
        return Plan()
    group = cluster.group(pool.spec)
    claim = _claim(cluster, group, pool)
    target = _target(claim, group, pool)
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
    changes = _sizes(cluster, group, claim, target, replicas)
    changes += _named(group, mine, {pod.name for pod in doomed})
    if pool.size == 0:
        claim = replace(claim, replicas=None, min_replicas=None)
    return Plan(_patch(cluster, group, claim, changes), frozenset(pod.uid for pod in doomed))


def _claim(cluster: RayCluster, group: WorkerGroup, pool: PoolRef) -> Claim:
    """Return the claim of this decision. The replicas that were found at the first decision are kept."""
    before = cluster.claim
    kept = before if before and before.id == pool.id and before.is_held else None
    is_sent = before and (before.id, before.epoch, before.decision) == (pool.id, pool.epoch, pool.decision)
    return Claim(
        pool.id,
        pool.epoch,
        pool.decision,
        before.at if before and is_sent else pool.stamp,
        kept.replicas if kept else group.replicas,
        kept.min_replicas if kept else group.min_replicas,
    )


def _target(claim: Claim, group: WorkerGroup, pool: PoolRef) -> int:
    """Return the number of workers for the size of the pool: never fewer than were found."""
    found = group.replicas if claim.replicas is None else claim.replicas
    return min(max(found, pool.size - 1), max(group.max_replicas, found))


def _sizes(cluster: RayCluster, group: WorkerGroup, claim: Claim, target: int, replicas: int) -> Patch:
    changes: Mapping[str, tuple[int, int]] = {"replicas": (group.replicas, replicas)}
    if cluster.is_autoscaled:
        low = target if target > (claim.replicas or 0) else 0
        changes = {**changes, "minReplicas": (group.min_replicas, max(claim.min_replicas or 0, low))}
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
        {"op": "test", "path": "/metadata/resourceVersion", "value": cluster.version},
        {"op": "test", "path": f"/spec/workerGroupSpecs/{group.index}/groupName", "value": group.name},
        *([] if cluster.has_annotations else [{"op": "add", "path": "/metadata/annotations", "value": {}}]),
        {"op": "add", "path": f"/metadata/annotations/{annotation}", "value": claim.to_json()},
        *changes,
    ]
