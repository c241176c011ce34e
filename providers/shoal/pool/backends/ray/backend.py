"""A cluster that someone else runs: its nodes are seen over HTTP and asked for, never started or ended by us.

A row of such a pool is a claim: it stands for one of the cluster's nodes, and is bound to it once it is there. So
demand, leases and rollback are what they are everywhere, and giving up a node takes back the claim, not the node: idle
ones are ended by Ray's autoscaler, where there is one, once it is asked for fewer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.errors import InvalidArgumentError, PoolUnreachableError
from shoal.pool.backends.base import Arrival, NodeRef, PoolRef, Seen
from shoal.pool.backends.ray.client import Cluster, ClusterNode, ConnectionRefusedByClusterError
from shoal.pool.endpoint import Endpoint
from shoal.pool.spec import PoolSpec
from shoal.pool.tunables import CLUSTER_START_TIMEOUT

log = logging.getLogger(__name__)

_GCS_PORT = 6379
"""Ray's own default; `gcs=` says another."""


class RayBackend:
    """Ray clusters that are there already, with or without an autoscaler."""

    bound_to_host = False
    start_timeout = CLUSTER_START_TIMEOUT
    start_timeout_per_node = 0.0

    def admit(self, spec: PoolSpec, size: int) -> None:
        """As many as are there, or any number where Ray's autoscaler runs the cluster."""
        cluster = Cluster(spec)
        there = len(cluster.nodes())
        if size <= there or cluster.has_autoscaler():
            return
        raise InvalidArgumentError(
            f'pool "{spec.name}" is a static Ray cluster of {there} nodes (no autoscaler runs it): it cannot have '
            f"{size}; ask for {there} at most, or have whoever runs {spec.address} add nodes"
        )

    def prepare(self, spec: PoolSpec) -> None:
        """Nothing: the cluster and its token are someone else's."""

    def discard(self, name: str, *, everything: bool) -> None:
        """Nothing, likewise."""

    def look(self, spec: PoolSpec, nodes: Sequence[NodeRef]) -> Seen:
        """Which bound nodes have left the cluster, and which of its nodes stand for claims that wait."""
        if not nodes:
            return Seen()
        try:
            there = Cluster(spec).nodes()
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
                ref.id: _arrival(spec, node, there)
                for ref, node in _matched([ref for ref in nodes if ref.id not in bound], free)
            },
        )

    def start(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> None:
        """Ask the autoscaler for the pool's whole size; where there is none, the nodes are there already."""
        if pool.size <= 1:
            return  # the head needs no asking for
        cluster = Cluster(pool.spec)
        try:
            if cluster.autoscaling() is not False:
                cluster.submit(_job_id(pool), _order(pool))
        except PoolUnreachableError as error:
            log.warning("%s", error)  # asked again as long as the nodes are missing

    def end(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> dict[str, str | None]:
        """Ask the autoscaler for no more than the pool's size; the claims end when it has been told."""
        try:
            self._lower(pool)
        except ConnectionRefusedByClusterError:
            pass  # the hint went with the head
        except PoolUnreachableError as error:
            hint = f"`shoal pool down {pool.spec.name} --abandon` gives up asking"
            return {node.id: f"its autoscaler may still hold nodes for this pool: {error}; {hint}" for node in nodes}
        return {node.id: None for node in nodes}

    def existing(self) -> list[str]:
        """None: no node of such a cluster is ours."""
        return []

    def clear(self, node_id: str) -> str | None:
        """Nothing, likewise."""
        return None

    def endpoint(self, spec: PoolSpec, head: Mapping[str, str]) -> Endpoint:
        """As the spec says; jobs need what the docs ask of the cluster's nodes."""
        return Endpoint(head["api"], head["gcs"], Path(spec.token_file).expanduser() if spec.token_file else None)

    def log(self, node: NodeRef) -> str:
        """Nowhere of ours: the cluster's dashboard has it."""
        return ""

    def _lower(self, pool: PoolRef) -> None:
        """Nothing is to be taken back from a cluster that was never asked: it remembers by the jobs that did."""
        cluster = Cluster(pool.spec)
        before = cluster.jobs()
        if any(cluster.asked(job) for job in before):
            cluster.submit(_job_id(pool), _order(pool))
            cluster.answer(_job_id(pool))
            if pool.size <= 1:
                cluster.forget(_job_id(pool))  # nothing stands any more
        for job in before:
            cluster.forget(job)


def _job_id(pool: PoolRef) -> str:
    """One for each decision: a second process that carries it out too finds it asked."""
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


def _matched(waiting: Sequence[NodeRef], free: Sequence[ClusterNode]) -> list[tuple[NodeRef, ClusterNode]]:
    """The head's row to the head, the others in their order: everybody who looks matches alike."""
    pairs: list[tuple[NodeRef, ClusterNode]] = []
    for is_head in (True, False):
        rows = [ref for ref in waiting if ref.is_head is is_head]
        pairs += zip(rows, [node for node in free if node.is_head is is_head], strict=False)
    return pairs


def _arrival(spec: PoolSpec, node: ClusterNode, there: Sequence[ClusterNode]) -> Arrival:
    head = next((other for other in there if other.is_head), node)
    return Arrival(
        {"api": str(spec.address).rstrip("/"), "gcs": spec.gcs or f"{head.ip}:{_GCS_PORT}", "ray_node_id": node.id},
        node.cpus,
        node.gpus,
    )
