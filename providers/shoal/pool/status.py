"""Build a pool's status from its rows in the database and the current state of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypedDict, TypeVar

from shoal.errors import PoolDownError
from shoal.pool.backends import backend_of
from shoal.pool.backends.interface import NodeRef, Seen
from shoal.pool.bound_host import is_here, unrecorded
from shoal.pool.endpoint import Endpoint
from shoal.pool.holder import job_of
from shoal.pool.scaling_plan import Snapshot, leased, queue, queue_note, quota_note, wanted
from shoal.pool.spec import PoolSpec, spec_of_row
from shoal.state.schema import Base, Node, NodeState, Operation, OperationState, PoolState


class NodeInfo(TypedDict):
    """One ready node in the result of `get_nodes`."""

    name: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class NodeStatus:
    """State, resources and error of one node, which may be in any state.

    Attributes:
        name: ``<pool>-<number>``.
        state: A value of `shoal.state.schema.NodeState`.
        is_head: Whether the node is the pool's head.
        cpus: CPUs that the node offers.
        gpus: GPUs that the node offers.
        busy: Whether work was running on the node when its supervisor last checked.
        error: Reason why the node failed, could not be ended, or is not ready yet; None if no reason is known.
        log: Path of the node's log file on the pool's host. Empty if the node is not local.
        leaving_at: Time at which the node will end, as announced with `retire_node`, in seconds since the epoch; None
            if no end was announced.
    """

    name: str
    state: str
    is_head: bool
    cpus: int
    gpus: int
    busy: bool
    error: str | None
    log: str
    leaving_at: float | None = None


@dataclass(frozen=True)
class LeaseStatus:
    """One lease (a request for nodes) that is neither released nor expired.

    Attributes:
        id: Id of the lease.
        holder: Name of the run or process that requested the lease.
        size: Number of nodes that the lease requests.
        expires_at: Time at which the lease expires if it is not renewed, in seconds since the epoch. The lease of a
            job, whose holder is ``job:<job_id>``, does not expire before the job has ended.
        exclusive: Whether the lease's nodes are added to those of other leases, instead of being shared.
        position: Place in the queue of waiting leases: 1 is granted next. None if the lease is granted.
        team: Team to whose quota the lease counts; None if the lease belongs to no team.
        quota_note: Text about the team's quota, if the lease waits because of the quota; None otherwise.
    """

    id: str
    holder: str
    size: int
    expires_at: float
    exclusive: bool = False
    position: int | None = None
    team: str | None = None
    quota_note: str | None = None


@dataclass(frozen=True)
class OperationStatus:
    """One operation: a request to change the pool's size, and its result. Times are in seconds since the epoch."""

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
    """Status of a pool: limits, nodes by state, leases, and last operation.

    Attributes:
        name: Name of the pool.
        uri: The pool's settings as a URI. Only the backend and the name if this process lacks the backend.
        state: ``up``, ``stopping`` or ``down``.
        host: Hostname of the machine to which the pool is bound; empty if any machine can start and end its nodes.
        is_here: Whether this machine can start and end the pool's nodes.
        min_nodes: Smallest number of nodes while the pool is up.
        max_nodes: Largest number of nodes.
        target: Number of nodes that the pool should have now: the base demand (the size that `up` or `scale` has set)
            or `leased`, whichever is larger, limited to `min_nodes` and `max_nodes`. 0 if the pool is not up.
        active: Ready nodes, the head first.
        pending: Nodes that are planned or starting.
        failed: Nodes that failed and are not yet removed.
        leaving: Nodes that are being ended, or that finish their last work before they are ended.
        leases: All leases that are neither released nor expired, granted and waiting.
        last_operation: The newest request to change the pool's size; None if there is none.
        reason: Reason why the pool does not have `target` nodes; None if no reason is known.
        leased: Number of nodes that the granted leases take: the largest shared lease plus all exclusive leases.
        quotas: Limits of each team: ``max_nodes``, and ``node_hours`` within 30 days; None where there is no limit.
        embedded_in: The jobs or the process with which an embedded pool ends, such as ``job xgboost-1f`` or
            ``process 4711``; None if the pool is not embedded.
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
    leased: int = 0
    embedded_in: str | None = None
    quotas: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

    def progress(self, holder: str | None = None) -> str:
        """Return a text about the pool's active nodes, such as ``2 of 3 nodes active``.

        Args:
            holder: Name of a holder. If this holder's lease waits in the queue, the text contains its place there.
        """
        text = f"{len(self.active)} of {self.target} nodes active"
        note = self.queue_note(holder)
        return f"{text}; the lease is {note}" if note else text

    def queue_note(self, holder: str | None) -> str | None:
        """Return a text about the place of a holder's lease in the queue, or None if the holder has no waiting lease.

        The text is, for example, ``waiting for 2 leases ahead, 3 of 6 nodes are taken``.

        Args:
            holder: Name of the run or process that requested the lease.
        """
        for lease in self.leases:
            if lease.holder == holder and lease.position is not None:
                return lease.quota_note or queue_note(lease.position - 1, self.leased, self.max_nodes)
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain dicts and lists that can be written as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class PoolReport:
    """Status of a pool, and its operations.

    Attributes:
        status: The pool's status.
        operations: The requests to change the pool's size, the newest first. Old requests are deleted from the store.
        dashboard: Address of the Ray dashboard if a browser can open it without a token; None for local pools.
    """

    status: PoolStatus
    operations: tuple[OperationStatus, ...]
    dashboard: str | None


_Status = TypeVar("_Status", NodeStatus, LeaseStatus, OperationStatus, PoolStatus)


def report_of(snapshot: Snapshot, now: float, check: Callable[[Snapshot], Seen]) -> PoolReport:
    """Build a pool's report: the pool's status (see `status_of`) and its operations."""
    return PoolReport(
        status=status_of(snapshot, now, check(snapshot)),
        operations=tuple(_operation_status(row) for row in reversed(snapshot.operations)),
        dashboard=snapshot.pool.spec.get("address"),
    )


def status_of(snapshot: Snapshot, now: float, seen: Seen | None = None) -> PoolStatus:
    """Build a pool's status from its rows in the database and the current state of its nodes. If `seen` is None, the
    nodes are checked first."""
    seen = seen or check_nodes(snapshot)
    pool = snapshot.pool
    spec = spec_of_row(pool.spec)
    backend = backend_of(spec) if spec else None
    nodes = []
    for node in snapshot.nodes:
        state = _current_state(node, seen)
        error = node.error or (seen.lost.get(node.id, seen.silence) if state is NodeState.FAILED else None)
        if state is NodeState.PLANNED and (waits := seen.waiting.get(node.id)):
            error = waits.reason
        log = backend.log(NodeRef.of(node)) if backend else ""
        nodes.append(_from_row(NodeStatus, node, state=state.value, error=error, log=log))
    last = snapshot.operations[-1] if snapshot.operations else None
    positions = {lease.id: place for place, lease in enumerate(queue(snapshot), start=1)}
    embedded_in = None
    if pool.owner is not None:
        jobs = [f"job {job_id}" for lease in snapshot.leases if (job_id := job_of(lease.holder)) is not None]
        embedded_in = ", ".join(jobs) or f"process {pool.owner['pid']}"

    def nodes_in(*states: NodeState) -> tuple[NodeStatus, ...]:
        return tuple(sorted((node for node in nodes if node.state in states), key=lambda node: not node.is_head))

    return _from_row(
        PoolStatus,
        pool,
        uri=spec.uri if spec else f"{pool.spec['backend']}://{pool.name}",
        state=pool.state.value,
        is_here=is_here(pool),
        target=wanted(snapshot),
        active=nodes_in(NodeState.READY),
        pending=nodes_in(NodeState.PLANNED, NodeState.STARTING),
        failed=nodes_in(NodeState.FAILED),
        leaving=nodes_in(NodeState.DRAINING, NodeState.ENDING),
        leases=tuple(
            _from_row(LeaseStatus, lease, position=positions.get(lease.id), quota_note=quota_note(snapshot, lease))
            for lease in snapshot.leases
        ),
        last_operation=_operation_status(last) if last else None,
        reason=seen.silence or unrecorded(pool) or _reason(snapshot, now),
        leased=leased(snapshot),
        embedded_in=embedded_in,
        quotas=pool.quotas or {},
    )


def _from_row(kind: type[_Status], row: Base, /, **others: Any) -> _Status:
    """Build a status whose fields are `others` and, for all other fields, the row's columns of the same name."""
    columns = {field.name: getattr(row, field.name) for field in fields(kind) if field.name not in others}
    return kind(**columns, **others)


