"""The Ray cluster that this process is connected to, as nodes."""

from __future__ import annotations

from typing import Any

from shoal.training.scaling import Node

_HEAD_RESOURCE = "node:__internal_head__"
GPU_TYPE = "accelerator_type:"
"""What Ray puts in front of a node's type of GPU, to make a resource of it of which the node has 1."""


def is_connected() -> bool:
    """Whether this process is a connected Ray driver or worker; loads nothing to find out."""
    import sys

    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def active_nodes() -> list[Node]:
    """The nodes that are alive, the head first, then by name."""
    return [_node(node["NodeName"], node["Resources"]) for node in _alive()]


def _node(name: str, resources: dict[str, float]) -> Node:
    types = (kind.removeprefix(GPU_TYPE) for kind in resources if kind.startswith(GPU_TYPE))
    return Node(
        name=name, cpus=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0)), gpu_type=next(types, None)
    )


def node_order() -> dict[str, int]:
    """Place of each living node, by Ray's node id: the head first, then by name."""
    return {node["NodeID"]: place for place, node in enumerate(_alive())}


def total_resources() -> list[dict[str, float]]:
    """The resources of each living node, used or not."""
    return [dict(node["Resources"]) for node in _alive()]


def _alive() -> list[dict[str, Any]]:
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: (_HEAD_RESOURCE not in node["Resources"], node["NodeName"], node["NodeID"]))
