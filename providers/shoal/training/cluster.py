"""List the nodes and resources on which this process can start workers: those of a Ray cluster, or of a pool without
Ray.

Without a Ray cluster, the driver starts the workers as its own child processes.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, NotRequired, TypedDict, TypeVar

from shoal.errors import CapacityError, InvalidArgumentError
from shoal.lazy_imports import ray
from shoal.node_register import NodeRegister

T = TypeVar("T")

_CPU = "CPU"
_HEAD_RESOURCE = "node:__internal_head__"
GPU_TYPE = "accelerator_type:"
"""Prefix of the names of Ray's resources for GPU types, such as ``accelerator_type:H100``. Each node with GPUs of a
type has an amount of 1 of the resource for this type."""

_LOOK_EVERY_S = 1.0

_PATIENCE_S = 2.0
"""Maximum time in seconds to wait for an answer of the head node."""


_register: NodeRegister | None = None


def use_register(register: NodeRegister) -> None:
    """Make this process a driver or worker of a pool without Ray: a driver starts its workers as child processes on the
    nodes of the register. User code can then not start a Ray of its own, whose processes would remain."""
    global _register
    _register = register
    os.environ["RAY_RUNTIME_ENV_HOOK"] = f"{__name__}.{refuse_ray.__name__}"


def refuse_ray(_runtime_env: object) -> NoReturn:
    """Refuse ``ray.init``, which calls this function by its name in the environment variable of the hook.

    Raises:
        InvalidArgumentError: Always.
    """
    raise InvalidArgumentError(
        "this code uses Ray, but its pool runs without Ray: create a pool with Ray (shoal pool up local://NAME), and "
        "name it in RunConfig(pool_name=NAME)"
    )


_most_nodes: int | None = None


def limit_nodes_to(nodes: int | None) -> None:
    """Limit the workers of this process to a number of nodes if the number of workers is not given. None: no limit."""
    global _most_nodes
    _most_nodes = nodes


def register() -> NodeRegister | None:
    """Return the register of the nodes if this process belongs to a pool without Ray; else None."""
    return _register


def is_connected() -> bool:
    """Return whether this process can start workers, on a Ray cluster or on a pool without Ray.

    This function does not import Ray.
    """
    return _register is not None or ray_if_connected() is not None


def require_connection() -> None:
    """Raise InvalidArgumentError if this process cannot start workers."""
    if not is_connected():
        raise InvalidArgumentError("this process is not connected to a Ray cluster: call ray.init(address=...) first")


def ray_if_connected() -> Any:
    """Return the module of Ray if this process starts its workers on a Ray cluster, else None."""
    if _register is not None:
        return None
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def own_address() -> str:
    """Return the address at which the other nodes of the cluster can reach this process."""
    ray = ray_if_connected()
    return "127.0.0.1" if ray is None else str(ray.util.get_node_ip_address())


def active_nodes() -> list[Node]:
    """Return the nodes that are alive: first the head node, then the others, sorted by name."""
    if _register is not None:
        return [Node(name=node.name, cpus=node.cpus, gpus=0) for node in _register.nodes()]
    return [_node(node["NodeName"], node["Resources"]) for node in _alive()]


def nodes_to_use() -> list[Node]:
    """Return the active nodes that workers use if their number is not given; see :func:`limit_nodes_to`."""
    return limited_nodes(active_nodes(), _most_nodes, lambda node: node["cpus"])


def limited_nodes(nodes: Sequence[T], most: int | None, cpus_of: Callable[[T], int]) -> list[T]:
    """Return the nodes that a job uses if it may use `most` nodes. None: all.

    Nodes without CPUs, such as many heads of Ray clusters, are nodes of the pool, too, so they count. But one node with
    CPUs always remains.
    """
    if most is None or most >= len(nodes):
        return list(nodes)
    usable = [node for node in nodes if cpus_of(node)]
    return usable[: max(1, most - (len(nodes) - len(usable)))]


def _node(name: str, resources: dict[str, float]) -> Node:
    types = (kind.removeprefix(GPU_TYPE) for kind in resources if kind.startswith(GPU_TYPE))
    return Node(
        name=name, cpus=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0)), gpu_type=next(types, None)
    )


def node_names() -> dict[str, str]:
    """Return the name of each node that is alive, as a dict with the ids of the nodes as keys: first the head node,
    then the others, sorted by name."""
    if _register is not None:
        return {node.id: node.name for node in _register.nodes()}
    return {node["NodeID"]: node["NodeName"] for node in _alive()}


def total_resources() -> dict[str, dict[str, float]]:
    """Return all resources (name -> amount) of each node that is alive, including the resources that are in use, by the
    id of the node."""
    if _register is not None:
        return {node.id: _registered(node.cpus) for node in _register.nodes()}
    return {node["NodeID"]: dict(node["Resources"]) for node in _alive()}


def _registered(cpus: int) -> dict[str, float]:
    # A worker without CPUs needs a byte of memory of its node, see `placement.GangShape`.
    return {_CPU: float(cpus), "memory": float(_ANY_NUMBER)}


def free_and_all_cpus() -> tuple[float, float]:
    """Return the number of CPUs that no work uses, and the number of all CPUs."""
    if _register is not None:
        nodes = _register.nodes()
        return sum(map(_register.free_cpus, nodes)), sum(node.cpus for node in nodes)
    return ray.available_resources().get(_CPU, 0.0), ray.cluster_resources().get(_CPU, 0.0)


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """Free resources of a node, and whether the node will shut down soon, as reported by Ray or by the register.

    Args:
        leaving: Whether the node will shut down soon. Ray calls such a node draining, and places no new work on it.
            Ray's autoscaler, KubeRay, ``ray drain-node`` and shoal's local pools announce to Ray which nodes will shut
            down.
        free: Resources (name -> amount) that no work uses.
    """

    leaving: bool
    free: Mapping[str, float]


def rooms() -> dict[str, NodeRoom]:
    """Return the `NodeRoom` of each node that is alive, as a dict with the ids of the nodes as keys.

    The dict is empty if the head node does not answer.
    """
    if _register is not None:
        return {
            node.id: NodeRoom(_register.is_leaving(node.id), _registered(_register.free_cpus(node)))
            for node in _register.nodes()
        }
    ray = ray_if_connected()
    if ray is None:
        return {}
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply, NodeStatus

    reply = GetClusterStatusReply()
    try:
        reply.ParseFromString(_gcs(ray.get_runtime_context().gcs_address).get_cluster_status(timeout_s=_PATIENCE_S))
    except Exception:
        # Ray raises exceptions of several types. They can be ignored, because other code detects lost nodes.
        return {}
    return {
        node.node_id.hex(): NodeRoom(node.status == NodeStatus.DRAINING, dict(node.available_resources))
        for node in reply.cluster_resource_state.node_states
        if node.status != NodeStatus.DEAD
    }


@functools.lru_cache(maxsize=1)
def _gcs(address: str) -> Any:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    return GcsClient(address)


def leaving_nodes() -> set[str]:
    """Return the ids of the nodes that will shut down soon (Ray calls them draining nodes)."""
    return {node_id for node_id, room in rooms().items() if room.leaving}


class LeavingNodes:
    """Callable that returns which of the given nodes will shut down soon.

    Args:
        node_ids: Ids of the nodes.
    """

    def __init__(self, node_ids: Collection[str]) -> None:
        self._node_ids = frozenset(node_ids)
        self._found: frozenset[str] = frozenset()
        self._look_at = 0.0

    def __call__(self) -> frozenset[str]:
        """Return the ids of the nodes that will shut down soon; look at most once a second."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            self._found |= self._node_ids & leaving_nodes()
        return self._found


