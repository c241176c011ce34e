"""What a kind of pool has to be able to do. Everything else (demand, rollback, leases, journal) is the same for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.pool.processes import ProcessId
from shoal.state.schema import Node


@dataclass(frozen=True)
class NodeRef:
    """What a backend needs to know of a node's row."""

    id: str
    name: str
    pool: str
    epoch: int
    supervisor: ProcessId | None

    @classmethod
    def of(cls, node: Node) -> NodeRef:
        """The reference of a row."""
        supervisor = ProcessId.from_json(node.supervisor) if node.supervisor else None
        return cls(node.id, node.name, node.pool, node.epoch, supervisor)


class Backend(Protocol):
    """Starts and ends nodes. Every method may be called again for the same node, and by several processes at once."""

    def start(self, node: NodeRef) -> None:
        """Have the node started; returns at once. Its row stands before this is called."""

    def lost(self, node: NodeRef) -> str | None:
        """Why a node that was claimed is no more; None while it lives."""

    def end(self, nodes: Sequence[NodeRef]) -> dict[str, str | None]:
        """End nodes and see them gone: node id -> None when nothing of it is left, else what is."""

    def existing(self) -> list[str]:
        """Ids of all nodes of this home that there is any trace of, rows or not."""
