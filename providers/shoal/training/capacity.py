"""Check whether the workers of a training fit on the active nodes of a pool.

The functions in this module do not call Ray. Their results depend only on their arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NotRequired, TypedDict

from shoal.errors import CapacityError

_ANY_NUMBER = 1_000
"""Number of workers that fit on a node if a worker reserves neither CPUs nor GPUs. The number only has to be larger
than any number of workers that a user starts on one node."""


class Node(TypedDict):
    """Name, CPUs and GPUs of an active node. `gpu_type` is set only if this process is connected to Ray."""

    name: str
    cpus: int
    gpus: int
    gpu_type: NotRequired[str | None]


def workers_on(node: Node, cpus: int, gpus: int, gpu_type: str | None = None) -> int:
    """Compute how many workers of a given size fit on a node."""
    if gpu_type is not None and node.get("gpu_type", gpu_type) != gpu_type:
        return 0
    return min(node["cpus"] // cpus if cpus else _ANY_NUMBER, node["gpus"] // gpus if gpus else _ANY_NUMBER)


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
