"""What a pool looks like from outside."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypedDict


class NodeInfo(TypedDict):
    """One active node, as `get_nodes` lists it."""

    name: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class NodeStatus:
    """One node, whatever its state.

    Attributes:
        name: ``<pool>-<number>``.
        state: See `shoal.state.schema.NodeState`.
        is_head: Whether it is the pool's head.
        cpus: CPUs that it offers.
        gpus: GPUs that it offers.
        busy: Whether work was running on it when its supervisor last looked.
        error: What went wrong on it.
        log: Where to read what it had to say: for a local node a file on the pool's host.
    """

    name: str
    state: str
    is_head: bool
    cpus: int
    gpus: int
    busy: bool
    error: str | None
    log: str


@dataclass(frozen=True)
class LeaseStatus:
    """One live lease: who holds how many nodes until when (seconds since the epoch)."""

    id: str
    holder: str
    size: int
    expires_at: float


@dataclass(frozen=True)
class OperationStatus:
    """One journaled operation; times in seconds since the epoch."""

    id: str
    kind: str
    state: str
    holder: str
    size: int
    created_at: float
    deadline: float
    ended_at: float | None
    error: str | None


@dataclass(frozen=True)
class PoolStatus:
    """A pool: its limits, its nodes by how far they are, who wants what of it.

    Attributes:
        name: Its name.
        uri: What it was made from.
        state: ``up``, ``stopping`` or ``down``.
        host: The machine it is bound to; empty where any can act on it.
        is_here: Whether this machine can act on it.
        min_nodes: Nodes that it holds while it is up.
        max_nodes: The most it may have.
        target: Nodes that it should have now: the largest live demand within the limits; 0 when it is not up.
        active: Nodes that take work, the head first.
        pending: Nodes on their way up.
        failed: Nodes that failed and are not yet cleared.
        leaving: Nodes being drained or ended.
        leases: Live leases.
        last_operation: The newest operation.
        reason: Why it is not at its target, where there is something to say.
    """

    name: str
    uri: str
    state: str
    host: str
    is_here: bool
    min_nodes: int
    max_nodes: int
    target: int
    active: tuple[NodeStatus, ...]
    pending: tuple[NodeStatus, ...]
    failed: tuple[NodeStatus, ...]
    leaving: tuple[NodeStatus, ...]
    leases: tuple[LeaseStatus, ...]
    last_operation: OperationStatus | None
    reason: str | None

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)
