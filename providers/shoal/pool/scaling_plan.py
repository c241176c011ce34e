"""Decide which nodes of a pool to start, drain (give no new work) and end, which operations have succeeded or failed,
and in which order waiting leases are granted.

All functions are pure: they do no I/O and read no clock, so tests can check them with made-up rows and times. To drain
a node means to give it no new work, and to end it when it is idle or its grace period has passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import REPLACE_COOLDOWN, REPLACE_COOLDOWN_MOST, SIZE_PERIOD, SPAWN_GRACE, START_TIMEOUT
from shoal.state.schema import Demand, Lease, Node, NodeState, Operation, OperationKind, OperationState, Pool, PoolState


def leased(snapshot: Snapshot) -> int:
    """Return how many nodes the granted leases take."""
    return taken_by(_granted(snapshot))


def taken_by(leases: Iterable[Lease]) -> int:
    """Return how many nodes the given leases take together: the size of the largest shared lease (shared leases use the
    same nodes) plus the sizes of all exclusive leases."""
    leases = list(leases)
    shared = max((lease.size for lease in leases if not lease.exclusive), default=0)
    return shared + sum(lease.size for lease in leases if lease.exclusive)


def kept_for(leases: Iterable[Lease], least: int, is_own: Callable[[Lease], bool]) -> int | None:
    """Return how many nodes a job can count on when the leases of others end.

    Args:
        leases: All leases of the pool.
        least: Number of nodes that the pool has without a lease: MIN_NODES or the base demand.
        is_own: Function that says whether a lease lasts at least as long as the job.

    Returns:
        Number of nodes; None if the job has no granted lease, or no other has one: the job may then use all nodes.
    """
    granted = [lease for lease in leases if not lease.waiting]
    own = [lease for lease in granted if is_own(lease)]
    return None if len(own) in (0, len(granted)) else max(least, taken_by(own))


def queue(snapshot: Snapshot) -> list[Lease]:
    """Return the leases that wait for nodes, in the order in which they will be granted.

    A lease inside the block of a granted lease comes first. Otherwise it could wait behind a lease that waits for the
    nodes of this block, and neither would ever be granted.
    """
    granted = {lease.holder for lease in _granted(snapshot)}

    def place(lease: Lease) -> tuple[bool, int]:
        is_inside = any(is_near and holder in granted for holder, is_near in (lease.ancestors or {}).items())
        return not is_inside, lease.queue_number

    return sorted((lease for lease in snapshot.leases if lease.waiting), key=place)


def grantable(snapshot: Snapshot) -> list[Lease]:
    """Return the waiting leases that can be granted now, because they fit into MAX_NODES together with the granted
    leases.

    The first lease that does not fit holds back all leases behind it. Otherwise small leases could overtake a large one
    again and again, and the large one would never be granted. A lease that would exceed the quota of its team holds
    back only the leases of this team.
    """
    if snapshot.pool.state is not PoolState.UP:
        return []
    granted = _granted(snapshot)
    fitting: list[Lease] = []
    held_back: set[str | None] = set()
    for lease in queue(snapshot):
        if lease.team in held_back or _exceeds_quota(snapshot, [*granted, lease], lease.team):
            held_back.add(lease.team)
            continue
        granted.append(lease)
        if taken_by(granted) > snapshot.pool.max_nodes:
            break
        fitting.append(lease)
    return fitting


def quota_of(snapshot: Snapshot, team: str | None) -> int | None:
    """Return the largest number of nodes that the leases of a team may take together; None if there is no limit."""
    limits = (snapshot.pool.quotas or {}).get(team or "")
    return limits["max_nodes"] if limits else None


def quota_note(snapshot: Snapshot, lease: Lease) -> str | None:
    """Return a text that says that a lease waits because of its team's quota; None if the quota does not hold the lease
    back."""
    granted = _granted(snapshot)
    if not lease.waiting or not _exceeds_quota(snapshot, [*granted, lease], lease.team):
        return None
    taken = _taken_by_team(granted, lease.team)
    return f'waiting for the quota of team "{lease.team}", {taken} of {quota_of(snapshot, lease.team)} nodes are taken'


def _exceeds_quota(snapshot: Snapshot, leases: Iterable[Lease], team: str | None) -> bool:
    most = quota_of(snapshot, team)
    return most is not None and _taken_by_team(leases, team) > most


def _taken_by_team(leases: Iterable[Lease], team: str | None) -> int:
    return taken_by(lease for lease in leases if lease.team == team)


def may_resize(snapshot: Snapshot, lease: Lease, size: int) -> bool:
    """Return whether the size of a granted lease may be changed to `size` now.

    The change is allowed if, after the change, all leases together take no more nodes than before. It is also allowed
    if all leases fit into MAX_NODES and no lease waits. A larger size must also fit into the quota of the lease's team.
    """
    resized = Lease(size=size, exclusive=lease.exclusive, team=lease.team)
    after = [*(one for one in _granted(snapshot) if one.id != lease.id), resized]
    if size > lease.size and _exceeds_quota(snapshot, after, lease.team):
        return False
    total = taken_by(after)
    return total <= leased(snapshot) or (total <= snapshot.pool.max_nodes and not queue(snapshot))


def nodes_for(snapshot: Snapshot, lease: Lease | None, nodes: int) -> int:
    """Return how many of a pool's nodes a lease may use. `nodes` is the number of nodes in the pool.

    The nodes that belong to earlier leases are subtracted. A waiting lease may use no node. Without a lease (None), all
    nodes count.
    """
    if lease is None:
        return nodes
    return 0 if lease.waiting else max(0, nodes - nodes_before(snapshot, lease))


def nodes_before(snapshot: Snapshot, lease: Lease) -> int:
    """Return how many nodes a lease cannot use, because leases that were requested earlier take them.

    A shared lease loses only the nodes of earlier exclusive leases. An exclusive lease loses the nodes of all earlier
    leases.
    """
    earlier = [one for one in _granted(snapshot) if one.queue_number < lease.queue_number]
    return taken_by(one for one in earlier if one.exclusive or lease.exclusive)


def queue_note(ahead: int, taken: int, max_nodes: int) -> str:
    """Return a text about a waiting lease's place in the queue."""
    place = f"for {ahead} lease{'s' * (ahead > 1)} ahead" if ahead else "as the next in the queue"
    return f"waiting {place}, {taken} of {max_nodes} nodes are taken"


