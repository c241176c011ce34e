"""Reading and writing a pool's rows. Every function works inside the caller's transaction; none does anything else.

Two processes never act on half of what the other wrote: demand, operation and intents change together or not at all.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session, defer

from shoal.errors import PoolDownError, PoolElsewhereError, PoolNotFoundError
from shoal.pool import clock, plan
from shoal.pool.backends import BACKENDS, Arrival, NodeRef, Seen
from shoal.pool.holder import ANYWHERE, bind_here, is_bound_here, is_here
from shoal.pool.plan import (
    Snapshot,
    Verdict,
    cooldown,
    judge,
    plan_nodes,
    should_forgive,
    should_touch,
    unclaimed,
    wanted,
    why_down,
)
from shoal.pool.processes import ProcessId
from shoal.pool.spec import PoolSpec
from shoal.pool.tunables import DRAIN_GRACE, START_TIMEOUT
from shoal.state import stamps
from shoal.state.host import hostname
from shoal.state.schema import (
    JOB_ENDED,
    Demand,
    Job,
    Lease,
    Node,
    NodeState,
    Operation,
    OperationKind,
    OperationState,
    Pool,
    PoolState,
)

_UNFINISHED = Job.state.not_in(JOB_ENDED)


def pool_names(session: Session, *, embedded: bool = False) -> list[str]:
    """Names of all pools, in order; pools embedded in a process only if asked for."""
    rows = session.scalars(select(Pool).order_by(Pool.name))
    return [pool.name for pool in rows if embedded or pool.owner is None]


def unfinished_jobs(session: Session, pools: Collection[str]) -> list[Job]:
    """Load the jobs of some pools that have not ended, without their specs and results, which may be large."""
    query = select(Job).where(Job.pool.in_(pools), _UNFINISHED).options(defer(Job.spec), defer(Job.result))
    return list(session.scalars(query))


def load(session: Session, name: str, *, lock: bool = True) -> Snapshot:
    """All rows of a pool, by default locked until the transaction ends, with times that have followed the wall clock.

    Raises:
        PoolNotFoundError: There is no such pool.
    """
    pool = session.get(Pool, name, with_for_update=lock, populate_existing=True)
    if pool is None:
        raise PoolNotFoundError(name, pool_names(session))
    if lock:
        clock.follow(session, pool)
    return Snapshot(
        pool=pool,
        demand=session.get(Demand, name),
        leases=tuple(session.scalars(select(Lease).where(Lease.pool == name).order_by(Lease.created_at))),
        operations=tuple(
            session.scalars(select(Operation).where(Operation.pool == name).order_by(Operation.created_at))
        ),
        nodes=tuple(session.scalars(select(Node).where(Node.pool == name).order_by(Node.created_at))),
        works=any(map(_works, session.scalars(select(Job.driver).where(Job.pool == name, _UNFINISHED)))),
    )


def _works(driver: dict[str, Any] | None) -> bool:
    """Whether an unfinished job is really there: its driver may have died with nobody to say so in its row."""
    return driver is None or not ProcessId.from_json(driver).known_dead()


def require_here(pool: Pool) -> None:
    """Refuse to act on a pool that is bound to another machine.

    Raises:
        PoolElsewhereError: It is bound to another machine.
    """
    if not is_here(pool):
        here = "another of the same name" if pool.host == hostname() else hostname()
        raise PoolElsewhereError(
            f'pool "{pool.name}" is local to host {pool.host} and cannot be changed from {here}: call from there; '
            f"if that host never returns, `shoal pool delete {pool.name} --abandon` removes the pool",
            pool.host,
        )


def adopt(pool: Pool) -> None:
    """Complete the host's identity in a row of shoal 0.1, and its name after the host was renamed."""
    if pool.host != ANYWHERE:
        bind_here(pool)


def require_up(pool: Pool) -> None:
    """Refuse to go on with a pool that is not up.

    Raises:
        PoolDownError: It is not, or bound to another machine.
    """
    require_here(pool)
    if pool.state is not PoolState.UP:
        raise PoolDownError(f'pool "{pool.name}" is {pool.state.value}: `shoal pool up {pool.name}` starts it')


def withdraw(session: Session, operation_id: str, reason: str, now: float) -> bool:
    """Roll an operation back because its caller gave it up; False where it had ended, or was never written."""
    operation = session.get(Operation, operation_id)
    if operation is None or operation.state is not OperationState.OPEN:
        return False
    snapshot = load(session, operation.pool)
    _carry_out(session, snapshot, Verdict(operation_id, OperationState.ROLLED_BACK, reason), now)
    return True


def record_seen(session: Session, snapshot: Snapshot, looked_at: Sequence[NodeRef], seen: Seen) -> None:
    """Mark nodes failed that were seen dead, and ready that were seen to have come, unless their row has moved on."""
    for node, seen_as in list(_news(snapshot, looked_at, seen)):
        if isinstance(seen_as, str):
            node.state, node.error = NodeState.FAILED, seen_as
        else:
            node.state, node.endpoint = NodeState.READY, dict(seen_as.endpoint)
            node.cpus, node.gpus = seen_as.cpus, seen_as.gpus