def head_endpoint(snapshot: Snapshot, *, may_be_silent: bool = False) -> Endpoint:
    """Return the address at which a pool's head accepts jobs.

    Args:
        snapshot: The pool.
        may_be_silent: Whether a head that does not answer now counts as ready, because it may be paused.

    Raises:
        PoolDownError: The pool has no ready head.
    """
    seen = check_nodes(snapshot)
    checked = replace(seen, silence=None) if may_be_silent else seen
    for node in snapshot.nodes:
        if node.is_head and _current_state(node, checked) is NodeState.READY and node.endpoint:
            spec = PoolSpec.model_validate(snapshot.pool.spec)
            return backend_of(spec).endpoint(spec, node.endpoint)
    name = snapshot.pool.name
    raise PoolDownError(
        f'the head of pool "{name}" is not ready: {seen.silence or f"`shoal pool describe {name}` shows the reason"}'
    )


def check_nodes(snapshot: Snapshot) -> Seen:
    """Check which nodes of a pool were lost after their rows were last written, and which requested nodes have joined
    the Ray cluster.

    If the pool is bound to another host, its nodes cannot be checked, and the result is empty. It is also empty if the
    pool goes down, because its nodes are not lost then.
    """
    if not snapshot.nodes or snapshot.pool.state is not PoolState.UP or not is_here(snapshot.pool):
        return Seen()
    spec = PoolSpec.model_validate(snapshot.pool.spec)
    return backend_of(spec).look(spec, [NodeRef.of(node) for node in snapshot.nodes])