def _granted(snapshot: Snapshot) -> list[Lease]:
    return [lease for lease in snapshot.leases if not lease.waiting]


@dataclass(frozen=True)
class Snapshot:
    """The database rows of a pool at one instant.

    An expired lease still counts until `journal.advance` deletes the lease's row.
    """

    pool: Pool
    demand: Demand | None
    leases: tuple[Lease, ...]
    operations: tuple[Operation, ...]
    nodes: tuple[Node, ...]
    works: bool = False
    """Whether a job is running on the pool or waiting for it."""
    lasting: frozenset[str] = frozenset()
    """Ids of the leases that belong to a job (see `shoal.pool.holder.job_holder`) and do not expire, because the job
    has not ended, or its driver still cleans up."""


MAX_START_FAILURES = 3
"""Number of failed node starts after which an operation is rolled back, even before its deadline. Two failures may be a
coincidence. After three failures the cause is probably permanent, so further starts would fail, too."""

_COMING = frozenset({NodeState.PLANNED, NodeState.STARTING})
_GOING = frozenset({NodeState.DRAINING, NodeState.FAILED, NodeState.ENDING})


@dataclass(frozen=True)
class Verdict:
    """A decision to end one operation (a request to change the pool's size), with the operation's final state and the
    reason for the user."""

    operation_id: str
    state: OperationState
    reason: str | None = None
    settle_at: int | None = None
    """New base demand if the operation reached its minimum size but not its full size. None otherwise."""


@dataclass(frozen=True)
class NodePlan:
    """The nodes to start, drain (give no new work) and end, so that a pool has the number of nodes that it should
    have."""

    start_head: bool = False
    start_workers: int = 0
    drain: tuple[str, ...] = ()
    end: tuple[tuple[str, str], ...] = ()
    """Pairs of node id and reason."""