def is_due(snapshot: Snapshot, looked_at: Sequence[NodeRef], seen: Seen, now: float, *, shared_now: float) -> bool:
    """Whether there is anything to write or to do; False means that reconciling would change nothing."""
    return (
        not is_bound_here(snapshot.pool)
        or clock.has_jumped(snapshot.pool)
        or any(_has_expired(lease, shared_now) for lease in snapshot.leases)
        or any(_news(snapshot, looked_at, seen))
        or plan.is_due(snapshot, now)
    )


def _news(snapshot: Snapshot, looked_at: Sequence[NodeRef], seen: Seen) -> Iterator[tuple[Node, str | Arrival]]:
    """Nodes of which more was seen than their rows say: why one is lost, or how it arrived."""
    refs = {ref.id: ref for ref in looked_at}
    taken = {node.endpoint["ray_node_id"] for node in snapshot.nodes if node.endpoint}
    for node in snapshot.nodes:
        if NodeRef.of(node) != refs.get(node.id):
            continue
        reason, arrival = seen.lost.get(node.id), seen.arrived.get(node.id)
        if reason and node.state not in (NodeState.FAILED, NodeState.ENDING):
            yield node, reason
        # Two that look at once may each see the same newcomer behind another row: it is the first one's.
        elif arrival and node.state is NodeState.PLANNED and arrival.endpoint["ray_node_id"] not in taken:
            taken.add(arrival.endpoint["ray_node_id"])
            yield node, arrival


@dataclass(frozen=True)
class Intents:
    """What a step forward leaves to be done, and what it has decided."""

    start: list[NodeRef]
    end: list[NodeRef]
    decided: list[str]
    """A sentence for each operation that ended, lease that expired, and for the pool going down."""
    size: int
    """How many nodes the pool is to have from here on."""


def advance(session: Session, snapshot: Snapshot, now: float) -> Intents:
    """Decide the operations, then write the intents that close the difference between demand and nodes."""
    shared_now = stamps.shared_now(session, now)
    expired = [lease for lease in snapshot.leases if _has_expired(lease, shared_now)]
    for lease in expired:
        session.delete(lease)
    snapshot = replace(snapshot, leases=tuple(lease for lease in snapshot.leases if lease not in expired))
    decided = [f"the lease of {lease.holder} expired" for lease in expired]
    session.flush()
    decided += [_carry_out(session, snapshot, verdict, now) for verdict in judge(snapshot, now)]
    if decided:
        session.flush()
        snapshot = load(session, snapshot.pool.name)
    if why := why_down(snapshot, now):
        stop(session, snapshot.pool, now)
        decided.append(f"it goes down, because {why}")
        snapshot = load(session, snapshot.pool.name)
    elif should_touch(snapshot, now):
        snapshot.pool.touched_at = now
    if should_forgive(snapshot, now):
        snapshot.pool.start_failures, snapshot.pool.last_failure = 0, None
    # From here on no row goes, and those of the snapshot are changed in place: it stays true.
    difference = plan_nodes(snapshot, now)
    by_id = {node.id: node for node in snapshot.nodes}
    for node_id, reason in difference.end:
        _intend_end(session, snapshot, by_id[node_id], reason, now)
    for node_id in difference.drain:
        node = by_id[node_id]
        node.state, node.drain_deadline = NodeState.DRAINING, now + DRAIN_GRACE
    difference = plan_nodes(snapshot, now)  # once more, because nodes that failed may have begun a cooldown
    head = next((node for node in snapshot.nodes if node.is_head and node.state is NodeState.READY), None)
    nodes = list(snapshot.nodes)
    if difference.start_head:
        nodes.append(_intend_start(session, snapshot, is_head=True, head_id=None, queue=1, now=now))
    head_id = head.id if head else None
    nodes += [
        _intend_start(session, snapshot, is_head=False, head_id=head_id, queue=number + 1, now=now)
        for number in range(difference.start_workers)
    ]
    pool = snapshot.pool
    if pool.state is PoolState.STOPPING and not nodes:
        pool.state = PoolState.DOWN
    ending = [NodeRef.of(node) for node in nodes if node.state is NodeState.ENDING]
    return Intents(_claim_starts(nodes, now), ending, decided, wanted(snapshot))


def _has_expired(lease: Lease, shared_now: float) -> bool:
    """Whether a lease was not renewed for its time to live.

    What a process of this boot renewed is counted by the monotonic clock, which a suspend or a change of the wall clock
    leaves alone. For another host's lease the clock that both share counts.
    """
    unrenewed = stamps.age(lease.expires_at, lease.renewed_clock)
    return lease.expires_at <= shared_now if unrenewed is None else unrenewed >= lease.ttl


def keep_newest_operations(session: Session, name: str, keep: int) -> None:
    """Delete a pool's ended operations but the newest; every look at the pool reads all there are."""
    ended = session.scalars(
        select(Operation)
        .where(Operation.pool == name, Operation.state != OperationState.OPEN)
        .order_by(Operation.created_at.desc())
        .offset(keep)
    )
    for operation in ended:
        session.delete(operation)


