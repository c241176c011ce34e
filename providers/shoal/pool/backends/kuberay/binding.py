"""Match the rows of a pool with the pods of its RayCluster, and the pods with Ray's nodes: pure, without requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.pool.backends.base import NodeRef
from shoal.pool.backends.kuberay.resources import Pod
from shoal.pool.backends.ray_nodes import ClusterNode
from shoal.state.schema import NodeState


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
            pod = next((pod for pod in free if _fits(row, pod, group)), None)
            free = [other for other in free if other is not pod]
        node = by_ip.get(pod.ip) if pod else None
        if pod and node and node.is_head is row.is_head:
            joined[row.id] = pod, node
        else:
            waiting[row.id] = pod
    return Matched(lost, joined, waiting)


def _fits(row: NodeRef, pod: Pod, group: str) -> bool:
    return pod.is_head if row.is_head else pod.group == group and not pod.is_head