def wanted(snapshot: Snapshot) -> int:
    """Return how many nodes, including the head, the pool should have.

    The result is the base demand (the size that `up` or `scale` has set) or the number of nodes of the granted leases,
    whichever is larger, limited to MIN_NODES and MAX_NODES. It is 0 for a pool that is not up, and for a pool that has
    no base demand, no lease and no job. A pool without a base demand was started by a lease, so it goes down after its
    last lease and job.
    """
    pool, demand = snapshot.pool, snapshot.demand
    if pool.state is not PoolState.UP or not (demand or snapshot.leases or snapshot.works):
        return 0
    return min(max(pool.min_nodes, demand.size if demand else 0, leased(snapshot), 1), pool.max_nodes)


def cause_of_starts(snapshot: Snapshot) -> Operation | None:
    """Return the unfinished operation (request to change the pool's size) for which nodes are started now, or None if
    there is no such operation.

    Operations whose lease waits in the queue are ignored. Among the others, this is the operation that needs the most
    nodes.
    """

    def needed(operation: Operation) -> int:
        lease = lease_of(snapshot, operation)
        return operation.size + (nodes_before(snapshot, lease) if lease else 0)

    return max(_unfinished_operations(snapshot), key=needed, default=None)


def judge(snapshot: Snapshot, now: float) -> list[Verdict]:
    """Decide which unfinished operations have succeeded, failed or been superseded (replaced by a newer request).

    Operations that are not in the result stay unfinished.
    """
    return [verdict for operation in snapshot.operations if (verdict := _judge_one(snapshot, operation, now))]


def _judge_one(snapshot: Snapshot, operation: Operation, now: float) -> Verdict | None:
    pool, demand = snapshot.pool, snapshot.demand
    if operation.state is not OperationState.OPEN:
        return None
    if pool.state is not PoolState.UP:
        return Verdict(operation.id, OperationState.SUPERSEDED, f'pool "{pool.name}" went down')
    lease = lease_of(snapshot, operation)
    if operation.kind is OperationKind.LEASE and lease is None:
        return Verdict(operation.id, OperationState.SUPERSEDED, "its lease was released or has expired")
    ready = nodes_for(snapshot, lease, sum(node.state is NodeState.READY for node in snapshot.nodes))
    owns_demand = demand is not None and demand.operation_id == operation.id
    target = wanted(snapshot)
    surplus = len(snapshot.nodes) > target or is_unconfirmed(snapshot)
    if ready >= operation.size and not (owns_demand and surplus):
        return Verdict(operation.id, OperationState.SUCCEEDED)
    replaced = operation.kind is not OperationKind.LEASE and not owns_demand
    if replaced and demand is not None and demand.size < operation.size:
        return Verdict(operation.id, OperationState.SUPERSEDED, f"a newer operation set the demand to {demand.size}")
    late = now >= operation.deadline
    if not late and operation.failures < MAX_START_FAILURES:
        return None
    if not late:
        reason = f"{operation.failures} nodes failed to start"
    elif lease and lease.waiting:
        note = quota_note(snapshot, lease) or queue_note(queue(snapshot).index(lease), leased(snapshot), pool.max_nodes)
        waited = f"rollback_after_seconds={operation.deadline - operation.created_at:g}"
        reason = f"at the deadline the lease was still {note}: raise {waited}, or let fewer runs wait at a time"
    else:
        reason = f"{ready} of {operation.size} nodes were ready at the deadline"
    if operation.block_until_min_cluster_size is not None and ready >= operation.block_until_min_cluster_size:
        return Verdict(operation.id, OperationState.SUCCEEDED, reason, settle_at=ready)
    return Verdict(operation.id, OperationState.ROLLED_BACK, reason)