def _current_state(node: Node, seen: Seen) -> NodeState:
    """Return the node state from the database, or FAILED if the node should run but is lost.

    A node is lost if `Backend.look` did not find it, or if its Ray cluster does not answer (`Seen.silence`).
    """
    live = node.state in (NodeState.STARTING, NodeState.READY, NodeState.DRAINING)
    return NodeState.FAILED if live and (seen.silence or node.id in seen.lost) else NodeState(node.state)


def _operation_status(row: Operation) -> OperationStatus:
    return _from_row(OperationStatus, row, kind=row.kind.value, state=row.state.value)


def _reason(snapshot: Snapshot, now: float) -> str | None:
    pool, last = snapshot.pool, snapshot.operations[-1] if snapshot.operations else None
    unconfirmed: str | None = (pool.decision or {}).get("unconfirmed")
    if pool.state is not PoolState.UP:
        return unconfirmed
    short = len(snapshot.nodes) < wanted(snapshot)
    if short and pool.cooldown_until and pool.cooldown_until > now:
        return (
            f"{pool.start_failures} nodes in a row failed, the next try is in {pool.cooldown_until - now:.0f} s "
            f"(`scale_cluster` and leases try at once); the last failure: {pool.last_failure}"
        )
    if last and last.state is OperationState.ROLLED_BACK:
        node_errors = "; ".join(f"{name}: {error}" for name, error in last.node_errors.items())
        return f"the last operation was rolled back: {last.error}" + (f"; {node_errors}" if node_errors else "")
    if stuck := next((node for node in snapshot.nodes if node.state is NodeState.PLANNED and node.error), None):
        return f"{stuck.name} is not ready: {stuck.error}"
    if waiting := queue(snapshot):
        return f"leases that wait for nodes: {len(waiting)}; {leased(snapshot)} of {pool.max_nodes} nodes are taken"
    return unconfirmed