def _alive() -> list[dict[str, Any]]:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: (_HEAD_RESOURCE not in node["Resources"], node["NodeName"], node["NodeID"]))


_ANY_NUMBER = 1_000
"""Number of workers that fit on a node if a worker reserves neither CPUs nor GPUs. The number only has to be larger
than any number of workers that a user starts on one node."""


class Node(TypedDict):
    """Name, CPUs and GPUs of an active node. `gpu_type` is set only if this process is connected to Ray."""

    name: str
    cpus: int
    gpus: int
    gpu_type: NotRequired[str | None]


def workers_on(node: Node, cpus: float, gpus: int, gpu_type: str | None = None) -> int:
    """Compute how many workers of a given size fit on a node."""
    if gpu_type is not None and node.get("gpu_type", gpu_type) != gpu_type:
        return 0
    return min(int(node["cpus"] // cpus) if cpus else _ANY_NUMBER, node["gpus"] // gpus if gpus else _ANY_NUMBER)


def limited(wanted: int, room: int, request: str, nodes: Sequence[Node], *, clamp: bool) -> int:
    """Check that a requested number of nodes, workers or CPUs is not larger than the number that is available.

    If the number is too large, raise an error, or reduce the number and warn.

    Raises:
        CapacityError: `wanted` is larger than `room`, and either `clamp` is False or `room` is 0.
    """
    if wanted <= room:
        return wanted
    problem = f"{request} does not fit: there is room for only {room} ({listed(nodes)})"
    if not clamp or not room:
        raise CapacityError(
            f"{problem}: add nodes with shoal.scale_cluster, create a pool with larger nodes (cpus_per_node, "
            "gpus_per_node), request less, or set RunConfig(clamp=True) to reduce such requests automatically"
        )
    warnings.warn(f"{problem}: reduced to {room}", stacklevel=3)
    return room


def resources(cpus: float, gpus: int, gpu_type: str | None = None) -> str:
    """Format the resources of a worker or a node for a message, such as ``2 CPUs and 1 H100 GPU``."""
    text = f"{cpus:g} CPU{'' if cpus == 1 else 's'}"
    if not gpus:
        return text
    return f"{text} and {gpus} {f'{gpu_type} ' if gpu_type else ''}GPU{'' if gpus == 1 else 's'}"


def listed(nodes: Sequence[Node]) -> str:
    """Format the names and resources of the active nodes for an error message."""
    each = (f"{node['name']}: {resources(node['cpus'], node['gpus'], node.get('gpu_type'))}" for node in nodes)
    return ", ".join(each) or "no node is active"