def plan_nodes(snapshot: Snapshot, now: float) -> NodePlan:
    """Return which nodes to start, drain and end, so that the pool has the number of nodes that it should have."""
    pool = snapshot.pool
    target = wanted(snapshot)
    head = next((node for node in snapshot.nodes if node.is_head and node.state not in _GOING), None)
    end: dict[str, str] = {}
    keep: list[Node] = []
    for node in snapshot.nodes:
        reason = _why_end(node, pool, head, target, now)
        if reason:
            end[node.id] = reason
        elif node.state not in _GOING:
            keep.append(node)
    leaving = [node for node in keep if node.leaving_at is not None]
    staying = [node for node in keep if node.leaving_at is None]
    # A leaving node (one whose end was announced) is ended when enough other nodes are ready, at the latest at the
    # announced time.
    replaced = sum(node.state is NodeState.READY for node in staying) >= target
    gone = [node for node in leaving if replaced or now >= (node.leaving_at or 0.0)]
    drain: list[str] = []
    for node in [*_removal_order(staying)[: max(0, len(staying) - target)], *gone]:
        if node.state is NodeState.READY and node.busy and now < (node.leaving_at or math.inf):
            drain.append(node.id)
        else:
            end[node.id] = f"the demand is {target}" if node.leaving_at is None else "the end of the node was announced"
    going = set(end) | set(drain)
    have = [node for node in staying if node.id not in going]
    leaving = [node for node in leaving if node.id not in going]
    may_start = not (pool.cooldown_until and pool.cooldown_until > now) or bool(_unfinished_operations(snapshot))
    draining = [node for node in snapshot.nodes if node.state is NodeState.DRAINING and node.id not in end]
    # The replacement of a leaving node starts before this node ends. If the pool already has MAX_NODES nodes, there is
    # no room for both, and the replacement starts after this node has ended.
    room = pool.max_nodes - len(have) - len(leaving) - len(draining)
    missing = min(target - len(have), room) if may_start else 0
    # While an old head is being ended, its files and its row still exist. So a new head is started only after the old
    # head's row is deleted.
    head_gone = not any(node.is_head for node in snapshot.nodes)
    head_ready = head is not None and head.id not in going and head.state is NodeState.READY
    return NodePlan(
        start_head=missing > 0 and head_gone,
        start_workers=max(0, missing) if head_ready else 0,
        drain=tuple(drain),
        end=tuple(end.items()),
    )


def is_unconfirmed(snapshot: Snapshot) -> bool:
    """Return whether the pool's backend has not confirmed yet that the pool has no more than its present size."""
    decision = snapshot.pool.decision
    return decision is not None and (bool(decision.get("unconfirmed")) or decision["size"] > wanted(snapshot))


def idle_timeout(pool: Pool) -> float | None:
    """Return the number of seconds without use after which a pool goes down, or None if an unused pool stays up."""
    return PoolSpec.model_validate(pool.spec).idle_timeout


def in_use(snapshot: Snapshot) -> bool:
    """Return whether the pool has a lease, a job, or a busy node. The idle timeout does not apply to such a pool."""
    return bool(snapshot.leases) or snapshot.works or any(node.busy for node in snapshot.nodes)


def why_down(snapshot: Snapshot, now: float) -> str | None:
    """Return the reason why a pool that is up has to go down, or None if the pool may stay up."""
    pool = snapshot.pool
    if pool.state is not PoolState.UP:
        return None
    if wanted(snapshot) == 0:
        return "its last lease ended and it has no base demand"
    timeout = idle_timeout(pool)
    if timeout is not None and now - pool.touched_at > timeout and not in_use(snapshot):
        return f"it was idle for {timeout:.0f} s (idle_timeout)"
    return None


def should_touch(snapshot: Snapshot, now: float) -> bool:
    """Return whether to update `touched_at` (the time of last use) in the pool's row, because the pool is in use and
    the stored time is older than a tenth of the idle timeout.

    Each update costs a write transaction, so the result is True at most ten times per idle timeout.
    """
    timeout = idle_timeout(snapshot.pool)
    return timeout is not None and in_use(snapshot) and now - snapshot.pool.touched_at > timeout / 10


def should_note_size(pool: Pool, now: float) -> bool:
    """Return whether to record that the nodes of a pool were checked (`Pool.seen_at`), because the last record is older
    than SIZE_PERIOD, or the clock has been set back."""
    return pool.state is not PoolState.DOWN and not 0 <= now - (pool.seen_at or 0.0) <= SIZE_PERIOD


def should_forgive(snapshot: Snapshot, now: float) -> bool:
    """Return whether to set the pool's count of failed nodes to 0, because all wanted nodes are ready now, and were
    planned at least START_TIMEOUT seconds ago: nodes can evidently start and keep running."""
    old = [node for node in snapshot.nodes if node.state is NodeState.READY and now - node.created_at >= START_TIMEOUT]
    return bool(snapshot.pool.start_failures or snapshot.pool.last_failure) and len(old) >= wanted(snapshot)


