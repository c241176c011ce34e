"""List the nodes and resources of the Ray cluster that this process is connected to."""

from __future__ import annotations

from typing import Any

from shoal.training.capacity import Node

_HEAD_RESOURCE = "node:__internal_head__"
GPU_TYPE = "accelerator_type:"
"""Prefix of the name of the resource that Ray defines for a GPU type; each node with such GPUs has 1 of it."""


def is_connected() -> bool:
    """Return whether this process is connected to a Ray cluster; Ray is not imported for this check."""
    import sys

    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def active_nodes() -> list[Node]:
    """Return the nodes that are alive: first the head node, then the others, sorted by name."""
    return [_node(node["NodeName"], node["Resources"]) for node in _alive()]


def _node(name: str, resources: dict[str, float]) -> Node:
    types = (kind.removeprefix(GPU_TYPE) for kind in resources if kind.startswith(GPU_TYPE))
    return Node(
        name=name, cpus=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0)), gpu_type=next(types, None)
    )


def node_order() -> dict[str, int]:
    """Return the index of each node that is alive, by Ray's node id: 0 for the head node, then the others by name."""
    return {node["NodeID"]: place for place, node in enumerate(_alive())}


def total_resources() -> list[dict[str, float]]:
    """Return all resources (name -> amount) of each node that is alive, including the resources that are in use."""
    return [dict(node["Resources"]) for node in _alive()]


def _alive() -> list[dict[str, Any]]:
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: (_HEAD_RESOURCE not in node["Resources"], node["NodeName"], node["NodeID"]))
