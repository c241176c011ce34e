"""What a pool looks like from outside."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from shoal.errors import PoolDownError


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
        log: File of its supervisor's log on the pool's host.
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
        host: The machine it is bound to.
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


@dataclass(frozen=True)
class Endpoint:
    """Where a pool's head is reached.

    Attributes:
        api: URL of Ray's Job API.
        gcs: ``host:port`` that drivers connect to.
        token_path: 0600 file with the bearer token.
    """

    api: str
    gcs: str
    token_path: Path

    def token(self) -> str:
        """The bearer token.

        Raises:
            PoolDownError: The pool went down meanwhile.
        """
        try:
            return self.token_path.read_text().strip()
        except FileNotFoundError:
            raise PoolDownError(f"{self.token_path} is gone: the pool went down") from None

    def driver_environment(self) -> Mapping[str, str]:
        """Environment in which a Ray driver on the pool's host connects to it; set before Ray is imported.

        Raises:
            RuntimeError: Ray is imported already in this process, and would not read it any more.
        """
        from shoal.pool.backends.local import ray_environment

        if "ray" in sys.modules:
            raise RuntimeError("Ray is imported already: set the pool's environment first, or use a fresh process")
        return {**ray_environment(self.token_path), "RAY_ADDRESS": self.gcs}
