"""Update a pool's rows: delete expired leases, end operations (an operation that is rolled back restores the size that
the pool or the lease had before), grant waiting leases, and record which nodes to start and end.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from shoal import history
from shoal.pool import scaling_plan
from shoal.pool.backends import backend_of
from shoal.pool.backends.interface import Arrival, NodeRef, Seen, Waiting, pool_id
from shoal.pool.bound_host import is_bound_here
from shoal.pool.holder import Notice
from shoal.pool.journal import rows, sizes, usage
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import DRAIN_GRACE, START_TIMEOUT
from shoal.state import stamps
from shoal.state.schema import Lease, Node, NodeState, Operation, OperationKind, OperationState, PoolState


def withdraw(session: Session, operation_id: str, reason: str, now: float) -> bool:
    """Roll back an operation (a request to change a pool's size), because its caller no longer waits for it. Return
    False if the operation has already ended or does not exist."""
    operation = session.get(Operation, operation_id)
    if operation is None or operation.state is not OperationState.OPEN:
        return False
    snapshot = rows.load(session, operation.pool)
    end_operation(session, snapshot, scaling_plan.Verdict(operation_id, OperationState.ROLLED_BACK, reason), now)
    usage.follow_leases(session, operation.pool, now)
    sizes.note(session, operation.pool, now)
    return True


def end_operation(session: Session, snapshot: scaling_plan.Snapshot, verdict: scaling_plan.Verdict, now: float) -> str:
    """Record how an operation ended, and update the pool's leases and its base demand (the size that `up` or `scale`
    has set) accordingly. Return a sentence for the log."""
    operation = next(row for row in snapshot.operations if row.id == verdict.operation_id)
    operation.state, operation.error, operation.ended_at = verdict.state, verdict.reason, now
    if now >= operation.deadline:
        late = [node for node in snapshot.nodes if node.operation_id == operation.id and not node.was_ready]
        why = {node.name: node.error or f"{node.state.value} still at the deadline" for node in late}
        operation.node_errors = operation.node_errors | why
    _apply(session, snapshot, operation, verdict, now)
    outcome = verdict.state.value.replace("_", " ")
    history.record_end(session, operation.id, f"{outcome}: {verdict.reason}" if verdict.reason else outcome, at=now)
    ended = f"{operation.kind.value} to {operation.size} of {operation.holder}: {outcome}"
    return Notice(f"{ended}, {verdict.reason}" if verdict.reason else ended, operation.holder)


def _apply(
    session: Session, snapshot: scaling_plan.Snapshot, operation: Operation, verdict: scaling_plan.Verdict, now: float
) -> None:
    """Update the pool's base demand (the size that `up` or `scale` has set) and its leases after an operation has
    ended."""
    demand = snapshot.demand
    if verdict.settle_at is not None and demand and demand.operation_id == operation.id:
        demand.size, demand.set_at = verdict.settle_at, now
    lease = session.get(Lease, operation.lease_id) if operation.lease_id else None
    if verdict.settle_at is not None and lease:
        lease.size = verdict.settle_at
    if verdict.state is not OperationState.ROLLED_BACK:
        return
    if operation.kind is OperationKind.LEASE:
        if lease:
            _take_back(session, snapshot, operation, lease)
        return
    # A later operation may have replaced the size that `operation` had set. If that later operation is rolled back, it
    # must not restore this size, because `operation` was rolled back, too. It must restore the size from before
    # `operation`.
    for later in snapshot.operations:
        if later.replaced_operation_id == operation.id:
            later.replaced_size = operation.replaced_size
            later.replaced_operation_id = operation.replaced_operation_id
    if demand is None or demand.operation_id != operation.id:
        return
    if operation.replaced_size is None:
        # Before the operation, the pool had no base demand (size set by `up` or `scale`). So the base demand that the
        # operation created is deleted. The pool then goes down, unless a lease keeps it up.
        session.delete(demand)
    else:
        demand.size, demand.operation_id, demand.set_at = operation.replaced_size, operation.replaced_operation_id, now


def _take_back(session: Session, snapshot: scaling_plan.Snapshot, operation: Operation, lease: Lease) -> None:
    """Restore the size that a lease had before an operation. Delete the lease if the operation created it.

    A larger size is restored only if its nodes were not granted to another lease in the meantime.
    """
    later = next(
        (
            row
            for row in snapshot.operations
            if row.lease_id == lease.id
            and row.created_at > operation.created_at
            and row.state in (OperationState.OPEN, OperationState.SUCCEEDED)
        ),
        None,
    )
    # If a later operation has changed the lease, the lease keeps its present size. If that later operation is rolled
    # back, it must not restore the size that `operation` had set, because `operation` was rolled back, too. It must
    # restore the size from before `operation`.
    if later is not None:
        later.replaced_size = operation.replaced_size
    elif operation.replaced_size is None:
        session.delete(lease)
    elif scaling_plan.may_resize(snapshot, lease, operation.replaced_size):
        lease.size = operation.replaced_size
    else:
        operation.replaced_size = lease.size


def record_seen(snapshot: scaling_plan.Snapshot, looked_at: Sequence[NodeRef], seen: Seen) -> None:
    """Write the result of a check of a pool's nodes to the rows of these nodes.

    A lost node gets the state failed, a requested node that has joined the Ray cluster gets the state ready, and one
    that waits gets the reason. Nodes whose rows have changed since the check are skipped.
    """
    for node, seen_as in list(_changed_nodes(snapshot, looked_at, seen)):
        if isinstance(seen_as, str):
            node.state, node.error = NodeState.FAILED, seen_as
        elif isinstance(seen_as, Waiting):
            node.error, node.endpoint = seen_as.reason, dict(seen_as.endpoint) if seen_as.endpoint else None
        else:
            node.state, node.endpoint, node.error = NodeState.READY, dict(seen_as.endpoint), None
            node.cpus, node.gpus = seen_as.cpus, seen_as.gpus


def is_due(
    snapshot: scaling_plan.Snapshot, looked_at: Sequence[NodeRef], seen: Seen, now: float, *, shared_now: float
) -> bool:
    """Return whether anything in the pool has to change now, for example because a node has to be started or a lease
    has expired."""
    return (
        not is_bound_here(snapshot.pool)
        or rows.clock_has_jumped(snapshot.pool)
        or any(_has_expired(snapshot, lease, shared_now) for lease in snapshot.leases)
        or any(_changed_nodes(snapshot, looked_at, seen))
        or (seen.silence is None and scaling_plan.should_note_size(snapshot.pool, shared_now))
        or scaling_plan.is_due(snapshot, now)
    )


def _changed_nodes(
    snapshot: scaling_plan.Snapshot, looked_at: Sequence[NodeRef], seen: Seen
) -> Iterator[tuple[Node, str | Arrival | Waiting]]:
    """Yield each node that has changed since its row was written, together with the change. For a lost node, the change
    is the reason for the loss. For a requested node that has joined the Ray cluster, it is the data of the Ray node."""
    refs = {ref.id: ref for ref in looked_at}
    taken = {key: node.id for node in snapshot.nodes for key in _identities(node.endpoint)}
    identity = pool_id(snapshot.pool)
    for node in snapshot.nodes:
        if NodeRef.of(node) != refs.get(node.id):
            continue
        reason, arrival = seen.lost.get(node.id), seen.arrived.get(node.id) or seen.waiting.get(node.id)
        if reason and node.state not in (NodeState.FAILED, NodeState.ENDING):
            yield node, reason
        # Two processes that check the cluster at the same time may assign the same new Ray node or pod to different
        # rows of the pool's nodes. Only the row that is written first gets the Ray node.
        elif arrival and node.state is NodeState.PLANNED:
            keys = _identities(arrival.endpoint)
            if (arrival.endpoint or {}).get("claimed_by", identity) != identity:
                continue
            is_news = isinstance(arrival, Arrival) or (arrival.reason, arrival.endpoint) != (node.error, node.endpoint)
            if is_news and all(taken.get(key, node.id) == node.id for key in keys):
                taken |= dict.fromkeys(keys, node.id)
                yield node, arrival


def _identities(endpoint: Mapping[str, str] | None) -> list[tuple[str, str]]:
    """Return the parts of a node's endpoint that no other node of the pool has."""
    return [(key, value) for key in ("ray_node_id", "pod_uid") if (value := (endpoint or {}).get(key))]