def unclaimed(nodes: Sequence[Node], now: float) -> list[Node]:
    """Return the planned nodes for which a supervisor process must be spawned.

    For such a node no supervisor was spawned yet, or the spawned supervisor did not write itself to the node's row
    within SPAWN_GRACE seconds.
    """
    return [
        node
        for node in nodes
        if node.state is NodeState.PLANNED and (node.spawned_at is None or now - node.spawned_at > SPAWN_GRACE)
    ]


def is_due(snapshot: Snapshot, now: float) -> bool:
    """Return whether anything in the pool has to change now, such as a node that has to be started. If nothing has to
    change, reconciling the pool needs no write transaction.

    Changes are: an operation ends, a lease is granted, a node is started, drained, ended or removed, the pool goes
    down, or a count or time in the pool's row is updated.
    """
    pool = snapshot.pool
    return (
        bool(judge(snapshot, now))
        or bool(grantable(snapshot))
        or why_down(snapshot, now) is not None
        or should_touch(snapshot, now)
        or should_forgive(snapshot, now)
        or plan_nodes(snapshot, now) != NodePlan()
        or bool(unclaimed(snapshot.nodes, now))
        or any(node.state is NodeState.ENDING for node in snapshot.nodes)
        or is_unconfirmed(snapshot)
        or (pool.state is PoolState.STOPPING and not snapshot.nodes)
        or pool.state is PoolState.DOWN
    )


def cooldown(failures: int) -> float:
    """Return how many seconds the pool waits before it replaces failed nodes: 0 after the first failure,
    REPLACE_COOLDOWN after the second consecutive failure, and twice as long after each further failure, up to
    REPLACE_COOLDOWN_MOST."""
    # The exponent is limited to 30, because an exponent of some thousands would overflow the float. A cooldown after 30
    # doublings is already longer than REPLACE_COOLDOWN_MOST.
    doublings = min(failures - 2, 30)
    return 0.0 if failures < 2 else min(REPLACE_COOLDOWN * 2.0**doublings, REPLACE_COOLDOWN_MOST)


def lease_of(snapshot: Snapshot, operation: Operation) -> Lease | None:
    """Return the lease that an operation asks for; None if it asks for none, or the lease has ended."""
    return next((lease for lease in snapshot.leases if lease.id == operation.lease_id), None)


def _unfinished_operations(snapshot: Snapshot) -> list[Operation]:
    """Return the unfinished operations (requests to change the pool's size), except those whose lease waits in the
    queue."""
    waiting = {lease.id for lease in queue(snapshot)}
    return [row for row in snapshot.operations if row.state is OperationState.OPEN and row.lease_id not in waiting]


def _why_end(node: Node, pool: Pool, head: Node | None, target: int, now: float) -> str | None:
    """Return the reason why a node has to end even if the pool does not have too many nodes. Return None if there is no
    such reason."""
    if node.state is NodeState.ENDING:
        return None
    if node.state is NodeState.FAILED:
        return node.error or "the node failed"
    if node.epoch != pool.epoch:
        return "the node was started before the pool last went down"
    if target == 0:
        return f'pool "{pool.name}" goes down'
    if not node.is_head and (head is None or node.head_id != head.id):
        return "the node's head is gone"
    if node.state in _COMING and now >= node.start_deadline:
        why = f": {node.error}" if node.error else ""
        return f"the node was not ready at its start deadline{why}"
    if node.state is NodeState.DRAINING and (not node.busy or now >= (node.drain_deadline or 0.0)):
        return "the node is drained"
    return None


def _removal_order(nodes: list[Node]) -> list[Node]:
    """Return the worker nodes (all nodes except the head) in the order in which a shrinking pool ends them.

    Nodes that are not yet ready come first, then idle nodes, then busy nodes. Within each group the youngest node comes
    first.
    """

    def rank(node: Node) -> tuple[int, float, str]:
        stage = 0 if node.state in _COMING else 2 if node.busy else 1
        return stage, -node.created_at, node.id

    return sorted((node for node in nodes if not node.is_head), key=rank)
