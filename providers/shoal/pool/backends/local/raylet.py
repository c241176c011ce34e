"""The only module that touches Ray's private API: a Ray node on loopback, owned by the calling process.

`ray start` cannot be bound to loopback; `ray._private.node.Node` can. It ties its children to the *thread* that starts
them (PDEATHSIG), so it has to be the main thread of a process that does nothing else: the supervisor. The environment
of `endpoint.ray_environment` has to be set before this module is imported.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.core.generated import autoscaler_pb2
from ray.exceptions import RayError

from shoal.pool.tunables import HEAD_PATIENCE

_RPC_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RayletSpec:
    """What a Ray node of ours is made of."""

    name: str
    folder: Path
    cpus: int
    gpus: int
    object_store_bytes: int
    gcs: str | None
    """Address of the head to join; None for the head itself."""
    ip: str = "127.0.0.1"
    """What it listens on, and where the other nodes reach it."""


class Raylet:
    """A running Ray node. Made in the main thread; returns when it has joined.

    Raises:
        Exception: Whatever Ray raises when a node does not come up.
    """

    def __init__(self, spec: RayletSpec) -> None:
        is_head = spec.gcs is None
        params = RayParams(
            node_ip_address=spec.ip,
            node_name=spec.name,
            temp_dir=str(spec.folder),
            num_cpus=spec.cpus,
            num_gpus=spec.gpus,
            object_store_memory=spec.object_store_bytes,
            labels={"shoal-node": spec.name},
            min_worker_port=0,
            max_worker_port=0,
            dashboard_agent_listen_port=0,
            include_log_monitor=is_head,
            gcs_address=spec.gcs,
        )
        if is_head:
            params.update(include_dashboard=True, dashboard_host=spec.ip, dashboard_port=0, no_monitor=True)
        self._node = Node(params, head=is_head, shutdown_at_exit=False, spawn_reaper=True)
        self._head = spec.gcs
        self._silent_since: float | None = None

    @property
    def endpoint(self) -> dict[str, str]:
        """``gcs``: host:port to join; ``api``: URL of the Job API; ``ray_node_id``: Ray's own id of it."""
        return {
            "gcs": self._node.gcs_address,
            "api": f"http://{self._node.webui_url}",
            "ray_node_id": self._node.node_id,
        }

    def dead(self) -> str | None:
        """What of the node has ended by itself, or that its head is out of reach; None while it is of use."""
        gone = [f"{kind} (exit code {process.returncode})" for kind, process in self._node.dead_processes()]
        if gone:
            return f"{', '.join(gone)} ended by itself"
        # Ray gives up after 180 s (TCP's patience, then a minute of its own), and takes the process that asks along.
        if self._head and self._silent_since and time.monotonic() - self._silent_since > HEAD_PATIENCE:
            return f"its head at {self._head} is out of reach"
        return None

    def busy(self) -> bool:
        """Whether a task, actor or placement group holds anything of this node."""
        try:
            said = self._node.get_gcs_client().get_cluster_resource_state(timeout_s=_RPC_TIMEOUT_S)
        except RayError:
            # From when the first answer was missed: a supervisor that was paused meanwhile asks again first.
            self._silent_since = self._silent_since or time.monotonic()
            return True  # to end a node that works would be the worse mistake
        self._silent_since = None
        state = autoscaler_pb2.GetClusterResourceStateReply.FromString(said).cluster_resource_state
        mine = bytes.fromhex(self._node.node_id)
        node = next((node for node in state.node_states if node.node_id == mine), None)
        return node is not None and any(
            node.available_resources.get(name, 0.0) < total
            for name, total in node.total_resources.items()
            if name in ("CPU", "GPU")
        )

    def drain(self, seconds: float, reason: str) -> None:
        """Have the scheduler give this node nothing new."""
        self._node.get_gcs_client().drain_node(
            self._node.node_id,
            autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
            reason,
            int((time.time() + seconds) * 1000),
            timeout=_RPC_TIMEOUT_S,
        )

    def stop(self) -> None:
        """End it, its leaving announced to the head where that still runs."""
        self._node.kill_all_processes(check_alive=False, allow_graceful=True)