@dataclass(frozen=True)
class Intents:
    """Result of `advance`: the nodes that have to be started and ended next, and the decisions that were written to the
    rows."""

    start: list[NodeRef]
    end: list[NodeRef]
    decided: list[str]
    """Sentences for the log: one for each operation that ended and each lease that expired, was ended or was granted,
    and one if the pool goes down."""
    size: int
    """Number of nodes that the pool should have from now on."""
    held: frozenset[str]
    """Pods of the nodes that stay (see `PoolRef.held`)."""
    is_unconfirmed: bool
    """Whether the backend has to confirm the size, although no node may have to be ended."""


def advance(session: Session, snapshot: scaling_plan.Snapshot, now: float) -> Intents:
    """Update a pool's rows, and record in them which nodes to start and end.

    Leases that have expired or are over their limits are deleted, operations that are complete or past their deadline
    are ended, and waiting leases are granted if they fit.
    """
    shared_now = stamps.shared_now(session, now)
    expired = [lease for lease in snapshot.leases if _has_expired(snapshot, lease, shared_now)]
    for lease in expired:
        usage.end_expired(session, lease, now)
        session.delete(lease)
    if expired:
        snapshot = rows.load(session, snapshot.pool.name)
    if spent := usage.end_spent_leases(session, snapshot, now):
        snapshot = rows.load(session, snapshot.pool.name)
    if ended := [end_operation(session, snapshot, verdict, now) for verdict in scaling_plan.judge(snapshot, now)]:
        snapshot = rows.load(session, snapshot.pool.name)
    granted = scaling_plan.grantable(snapshot)
    for lease in granted:
        lease.waiting = False
    session.flush()
    lost = [Notice(f"the lease of {lease.holder} expired", lease.holder) for lease in expired]
    notices = [
        Notice(f"the lease of {lease.holder} was granted, {lease.size} nodes", lease.holder) for lease in granted
    ]
    if why := scaling_plan.why_down(snapshot, now):
        rows.stop(session, snapshot.pool, now)
        snapshot = rows.load(session, snapshot.pool.name)
        notices.append(Notice(f"the pool goes down because {why}"))
    elif scaling_plan.should_touch(snapshot, now):
        snapshot.pool.touched_at = now
    if scaling_plan.should_forgive(snapshot, now):
        snapshot.pool.start_failures, snapshot.pool.last_failure = 0, None
    # The following code deletes no rows, and changes the snapshot's rows in place, so the snapshot stays up to date.
    _end_and_drain(session, snapshot, now)
    nodes = [*snapshot.nodes, *_add_missing_nodes(session, snapshot, now)]
    pool = snapshot.pool
    decision = pool.decision = _decide(snapshot, nodes)
    is_unconfirmed = bool(decision["unconfirmed"])
    if pool.state is PoolState.STOPPING and not nodes and not is_unconfirmed:
        pool.state = PoolState.DOWN
    usage.follow_leases(session, pool.name, now)
    ending = [NodeRef.of(node) for node in nodes if node.state is NodeState.ENDING]
    staying = [node.endpoint or {} for node in nodes if node.state is not NodeState.ENDING]
    held = frozenset(endpoint["pod_uid"] for endpoint in staying if "pod_uid" in endpoint)
    starting = scaling_plan.unclaimed(nodes, now)
    for node in starting:
        node.spawned_at = now
    start = [NodeRef.of(node) for node in starting]
    return Intents(start, ending, [*lost, *spent, *ended, *notices], decision["size"], held, is_unconfirmed)


