"""Reading and writing a pool's rows. Every function works inside the caller's transaction; none does anything else.

Two processes never act on half of what the other wrote: demand, operation and intents change together or not at all.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from shoal.errors import FencedError, InvalidArgumentError, PoolDownError, PoolNotFoundError
from shoal.pool.backends.base import NodeRef
from shoal.pool.holder import host
from shoal.pool.plan import Snapshot, Verdict, judge, plan_nodes
from shoal.pool.spec import PoolSpec
from shoal.pool.tunables import DRAIN_GRACE, REPLACE_COOLDOWN, SPAWN_GRACE, START_TIMEOUT
from shoal.state.schema import (
    Demand,
    Lease,
    Node,
    NodeState,
    Operation,
    OperationKind,
    OperationState,
    Pool,
    PoolState,
)

_START_TIMEOUT_PER_NODE = 10.0  # starts take turns on a host (3 to 9 s each here), so each waits for those before it


def pool_names(session: Session, *, embedded: bool = False) -> list[str]:
    """Names of all pools, in order; pools embedded in a process only if asked for."""
    rows = session.scalars(select(Pool).order_by(Pool.name))
    return [pool.name for pool in rows if embedded or pool.owner is None]


def load(session: Session, name: str, *, lock: bool = True) -> Snapshot:
    """All rows of a pool, by default locked until the transaction ends.

    Raises:
        PoolNotFoundError: There is no such pool.
    """
    pool = session.get(Pool, name, with_for_update=lock, populate_existing=True)
    if pool is None:
        raise PoolNotFoundError(name, pool_names(session))
    return Snapshot(
        pool=pool,
        demand=session.get(Demand, name),
        leases=tuple(session.scalars(select(Lease).where(Lease.pool == name).order_by(Lease.created_at))),
        operations=tuple(
            session.scalars(select(Operation).where(Operation.pool == name).order_by(Operation.created_at))
        ),
        nodes=tuple(session.scalars(select(Node).where(Node.pool == name).order_by(Node.created_at))),
    )


def require_here(pool: Pool) -> None:
    """Refuse to act on a pool that is bound to another machine.

    Raises:
        PoolDownError: It is.
    """
    if pool.host != host():
        raise PoolDownError(
            f'pool "{pool.name}" is local to host {pool.host} and cannot be changed from {host()}: call from there'
        )


def require_up(pool: Pool) -> None:
    """Refuse to go on with a pool that is not up.

    Raises:
        PoolDownError: It is not, or bound to another machine.
    """
    require_here(pool)
    if pool.state is not PoolState.UP:
        raise PoolDownError(f'pool "{pool.name}" is {pool.state.value}: `shoal pool up {pool.name}` starts it')


def request_up(
    session: Session, spec: PoolSpec, *, holder: str, rollback_after: float, owner: dict[str, Any] | None, now: float
) -> tuple[str, bool]:
    """Want a pool up. Returns the operation's id, and whether this call begins a new life of the pool.

    Raises:
        InvalidArgumentError: It is up with other settings.
        PoolDownError: It is going down, or bound to another machine.
    """
    pool = session.get(Pool, spec.name, with_for_update=True)
    fields = json.loads(spec.model_dump_json())
    begins = False
    if pool is None:
        pool = Pool(name=spec.name, epoch=0, created_at=now, state=PoolState.DOWN, host=host())
        session.add(pool)
    if pool.state is PoolState.STOPPING:
        raise PoolDownError(f'pool "{spec.name}" is still going down: wait for `shoal pool describe` to say down')
    if pool.state is PoolState.UP:
        require_here(pool)
        if pool.spec != fields:
            raise InvalidArgumentError(
                f'pool "{spec.name}" is up as {PoolSpec.model_validate(pool.spec).uri}: '
                f"change its limits with `shoal pool alter`, or `shoal pool down {spec.name}` first"
            )
    else:
        begins = True
        pool.spec = fields
        pool.state = PoolState.UP
        pool.host = host()
        pool.min_nodes = spec.min_nodes
        pool.max_nodes = spec.max_nodes
        pool.epoch += 1
        pool.next_node = 0
        pool.owner = owner
        pool.cooldown_until = None
    pool.touched_at = now
    session.flush()
    demand = session.get(Demand, spec.name)
    operation = _open(session, pool, OperationKind.UP, pool.min_nodes, holder, now + rollback_after, now)
    if demand is None:
        session.add(Demand(pool=pool.name, size=pool.min_nodes, operation_id=operation.id, set_at=now))
    return operation.id, begins


def request_scale(
    session: Session,
    name: str,
    size: int,
    *,
    holder: str,
    rollback_after: float,
    min_size: int | None,
    now: float,
) -> str:
    """Set the base demand. Returns the id of the operation that carries it out.

    Raises:
        PoolNotFoundError: There is no such pool.
        PoolDownError: It is not up, or bound to another machine.
        InvalidArgumentError: The size is outside the pool's limits.
    """
    snapshot = load(session, name)
    pool = snapshot.pool
    require_up(pool)
    _require_below_max(pool, size, "a size")
    if size < pool.min_nodes:
        raise InvalidArgumentError(
            f'a size of {size} is below MIN_NODES={pool.min_nodes} of pool "{name}": lower it with '
            f"`shoal pool alter {name} --min-nodes {size}` or shoal.alter_pool({name!r}, min_nodes={size})"
        )
    operation = _open(session, pool, OperationKind.SCALE, size, holder, now + rollback_after, now)
    operation.min_size = min_size
    demand = snapshot.demand
    if demand is None:
        demand = Demand(pool=name, size=pool.min_nodes, operation_id=None, set_at=now)
        session.add(demand)
    operation.replaced_size = demand.size
    operation.replaced_operation_id = demand.operation_id
    demand.size, demand.operation_id, demand.set_at = size, operation.id, now
    pool.touched_at = now
    pool.cooldown_until = None
    return operation.id


def request_lease(
    session: Session,
    name: str,
    size: int,
    *,
    holder: str,
    ttl: float,
    rollback_after: float,
    min_size: int | None,
    now: float,
) -> tuple[str, Lease]:
    """Claim nodes for a holder; asked again, its lease is renewed at the new size, under a new epoch.

    Returns:
        The id of the operation that carries it out, and the lease.

    Raises:
        PoolNotFoundError: There is no such pool.
        PoolDownError: It is not up, or bound to another machine.
        InvalidArgumentError: The size is above MAX_NODES.
    """
    snapshot = load(session, name)
    pool = snapshot.pool
    require_up(pool)
    _require_below_max(pool, size, "a lease")
    lease = next((lease for lease in snapshot.leases if lease.holder == holder), None)
    if lease is None:
        lease = Lease(id=uuid.uuid4().hex[:12], pool=name, holder=holder, epoch=0, created_at=now)
        session.add(lease)
    lease.size, lease.expires_at = size, now + ttl
    lease.epoch += 1
    operation = _open(session, pool, OperationKind.LEASE, size, holder, now + rollback_after, now)
    operation.lease_id, operation.min_size = lease.id, min_size
    pool.touched_at, pool.cooldown_until = now, None
    return operation.id, lease


def renew_lease(session: Session, lease_id: str, epoch: int, ttl: float, now: float) -> None:
    """Hold on to a lease.

    Raises:
        FencedError: It has expired, was released, or was taken over under a newer epoch.
    """
    lease = session.get(Lease, lease_id, with_for_update=True)
    if lease is None or lease.expires_at <= now:
        raise FencedError(f"lease {lease_id} has expired or was released: what it held may be gone, ask for it anew")
    if lease.epoch != epoch:
        raise FencedError(f"lease {lease_id} is at epoch {lease.epoch}, this is {epoch}: somebody took it over")
    lease.expires_at = now + ttl
    session.get_one(Pool, lease.pool).touched_at = now


def release_leases(session: Session, name: str, holder: str, now: float) -> int:
    """Give up what a holder claims; returns how many leases that were.

    Raises:
        PoolNotFoundError: There is no such pool.
    """
    snapshot = load(session, name)
    mine = [lease for lease in snapshot.leases if lease.holder == holder]
    for lease in mine:
        session.delete(lease)
    snapshot.pool.touched_at = now
    return len(mine)


def request_down(session: Session, name: str, now: float) -> None:
    """Want a pool down: its demand and leases go at once, its nodes as they are seen to end.

    Raises:
        PoolNotFoundError: There is no such pool.
        PoolDownError: It is bound to another machine.
    """
    snapshot = load(session, name)
    require_here(snapshot.pool)
    _stop(session, snapshot.pool, now)


def request_alter(session: Session, name: str, *, min_nodes: int | None, max_nodes: int | None, now: float) -> None:
    """Change a pool's limits.

    Raises:
        PoolNotFoundError: There is no such pool.
        InvalidArgumentError: The limits contradict each other or what is asked of the pool.
        PoolDownError: It is bound to another machine.
    """
    snapshot = load(session, name)
    pool = snapshot.pool
    require_here(pool)
    low = pool.min_nodes if min_nodes is None else min_nodes
    high = pool.max_nodes if max_nodes is None else max_nodes
    fields = dict(pool.spec) | {"min_nodes": low, "max_nodes": high}
    spec = PoolSpec.parse(fields)
    claims = {f"the lease of {lease.holder}": lease.size for lease in snapshot.leases if lease.expires_at > now}
    if snapshot.demand:
        claims["its base demand"] = snapshot.demand.size
    for what, size in claims.items():
        if size > high:
            raise InvalidArgumentError(f'max_nodes={high} of pool "{name}" is below {what} of {size}: scale down first')
    pool.spec = json.loads(spec.model_dump_json())
    pool.min_nodes, pool.max_nodes, pool.touched_at = low, high, now


def withdraw(session: Session, operation_id: str, reason: str, now: float) -> bool:
    """Roll an operation back because its caller gave it up; False where it had ended, or was never written."""
    operation = session.get(Operation, operation_id)
    if operation is None or operation.state is not OperationState.OPEN:
        return False
    snapshot = load(session, operation.pool)
    _carry_out(session, snapshot, Verdict(operation_id, OperationState.ROLLED_BACK, reason), now)
    return True


def record_losses(session: Session, snapshot: Snapshot, losses: dict[str, tuple[NodeRef, str]]) -> None:
    """Mark nodes failed that were seen dead, unless their row has another supervisor by now."""
    for node in snapshot.nodes:
        seen, reason = losses.get(node.id, (None, ""))
        if seen and NodeRef.of(node) == seen and node.state not in (NodeState.FAILED, NodeState.ENDING):
            node.state, node.error = NodeState.FAILED, reason


def advance(session: Session, snapshot: Snapshot, now: float) -> tuple[list[NodeRef], list[NodeRef]]:
    """Decide the operations, then write the intents that close the difference between demand and nodes.

    Returns:
        Nodes that the caller has to start, and nodes to end.
    """
    for verdict in judge(snapshot, now):
        _carry_out(session, snapshot, verdict, now)
    for lease in snapshot.leases:
        if lease.expires_at <= now:
            session.delete(lease)
    session.flush()
    snapshot = load(session, snapshot.pool.name)
    plan = plan_nodes(snapshot, now)
    by_id = {node.id: node for node in snapshot.nodes}
    for node_id, reason in plan.end:
        _intend_end(session, snapshot, by_id[node_id], reason, now)
    for node_id in plan.drain:
        node = by_id[node_id]
        node.state, node.drain_deadline = NodeState.DRAINING, now + DRAIN_GRACE
    head = next((node for node in snapshot.nodes if node.is_head and node.state is NodeState.READY), None)
    if plan.start_head:
        _intend_start(session, snapshot, is_head=True, head_id=None, queue=1, now=now)
    for number in range(plan.start_workers):
        _intend_start(session, snapshot, is_head=False, head_id=head.id if head else None, queue=number + 1, now=now)
    session.flush()
    pool = snapshot.pool
    nodes = load(session, pool.name).nodes
    if pool.state is PoolState.STOPPING and not nodes:
        pool.state = PoolState.DOWN
    return _claim_starts(nodes, now), [NodeRef.of(node) for node in nodes if node.state is NodeState.ENDING]


def forget(session: Session, gone: Sequence[str]) -> None:
    """Delete the rows of nodes whose end was seen."""
    session.execute(delete(Node).where(Node.id.in_(gone), Node.state == NodeState.ENDING))


def note_stuck(session: Session, node_id: str, problem: str) -> None:
    """Say on a node's row why it cannot be ended."""
    session.execute(update(Node).where(Node.id == node_id).values(error=problem))


