"""Nodes of a Ray cluster, as the state API of its head reports them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shoal.errors import PoolUnreachableError
from shoal.pool.backends.ray_http import RayHead

GCS_PORT = 6379
"""Default port of the GCS (Ray's control service)."""

_MOST_NODES = 10_000
"""Largest number of nodes to request from Ray's state API. Without a limit in the request, the API returns only 100."""


@dataclass(frozen=True)
class ClusterNode:
    """One node that is alive in a Ray cluster, as the cluster's head reports it."""

    id: str
    name: str
    is_head: bool
    ip: str
    cpus: int
    gpus: int
    memory_bytes: int = 0


def alive_nodes(head: RayHead) -> list[ClusterNode]:
    """Return the cluster's nodes that are alive: first the head, then the other nodes, sorted by name."""
    found = head.get(
        "/api/v0/nodes",
        lambda answer: [_node(row) for row in answer["data"]["result"]["result"]],
        params={
            "detail": "true",
            "limit": str(_MOST_NODES),
            "filter_keys": "state",
            "filter_predicates": "=",
            "filter_values": "ALIVE",
        },
    )
    return sorted(found, key=lambda node: (not node.is_head, node.name, node.id))


def python_version(head: RayHead) -> str | None:
    """Return the full version of the cluster's Python, such as 3.11.7, or None if the head does not report it."""
    with suppress(PoolUnreachableError):
        return head.get("/api/v0/cluster_metadata", lambda answer: str(answer["data"]["pythonVersion"]))
    return None


def _node(row: Mapping[str, Any]) -> ClusterNode:
    resources = row["resources_total"] or {}
    return ClusterNode(
        id=str(row["node_id"]),
        name=str(row["node_name"]),
        is_head=bool(row["is_head_node"]),
        ip=str(row["node_ip"]),
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        memory_bytes=int(resources.get("memory", 0)),
    )