def _decide(snapshot: scaling_plan.Snapshot, nodes: Sequence[Node]) -> dict[str, Any]:
    """Return the decision about the pool's size (see `Pool.decision`)."""
    before = snapshot.pool.decision or {"number": 0, "size": 0}
    size = scaling_plan.wanted(snapshot)
    unconfirmed = before.get("unconfirmed")
    if size < before["size"]:
        unconfirmed = unconfirmed or "the smaller size has not been sent yet"
    is_new = size != before["size"] or snapshot.pool.decision is None
    found = (node.endpoint["found"] for node in nodes if node.endpoint and node.endpoint.get("found"))
    return {
        "number": before["number"] + is_new,
        "size": size,
        "unconfirmed": unconfirmed,
        "found": before.get("found") or next(found, None),
    }


def _end_and_drain(session: Session, snapshot: scaling_plan.Snapshot, now: float) -> None:
    """Change the state of nodes that have to end: `DRAINING` if the node may finish its work first, else `ENDING`."""
    difference = scaling_plan.plan_nodes(snapshot, now)
    by_id = {node.id: node for node in snapshot.nodes}
    for node_id, reason in difference.end:
        _intend_end(session, snapshot, by_id[node_id], reason, now)
    for node_id in difference.drain:
        node = by_id[node_id]
        # A node whose end was announced may finish its work until the announced time. The pool does not need this
        # node any more, because the node's replacement is already ready.
        node.state, node.drain_deadline = NodeState.DRAINING, node.leaving_at or now + DRAIN_GRACE