def forget(session: Session, gone: Sequence[str]) -> None:
    """Delete the rows of nodes whose end was seen."""
    session.execute(delete(Node).where(Node.id.in_(gone), Node.state == NodeState.ENDING))


def note_stuck(session: Session, node_id: str, problem: str) -> None:
    """Say on a node's row why it cannot be ended."""
    session.execute(update(Node).where(Node.id == node_id).values(error=problem))


def _carry_out(session: Session, snapshot: Snapshot, verdict: Verdict, now: float) -> str:
    operation = next(row for row in snapshot.operations if row.id == verdict.operation_id)
    operation.state, operation.error, operation.ended_at = verdict.state, verdict.reason, now
    if now >= operation.deadline:
        late = [node for node in snapshot.nodes if node.operation_id == operation.id and node.endpoint is None]
        why = {node.name: node.error or f"{node.state.value} still at the deadline" for node in late}
        operation.node_errors = operation.node_errors | why
    _apply(session, snapshot, operation, verdict, now)
    ended = f"{operation.kind.value} to {operation.size} of {operation.holder}: {verdict.state.value.replace('_', ' ')}"
    return f"{ended}, {verdict.reason}" if verdict.reason else ended


def _apply(session: Session, snapshot: Snapshot, operation: Operation, verdict: Verdict, now: float) -> None:
    """Have demand and leases follow from how an operation ended."""
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
    # A later operation that would restore this one's demand restores what this one replaced instead.
    for later in snapshot.operations:
        if later.replaced_operation_id == operation.id:
            later.replaced_size = operation.replaced_size
            later.replaced_operation_id = operation.replaced_operation_id
    if demand is None or demand.operation_id != operation.id:
        return
    if operation.replaced_size is None:
        session.delete(demand)  # there was none before: the pool goes down unless a lease keeps it
    else:
        demand.size, demand.operation_id, demand.set_at = operation.replaced_size, operation.replaced_operation_id, now


def _take_back(session: Session, snapshot: Snapshot, operation: Operation, lease: Lease) -> None:
    """Give a lease the size that it had before an operation; without one before, it goes."""
    later = next(
        (row for row in snapshot.operations if row.lease_id == lease.id and row.created_at > operation.created_at), None
    )
    if later is not None:  # it was asked for anew since: that one's rollback restores what this one replaced
        later.replaced_size = operation.replaced_size
    elif operation.replaced_size is None:
        session.delete(lease)
    else:
        lease.size = operation.replaced_size


def stop(session: Session, pool: Pool, now: float) -> None:
    """Want a pool down: its demand and leases go."""
    if pool.state is PoolState.UP:
        pool.state = PoolState.STOPPING
    pool.touched_at = now
    session.execute(delete(Demand).where(Demand.pool == pool.name))
    session.execute(delete(Lease).where(Lease.pool == pool.name))
    session.expire_all()


def _intend_start(
    session: Session, snapshot: Snapshot, *, is_head: bool, head_id: str | None, queue: int, now: float
) -> Node:
    pool = snapshot.pool
    spec = PoolSpec.model_validate(pool.spec)
    cause = max(
        (row for row in snapshot.operations if row.state is OperationState.OPEN),
        key=lambda row: row.size,
        default=None,
    )
    backend = BACKENDS[spec.backend]()
    deadline = now + backend.start_timeout + queue * backend.start_timeout_per_node
    node = Node(
        id=uuid.uuid4().hex[:10],
        pool=pool.name,
        name=f"{pool.name}-{pool.next_node}",
        is_head=is_head,
        state=NodeState.PLANNED,
        epoch=pool.epoch,
        head_id=head_id,
        operation_id=cause.id if cause else None,
        cpus=spec.cpus_per_node,
        gpus=spec.gpus_per_node,
        busy=False,
        start_deadline=min(deadline, cause.deadline) if cause else deadline,
        created_at=now,
    )
    session.add(node)
    pool.next_node += 1
    return node


def _intend_end(session: Session, snapshot: Snapshot, node: Node, reason: str, now: float) -> None:
    never_ready = node.endpoint is None
    failed = node.state is NodeState.FAILED or (never_ready and now >= node.start_deadline)
    cause = session.get(Operation, node.operation_id) if node.operation_id else None
    if failed and never_ready and cause is not None:  # the operation's matter, and where that has ended nobody's
        if cause.state is OperationState.OPEN:
            cause.failures += 1
            cause.node_errors = cause.node_errors | {node.name: reason}
    elif failed and now - node.created_at < START_TIMEOUT:
        pool = snapshot.pool
        pool.start_failures += 1
        pool.last_failure = f"{node.name}: {reason}"
        pool.cooldown_until = now + cooldown(pool.start_failures)
    node.state, node.error = NodeState.ENDING, reason


def _claim_starts(nodes: Sequence[Node], now: float) -> list[NodeRef]:
    """Note for which nodes a supervisor is spawned now."""
    due = unclaimed(nodes, now)
    for node in due:
        node.spawned_at = now
    return [NodeRef.of(node) for node in due]
