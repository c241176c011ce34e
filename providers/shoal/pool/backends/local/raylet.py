"""Start a Ray node that listens on loopback and belongs to the calling process. This is the only module that uses Ray's
private API.

`ray start` cannot be bound to loopback, but `ray._private.node.Node` can. The child processes of `Node` end with the
*thread* that starts them (PDEATHSIG). So the supervisor creates `Node` in its main thread, which lives as long as the
node. The variables of `pool.endpoint.ray_environment` have to be set before this module is imported.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray._private import worker
from ray._private.accelerators import NvidiaGPUAcceleratorManager, get_accelerator_manager_for_resource
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.core.generated import autoscaler_pb2
from ray.exceptions import RayError

from shoal.os_processes import how_ended
from shoal.own_pauses import waited_since
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import HEAD_PATIENCE, RAY_RPC_TIMEOUT
from shoal.state import schema

_LOGS = " Last 20 lines of the Raylet logs:\n"
"""End of the first line of Ray's message that a raylet has ended."""


class _NodeWithoutDashboard(Node):  # type: ignore[misc]
    """A Ray node without Ray's dashboard, even if the node is a head."""

    def start_api_server(self, **_: object) -> None:
        """Do nothing. Ray calls this method to start the dashboard, whose seven processes would take 230 MB."""


def shorten_messages_of_raylets() -> None:
    """Let Ray print no lines of a raylet's log in this process, when the raylet has ended.

    These lines say nothing about the job, and are in Ray's log files, too. Ray has no setting that leaves them out.
    """
    printed = worker.print_to_stdstream

    def shortened(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if data.get("pid") == "raylet":
            data = {**data, "lines": [str(line).partition(_LOGS)[0] for line in data["lines"]]}
        printed(data, *args, **kwargs)

    worker.print_to_stdstream = shortened


def other_gpus() -> list[str]:
    """Return the numbers of the non-NVIDIA GPUs that this process may use. Ray assigns these numbers."""
    manager = get_accelerator_manager_for_resource("GPU")
    if manager is NvidiaGPUAcceleratorManager or manager.get_visible_accelerator_ids_env_var() is None:
        return []
    visible = manager.get_current_process_visible_accelerator_ids()
    everything = [str(number) for number in range(manager.get_current_node_num_accelerators())]
    return everything if visible is None else [each for each in visible if each in everything]


def show_other_gpus(numbers: Sequence[str]) -> None:
    """Set which non-NVIDIA GPUs are visible to the processes that this process starts from now on."""
    get_accelerator_manager_for_resource("GPU").set_current_process_visible_accelerator_ids(list(numbers))


class Raylet:
    """A running Ray node. The constructor has to run in the main thread, and returns when the node has joined its
    cluster.

    Args:
        row: The node's row.
        spec: The pool's spec.
        gcs: Address of the head to join; None if this node is the head.
        folder: The node's folder.
        ip: Address on which the node listens and at which the other nodes reach it.

    Raises:
        Exception: Ray could not start the node.
    """

    def __init__(
        self, row: schema.Node, spec: PoolSpec, gcs: str | None, folder: Path, *, ip: str = "127.0.0.1"
    ) -> None:
        is_head = gcs is None
        params = RayParams(
            node_ip_address=ip,
            node_name=row.name,
            temp_dir=str(folder),
            num_cpus=row.cpus,
            num_gpus=row.gpus,
            object_store_memory=spec.object_store_mb * 2**20,
            labels={"shoal-node": row.name},
            min_worker_port=0,
            max_worker_port=0,
            dashboard_agent_listen_port=0,
            include_log_monitor=is_head,
            gcs_address=gcs,
        )
        if is_head:
            params.update(include_dashboard=True, dashboard_host=ip, dashboard_port=0, no_monitor=True)
        kind = Node if spec.ray_dashboard else _NodeWithoutDashboard
        self._node = kind(params, head=is_head, shutdown_at_exit=False, spawn_reaper=True)
        self._head = gcs
        self._silent_since: float | None = None

    @property
    def endpoint(self) -> dict[str, str]:
        """Return the node's ``gcs`` (host:port at which nodes join the cluster), ``api`` (URL of Ray's Job API, if the
        node is a head with Ray's dashboard) and ``ray_node_id`` (Ray's id of the node)."""
        return {
            "gcs": self._node.gcs_address,
            "api": f"http://{self._node.webui_url}",
            "ray_node_id": self._node.node_id,
        }

    def dead(self) -> str | None:
        """Return the reason why the node cannot be used any more (a process ended, or the head is unreachable); None if
        the node can be used."""
        gone = [f"{kind} {how_ended(process.returncode)}" for kind, process in self._node.dead_processes()]
        if gone:
            return ", ".join(gone)
        # Without this check, Ray would wait for an unreachable head for 180 s (the TCP timeout plus one minute). Then
        # Ray would end the process that sends requests to the head, which is this supervisor.
        if self._head and self._silent_since and waited_since(self._silent_since) > HEAD_PATIENCE:
            return f"the head at {self._head} cannot be reached"
        return None

    def busy(self) -> bool:
        """Return whether a task, actor or placement group uses this node's CPUs, GPUs or memory (a worker without CPUs
        reserves a byte of memory). Also return True if the head does not answer."""
        try:
            said = self._node.get_gcs_client().get_cluster_resource_state(timeout_s=RAY_RPC_TIMEOUT)
        except RayError:
            # Count from the first failed request, not from the last answer. Otherwise, a supervisor that was paused
            # would give up without another request.
            self._silent_since = self._silent_since or time.monotonic()
            # The head did not answer, so the node may be busy. The result is True, because ending a busy node would be
            # worse than keeping an idle node.
            return True
        self._silent_since = None
        state = autoscaler_pb2.GetClusterResourceStateReply.FromString(said).cluster_resource_state
        mine = bytes.fromhex(self._node.node_id)
        node = next((node for node in state.node_states if node.node_id == mine), None)
        return node is not None and any(
            node.available_resources.get(name, 0.0) < total
            for name, total in node.total_resources.items()
            if name in ("CPU", "GPU", "memory")
        )

    def drain(self, seconds: float, reason: str) -> None:
        """Ask Ray's scheduler to place no new work on this node."""
        self._node.get_gcs_client().drain_node(
            self._node.node_id,
            autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
            reason,
            int((time.time() + seconds) * 1000),
            timeout=RAY_RPC_TIMEOUT,
        )

    def stop(self) -> None:
        """End the node's processes. If the head still runs, announce the end of the node to the head."""
        self._node.kill_all_processes(check_alive=False, allow_graceful=True)
