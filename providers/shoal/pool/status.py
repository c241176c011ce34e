"""The status of a pool: its rows, with a look at its nodes, as users and other packages see them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from shoal.errors import PoolDownError
from shoal.pool.backends import BACKENDS, NodeRef, Seen
from shoal.pool.endpoint import Endpoint
from shoal.pool.holder import is_here
from shoal.pool.plan import Snapshot, wanted
from shoal.pool.spec import PoolSpec
from shoal.state.schema import Node, NodeState, Operation, OperationState, PoolState


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


def status_of(snapshot: Snapshot, now: float) -> PoolStatus:
    """Build a pool's status from its rows and a look at its nodes.

    Args:
        snapshot: Its rows.
        now: Seconds since the epoch.
    """
    pool = snapshot.pool
    spec = PoolSpec.model_validate(pool.spec)
    backend = BACKENDS[spec.backend]()
    seen = _look(snapshot)
    nodes = [(node, _state_seen(node, seen)) for node in snapshot.nodes]
    last = snapshot.operations[-1] if snapshot.operations else None

    def those(*states: NodeState) -> tuple[NodeStatus, ...]:
        chosen = [
            _node_status(node, state, seen, backend.log(NodeRef.of(node))) for node, state in nodes if state in states
        ]
        return tuple(sorted(chosen, key=lambda node: not node.is_head))

    return PoolStatus(
        name=pool.name,
        uri=spec.uri,
        state=pool.state.value,
        host=pool.host,
        is_here=is_here(pool),
        min_nodes=pool.min_nodes,
        max_nodes=pool.max_nodes,
        target=wanted(snapshot),
        active=those(NodeState.READY),
        pending=those(NodeState.PLANNED, NodeState.STARTING),
        failed=those(NodeState.FAILED),
        leaving=those(NodeState.DRAINING, NodeState.ENDING),
        leases=tuple(LeaseStatus(lease.id, lease.holder, lease.size, lease.expires_at) for lease in snapshot.leases),
        last_operation=_operation_status(last) if last else None,
        reason=seen.silence or _reason(snapshot, now),
    )


def head_endpoint(snapshot: Snapshot) -> Endpoint:
    """Find where a pool's head takes jobs.

    Raises:
        PoolDownError: It has no head that is ready.
    """
    seen = _look(snapshot)
    for node in snapshot.nodes:
        if node.is_head and _state_seen(node, seen) is NodeState.READY and node.endpoint:
            spec = PoolSpec.model_validate(snapshot.pool.spec)
            return BACKENDS[spec.backend]().endpoint(spec, node.endpoint)
    name = snapshot.pool.name
    raise PoolDownError(
        f'the head of pool "{name}" is not ready: {seen.silence or f"`shoal pool describe {name}` says why"}'
    )


def _look(snapshot: Snapshot) -> Seen:
    """What has become of a pool's nodes since their rows were written, as far as it shows from here."""
    if not snapshot.nodes or not is_here(snapshot.pool):
        return Seen()
    spec = PoolSpec.model_validate(snapshot.pool.spec)
    return BACKENDS[spec.backend]().look(spec, [NodeRef.of(node) for node in snapshot.nodes])


def _state_seen(node: Node, seen: Seen) -> NodeState:
    """A node's state; what died a moment ago, or cannot be seen any more, is not active."""
    live = node.state in (NodeState.STARTING, NodeState.READY, NodeState.DRAINING)
    return NodeState.FAILED if live and (seen.silence or node.id in seen.lost) else NodeState(node.state)


def _node_status(node: Node, state: NodeState, seen: Seen, log: str) -> NodeStatus:
    return NodeStatus(
        name=node.name,
        state=state.value,
        is_head=node.is_head,
        cpus=node.cpus,
        gpus=node.gpus,
        busy=node.busy,
        error=node.error or (seen.lost.get(node.id, seen.silence) if state is NodeState.FAILED else None),
        log=log,
    )


def _operation_status(row: Operation) -> OperationStatus:
    return OperationStatus(
        id=row.id,
        kind=row.kind.value,
        state=row.state.value,
        holder=row.holder,
        size=row.size,
        created_at=row.created_at,
        deadline=row.deadline,
        ended_at=row.ended_at,
        error=row.error,
    )


def _reason(snapshot: Snapshot, now: float) -> str | None:
    pool, last = snapshot.pool, snapshot.operations[-1] if snapshot.operations else None
    if pool.state is not PoolState.UP:
        return None
    short = len(snapshot.nodes) < wanted(snapshot)
    if short and pool.cooldown_until and pool.cooldown_until > now:
        return (
            f"{pool.start_failures} nodes in a row failed, the next try is in {pool.cooldown_until - now:.0f} s "
            f"(`scale_cluster` and leases try at once); the last: {pool.last_failure}"
        )
    if last and last.state is OperationState.ROLLED_BACK:
        return f"the last operation was rolled back: {last.error}"
    return None