def _add_missing_nodes(session: Session, snapshot: scaling_plan.Snapshot, now: float) -> list[Node]:
    """Add a row to the database for each missing node, and return the rows."""
    # Decide again which nodes to start. If nodes have failed since the last decision, the pool waits for a while (the
    # cooldown) before it replaces them.
    difference = scaling_plan.plan_nodes(snapshot, now)
    head = next((node for node in snapshot.nodes if node.is_head and node.state is NodeState.READY), None)
    count = 1 if difference.start_head else difference.start_workers
    return [_intend_start(session, snapshot, head, place, now) for place in range(1, count + 1)]


def _has_expired(snapshot: scaling_plan.Snapshot, lease: Lease, shared_now: float) -> bool:
    """Return whether a lease was not renewed within its time to live. The lease of an unfinished job does not expire.

    If a lease was renewed on this host since the last boot, its age is measured with the monotonic clock, which a
    suspend or a change of the wall clock does not affect. The lease of another host is compared with the clock of the
    database server, which all hosts share.
    """
    if lease.id in snapshot.lasting:
        return False
    unrenewed = stamps.silence(lease.expires_at, lease.renewed_clock)
    return lease.expires_at <= shared_now if unrenewed is None else unrenewed >= lease.ttl


def _intend_start(session: Session, snapshot: scaling_plan.Snapshot, head: Node | None, place: int, now: float) -> Node:
    """Add the row of a worker of the given head, or of a new head if there is none. `place` counts the nodes that start
    at the same time."""
    pool = snapshot.pool
    spec = PoolSpec.model_validate(pool.spec)
    cause = scaling_plan.cause_of_starts(snapshot)
    backend = backend_of(spec)
    deadline = now + backend.start_timeout + place * backend.start_timeout_per_node
    node = Node(
        id=uuid.uuid4().hex[:10],
        pool=pool.name,
        name=f"{pool.name}-{pool.next_node}",
        is_head=head is None,
        state=NodeState.PLANNED,
        epoch=pool.epoch,
        head_id=head.id if head else None,
        operation_id=cause.id if cause else None,
        cpus=spec.cpus_per_node,
        gpus=max(0, spec.gpus_per_node),  # -1 means all free GPUs: the node's supervisor writes their number later
        busy=False,
        start_deadline=min(deadline, cause.deadline) if cause else deadline,
        created_at=now,
    )
    session.add(node)
    pool.next_node += 1
    return node


def _intend_end(session: Session, snapshot: scaling_plan.Snapshot, node: Node, reason: str, now: float) -> None:
    never_ready = not node.was_ready
    failed = node.state is NodeState.FAILED or (never_ready and now >= node.start_deadline)
    cause = session.get(Operation, node.operation_id) if node.operation_id else None
    # If a node failed before it was ready, the failure counts for the operation for which the node was started. If that
    # operation has ended, the failure does not count at all.
    if failed and never_ready and cause is not None:
        if cause.state is OperationState.OPEN:
            cause.failures += 1
            cause.node_errors = cause.node_errors | {node.name: reason}
    elif failed and now - node.created_at < START_TIMEOUT:
        pool = snapshot.pool
        pool.start_failures += 1
        pool.last_failure = f"{node.name}: {reason}"
        pool.cooldown_until = now + scaling_plan.cooldown(pool.start_failures)
    node.state, node.error = NodeState.ENDING, reason