def _require_below_max(pool: Pool, size: int, what: str) -> None:
    if size > pool.max_nodes:
        raise InvalidArgumentError(
            f'{what} of {size} is above MAX_NODES={pool.max_nodes} of pool "{pool.name}": raise it with '
            f"`shoal pool alter {pool.name} --max-nodes {size}` or shoal.alter_pool({pool.name!r}, max_nodes={size})"
        )


def _open(
    session: Session, pool: Pool, kind: OperationKind, size: int, holder: str, deadline: float, now: float
) -> Operation:
    operation = Operation(
        id=uuid.uuid4().hex[:12],
        pool=pool.name,
        kind=kind,
        state=OperationState.OPEN,
        holder=holder,
        size=size,
        deadline=deadline,
        failures=0,
        node_errors={},
        created_at=now,
    )
    session.add(operation)
    return operation


def _carry_out(session: Session, snapshot: Snapshot, verdict: Verdict, now: float) -> None:
    operation = next(row for row in snapshot.operations if row.id == verdict.operation_id)
    operation.state, operation.error, operation.ended_at = verdict.state, verdict.reason, now
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
            session.delete(lease)
        return
    # A later operation that would restore this one's demand restores what this one replaced instead.
    for later in snapshot.operations:
        if later.replaced_operation_id == operation.id:
            later.replaced_size = operation.replaced_size
            later.replaced_operation_id = operation.replaced_operation_id
    if demand is None or demand.operation_id != operation.id:
        return
    if operation.replaced_size is None:
        _stop(session, snapshot.pool, now)  # it was this operation that brought the pool up
    else:
        demand.size, demand.operation_id, demand.set_at = operation.replaced_size, operation.replaced_operation_id, now


