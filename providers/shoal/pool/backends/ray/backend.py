"""Backend for existing Ray clusters. The backend watches and requests nodes over HTTP, but never starts or ends nodes
itself.

Each node row of a `ray://` pool is assigned to one of the cluster's nodes as soon as the node has joined the cluster.
So demand, leases and rollback work as in other pools. To end a node of a `ray://` pool, shoal only deletes the node's
row. If the cluster has a Ray autoscaler, the autoscaler ends idle nodes after shoal has requested fewer nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from shoal.errors import InvalidArgumentError, PoolUnreachableError
from shoal.pool.backends import versions
from shoal.pool.backends.base import Arrival, ClusterBackend, NodeRef, PoolRef, Seen
from shoal.pool.backends.ray.client import Cluster, ConnectionRefusedByClusterError
from shoal.pool.backends.ray.token_file import ca_path, remove_token, token_path
from shoal.pool.backends.ray_nodes import GCS_PORT, ClusterNode
from shoal.pool.endpoint import Endpoint
from shoal.pool.spec import PoolSpec

log = logging.getLogger(__name__)


class RayBackend(ClusterBackend):
    """Backend for existing Ray clusters, with or without an autoscaler."""

    def admit(self, spec: PoolSpec, size: int) -> None:
        """Raise an error if other users of the network could read the token, or if the size is above the cluster's
        number of nodes. A cluster with an autoscaler may have any size."""
        spec.check_token_is_private()
        cluster = Cluster(spec)
        there = len(cluster.nodes())
        if size <= there or cluster.has_autoscaler():
            return
        raise InvalidArgumentError(
            f'pool "{spec.name}" is a static Ray cluster of {there} nodes without an autoscaler, so the pool cannot '
            f"have {size} nodes: request at most {there}, or ask the administrator of {spec.address} to add nodes"
        )

    def discard(self, name: str, *, everything: bool) -> None:
        """Remove the token file that shoal has written for the pool, if `everything` is true. Otherwise do nothing,
        because `prepare` has created no files."""
        if everything:
            remove_token(name)

    def look(self, spec: PoolSpec, nodes: Sequence[NodeRef]) -> Seen:
        """Report the pool's nodes that have left the cluster, and assign free nodes of the cluster to the rows that
        wait for a node."""
        if not nodes:
            return Seen()
        cluster = Cluster(spec)
        try:
            there = cluster.nodes()
        except PoolUnreachableError as error:
            return Seen(silence=str(error))
        alive = {node.id for node in there}
        bound = {ref.id: ref.endpoint["ray_node_id"] for ref in nodes if ref.endpoint}
        free = [node for node in there if node.id not in bound.values()]
        return Seen(
            lost={
                ref: f"Ray node {node[:12]} has left the cluster" for ref, node in bound.items() if node not in alive
            },
            arrived={
                ref.id: _arrival(spec, node, there, cluster.python() if node.is_head else None)
                for ref, node in _assign([ref for ref in nodes if ref.id not in bound], free)
            },
        )

    def start(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> None:
        """Request all nodes of the pool from the cluster's autoscaler. Without an autoscaler nothing is requested,
        because such a cluster already has all its nodes."""
        if pool.size <= 1:
            return  # size 1 is the head alone, which is already running
        cluster = Cluster(pool.spec)
        try:
            if cluster.autoscaling() is not False:
                cluster.submit(_job_id(pool), _order(pool))
        except PoolUnreachableError as error:
            log.warning("%s", error)  # The error is only logged, because the next try requests the nodes again.

    def renew(self, pool: PoolRef) -> None:
        """Do nothing, because others end the cluster."""

    def end(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> dict[str, str | None]:
        """Ask the autoscaler for only as many nodes as the pool should have now. The autoscaler can then end the
        surplus nodes, and the caller may delete their rows."""
        try:
            self._replace_request(pool)
        except ConnectionRefusedByClusterError:
            pass  # The head has ended. So its autoscaler and this pool's request for nodes are gone, too.
        except PoolUnreachableError as error:
            hint = f"to stop trying, run `shoal pool down {pool.spec.name} --abandon`"
            problem = f"the autoscaler may still keep nodes for this pool: {error}; {hint}"
            return dict.fromkeys([pool.id, *(node.id for node in nodes)], problem)
        return {node.id: None for node in nodes}

    def endpoint(self, spec: PoolSpec, head: Mapping[str, str]) -> Endpoint:
        """Build the head's addresses. The Job API is that of the pool's spec and not of the head's row, because
        requests to it carry the token."""
        api = str(spec.address).rstrip("/")
        return Endpoint(api, head["gcs"], token_path(spec), versions.recorded(head), ca_path(spec))

    def log(self, node: NodeRef) -> str:
        """Return an empty string, because the cluster's dashboard has the logs."""
        return ""

    def _replace_request(self, pool: PoolRef) -> None:
        """Replace the pool's earlier request to the autoscaler by a request for the pool's present number of nodes. Do
        nothing if the pool has made no request yet."""
        cluster = Cluster(pool.spec)
        before = cluster.jobs()
        if any(cluster.asked(job) for job in before):
            cluster.submit(_job_id(pool), _order(pool))
            cluster.scripts.answer(_job_id(pool))
            if pool.size <= 1:
                # The job that was just submitted has withdrawn the pool's request. Delete this job, too, so that later
                # calls find no job of this pool and do nothing.
                cluster.forget(_job_id(pool))
        for job in before:
            cluster.forget(job)


def _job_id(pool: PoolRef) -> str:
    """Return the id of the Ray job that carries out a decision about the pool's size. The same decision always gives
    the same id, so the job is not submitted twice."""
    return f"shoal-demand-{pool.spec.name}-{pool.stamp:.6f}-{pool.size}"


def _order(pool: PoolRef) -> dict[str, object]:
    spec = pool.spec
    return {
        "pool": spec.name,
        "stamp": pool.stamp,
        "size": pool.size,
        "cpus": spec.cpus_per_node,
        "gpus": spec.gpus_per_node,
    }


def _assign(waiting: Sequence[NodeRef], free: Sequence[ClusterNode]) -> list[tuple[NodeRef, ClusterNode]]:
    """Assign free nodes of the cluster to the database rows that wait for a node. The head's row gets the cluster's
    head. The other rows get the other nodes in the given order, so that every process makes the same assignment."""
    pairs: list[tuple[NodeRef, ClusterNode]] = []
    for is_head in (True, False):
        rows = [ref for ref in waiting if ref.is_head is is_head]
        pairs += zip(rows, [node for node in free if node.is_head is is_head], strict=False)
    return pairs


def _arrival(spec: PoolSpec, node: ClusterNode, there: Sequence[ClusterNode], python: str | None) -> Arrival:
    head = next((other for other in there if other.is_head), node)
    return Arrival(
        {
            "api": str(spec.address).rstrip("/"),
            "gcs": spec.gcs or f"{head.ip}:{GCS_PORT}",
            "ray_node_id": node.id,
            "memory_bytes": str(node.memory_bytes),
            **(versions.to_record({"python": python}) if python else {}),
        },
        node.cpus,
        node.gpus,
    )
