"""Backend for existing Ray clusters. The backend watches and requests nodes over HTTP, but never starts or ends nodes
itself.

Each node row of a `ray://` pool is assigned to one of the cluster's nodes as soon as the node has joined the cluster.
So demand, leases and rollback work as in other pools. To end a node of a `ray://` pool, shoal only deletes the node's
row. If the cluster has a Ray autoscaler, the autoscaler ends idle nodes after shoal has requested fewer nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import InvalidArgumentError, PoolUnreachableError
from shoal.pool.backends import versions
from shoal.pool.backends.interface import Arrival, ClusterBackend, NodeRef, PoolRef, Seen
from shoal.pool.backends.ray.autoscaler_job import ASKING, READ_ONLY
from shoal.pool.backends.ray_http import (
    GCS_PORT,
    BusyClusterError,
    ClusterNode,
    Failure,
    Problem,
    RayHead,
    ScriptRunner,
    alive_nodes,
    python_version,
)
from shoal.pool.endpoint import Endpoint, ca_path, remove_token, token_path
from shoal.pool.spec import PoolSpec

_AUTOSCALER_JOB = Path(__file__).with_name("autoscaler_job.py")


class ConnectionRefusedByClusterError(PoolUnreachableError):
    """The connection to the head was refused. So the head has ended, and all requests for nodes that it had received
    are lost."""


class Cluster:
    """HTTP client of the Ray cluster of a `ray://` pool. All requests go to the cluster's head.

    Args:
        spec: The pool.
        token: Bearer token. None: the token in the pool's file.

    Raises:
        PoolUnreachableError: Raised by every method if the cluster does not answer or refuses the request, or if the
            address is not that of a Ray head.
    """

    def __init__(self, spec: PoolSpec, token: str | None = None) -> None:
        assert spec.address
        self._spec = spec
        self._address = spec.address.rstrip("/")
        self._unread = None
        """Why the token file cannot be read. Reported only if the cluster refuses a request because of the token."""
        if token is None:
            token, path = "", token_path(spec)
            try:
                token = path.read_text().strip() if path else ""
            except OSError as error:
                self._unread = f'token_file={path} of pool "{spec.name}" cannot be read: {error.strerror}'
        self.head = RayHead(self._address, token, ca=ca_path(spec), error=self._pool_error)
        """Client of the head."""
        self.scripts = ScriptRunner(self.head, f"the Ray cluster at {self._address}", spec.name, spec.gcs)
        """Runs scripts on the cluster."""

    def nodes(self) -> list[ClusterNode]:
        """Return the cluster's nodes that are alive: first the head, then the other nodes, sorted by name."""
        return alive_nodes(self.head)

    def autoscaling(self) -> bool | None:
        """Return whether the cluster has a Ray autoscaler. Return None if the head's status does not show this, because
        the cluster has autoscaler v2 or no monitor process.

        A cluster started with `ray start --head` has no autoscaler. Its monitor process gives each node a type of its
        own, ``node_<id>``. So such types do not show that the cluster has an autoscaler.
        """
        types = self.head.get("/api/cluster_status", _node_types)
        return any(not kind.startswith(READ_ONLY) for kind in types) if types else None

    def has_autoscaler(self) -> bool:
        """Return whether the cluster has an autoscaler. If the head's status does not show this, run a small job on the
        cluster that looks for an autoscaler, which takes about 3 s."""
        known = self.autoscaling()
        if known is not None:
            return known
        return self.scripts.run("look", _AUTOSCALER_JOB, {})["autoscaler"] is not None

    def request_nodes(self, pool: PoolRef) -> None:
        """Start the script `autoscaler_job.py` as a Ray job that requests all nodes of a pool, unless the cluster
        already has the job of this decision."""
        spec = pool.spec
        of_node = {"cpus": spec.cpus_per_node, "gpus": spec.gpus_per_node}
        order = {"pool": spec.name, "stamp": pool.stamp, "size": pool.size, **of_node}
        self.scripts.submit(_job_id(pool), _AUTOSCALER_JOB, order)

    def asked(self, job_id: str) -> bool:
        """Wait until a submitted job with the script `autoscaler_job.py` has ended. Return whether the job has, or may
        have, requested nodes from the autoscaler."""
        return ASKING in self.scripts.outcome(job_id)[1].splitlines()

    def jobs(self) -> list[str]:
        """Return the ids of the jobs that shoal has submitted to the cluster for this pool, such as requests for
        nodes."""
        return self.head.get(
            "/api/jobs/",
            lambda rows: [
                str(row["submission_id"])
                for row in rows
                if row.get("submission_id") and (row.get("metadata") or {}).get("shoal_pool") == self._spec.name
            ],
        )

    def forget(self, job_id: str) -> None:
        """Delete an ended job from the cluster's list of jobs. A job that still runs is not deleted."""
        with suppress(BusyClusterError):
            self.head.delete(job_id)

    def _pool_error(self, failure: Failure) -> PoolUnreachableError:
        cluster, reason = f"the Ray cluster at {self._address}", failure.reason
        match failure:
            case Failure(problem=Problem.NOTHING_LISTENS | Problem.NO_CONNECTION):
                # If the address cannot be reached, the head may still run, and its autoscaler may keep nodes for this
                # pool. Only a refused connection shows that the head has ended.
                is_gone = failure.problem is Problem.NOTHING_LISTENS
                return (ConnectionRefusedByClusterError if is_gone else PoolUnreachableError)(
                    f"no Ray cluster answers at {self._address} ({reason}): check that the cluster is up, and that "
                    "this is the address of its dashboard (port 8265 by default)"
                )
            case Failure(problem=Problem.SLOW, method="POST"):  # submitted again: the id shows whether it has arrived
                return BusyClusterError(f"{cluster} does not answer ({reason})")
            case Failure(problem=Problem.SLOW | Problem.NO_ANSWER):
                return PoolUnreachableError(f"{cluster} does not answer ({reason})")
            case Failure(problem=Problem.TOKEN_REFUSED):
                file = self._spec.token_file
                given = f"the token in {file}" if file else "a request without a token"
                hint = "write this cluster's token to the file" if file else "give token_file= in the pool's URI"
                return PoolUnreachableError(self._unread or f"{cluster} refused {given}: {hint}")
            case Failure(problem=Problem.BUSY | Problem.REFUSED, method="POST"):
                is_busy = failure.problem is Problem.BUSY
                return (BusyClusterError if is_busy else PoolUnreachableError)(f"{cluster} accepts no jobs: {reason}")
            case Failure(problem=Problem.BUSY):
                return BusyClusterError(f"{cluster} cannot answer now ({failure.status}: {reason})")
        return PoolUnreachableError(
            f"the server at {self._address} is not the head of a Ray cluster: set address= to the URL of the cluster's "
            "dashboard"
        )