def _stop(session: Session, pool: Pool, now: float) -> None:
    if pool.state is PoolState.UP:
        pool.state = PoolState.STOPPING
    pool.touched_at = now
    session.execute(delete(Demand).where(Demand.pool == pool.name))
    session.execute(delete(Lease).where(Lease.pool == pool.name))
    session.expire_all()


def _intend_start(
    session: Session, snapshot: Snapshot, *, is_head: bool, head_id: str | None, queue: int, now: float
) -> None:
    pool = snapshot.pool
    spec = PoolSpec.model_validate(pool.spec)
    cause = max(
        (row for row in snapshot.operations if row.state is OperationState.OPEN),
        key=lambda row: row.size,
        default=None,
    )
    deadline = now + START_TIMEOUT + queue * _START_TIMEOUT_PER_NODE
    session.add(
        Node(
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
    )
    pool.next_node += 1


def _intend_end(session: Session, snapshot: Snapshot, node: Node, reason: str, now: float) -> None:
    never_ready = node.endpoint is None
    failed = node.state is NodeState.FAILED or now >= node.start_deadline
    if never_ready and failed:
        cause = session.get(Operation, node.operation_id) if node.operation_id else None
        if cause is not None and cause.state is OperationState.OPEN:
            cause.failures += 1
            cause.node_errors = cause.node_errors | {node.name: reason}
        else:
            snapshot.pool.cooldown_until = now + REPLACE_COOLDOWN
    node.state, node.error = NodeState.ENDING, reason


def _claim_starts(nodes: Sequence[Node], now: float) -> list[NodeRef]:
    """Planned nodes for which no supervisor was spawned, or none that has claimed its row in good time."""
    due = [
        node
        for node in nodes
        if node.state is NodeState.PLANNED and (node.spawned_at is None or now - node.spawned_at > SPAWN_GRACE)
    ]
    for node in due:
        node.spawned_at = now
    return [NodeRef.of(node) for node in due]