def _node_types(answer: Any) -> list[str]:
    status = answer["data"].get("clusterStatus") or {}
    return list(((status.get("autoscalerReport") or {}).get("nodeTypeMapping") or {}).values())


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
                ref.id: _arrival(spec, node, there, python_version(cluster.head) if node.is_head else None)
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
                cluster.request_nodes(pool)
        except PoolUnreachableError as error:
            log.warning("%s", error)  # The error is only logged, because the next try requests the nodes again.

    def end(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> dict[str, str | None]:
        """Ask the autoscaler for only as many nodes as the pool should have now. The autoscaler can then end the
        surplus nodes, and the caller may delete their rows. A pool that has made no request yet needs none."""
        try:
            cluster = Cluster(pool.spec)
            before = cluster.jobs()
            if any(cluster.asked(job) for job in before):
                cluster.request_nodes(pool)
                cluster.scripts.answer(_job_id(pool))
                if pool.size <= 1:
                    # The job that was just submitted has withdrawn the pool's request. Delete this job, too, so that
                    # later calls find no job of this pool and do nothing.
                    cluster.forget(_job_id(pool))
            for job in before:
                cluster.forget(job)
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

    def script_runner(self, spec: PoolSpec) -> ScriptRunner:
        """Return the runner of scripts on the cluster."""
        return Cluster(spec).scripts


def _job_id(pool: PoolRef) -> str:
    """Return the id of the Ray job that carries out a decision about the pool's size. The same decision always gives
    the same id, so the job is not submitted twice."""
    return f"shoal-demand-{pool.spec.name}-{pool.stamp:.6f}-{pool.size}"


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
