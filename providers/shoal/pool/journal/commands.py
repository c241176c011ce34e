"""What somebody wants of a pool, written down: demand, leases, limits, up and down, each with its operation.

Like the journal's own, every function works inside the caller's transaction. It refuses, or the rows say what is
wanted; carrying it out is reconciliation.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from sqlalchemy import delete
from sqlalchemy.orm import Session

from shoal.errors import FencedError, InvalidArgumentError, PoolDownError, PoolStoppingError
from shoal.pool.backends import BACKENDS
from shoal.pool.holder import ANYWHERE, bind_here, is_here
from shoal.pool.journal import clock, rows
from shoal.pool.spec import PoolSpec
from shoal.state import stamps
from shoal.state.schema import Demand, Lease, Node, Operation, OperationKind, OperationState, Pool, PoolState


def begin_life(session: Session, spec: PoolSpec, *, owner: dict[str, Any] | None = None, now: float) -> bool:
    """Have a pool up, with no demand on it yet. Returns whether it was down: then this begins a new life of it.

    Raises:
        PoolStoppingError: It is still going down.
        PoolDownError: It is bound to another machine.
    """
    pool = session.get(Pool, spec.name, with_for_update=True)
    if pool is None:
        pool = Pool(
            name=spec.name, epoch=0, created_at=now, state=PoolState.DOWN, host=ANYWHERE, clock=stamps.present()
        )
        session.add(pool)
    else:
        clock.follow(session, pool)
    if pool.state is PoolState.STOPPING:
        raise PoolStoppingError(f'pool "{spec.name}" is still going down')
    if pool.state is PoolState.UP:
        rows.require_here(pool)
        return False
    pool.spec = json.loads(spec.model_dump_json())
    pool.state = PoolState.UP
    if BACKENDS[spec.backend]().bound_to_host:
        bind_here(pool)
    else:
        pool.host, pool.host_id = ANYWHERE, None
    pool.min_nodes = spec.min_nodes
    pool.max_nodes = spec.max_nodes
    pool.epoch += 1
    pool.next_node = 0
    pool.owner = owner
    _try_at_once(pool)
    pool.touched_at = now
    session.flush()
    return True


def up(
    session: Session, spec: PoolSpec, *, holder: str, rollback_after: float, owner: dict[str, Any] | None, now: float
) -> tuple[str, bool]:
    """Want a pool up. Returns the operation's id, and whether this call begins a new life of the pool.

    Raises:
        InvalidArgumentError: It is up with other settings.
        PoolDownError: It is going down, or bound to another machine.
    """
    begins = begin_life(session, spec, owner=owner, now=now)
    pool = session.get_one(Pool, spec.name)
    if PoolSpec.model_validate(pool.spec) != spec:
        raise InvalidArgumentError(
            f'pool "{spec.name}" is up as {PoolSpec.model_validate(pool.spec).uri}: '
            f"change its limits with `shoal pool alter`, or `shoal pool down {spec.name}` first"
        )
    pool.touched_at = now
    demand = session.get(Demand, spec.name)
    operation = _open(session, pool, OperationKind.UP, pool.min_nodes, holder, now + rollback_after, now)
    if demand is None:
        session.add(Demand(pool=pool.name, size=pool.min_nodes, operation_id=operation.id, set_at=now))
    return operation.id, begins


def scale(
    session: Session,
    name: str,
    size: int,
    *,
    holder: str,
    rollback_after: float,
    block_until_min_cluster_size: int | None,
    now: float,
) -> str:
    """Set the base demand. Returns the id of the operation that carries it out.

    Raises:
        PoolNotFoundError: There is no such pool.
        PoolDownError: It is not up, or bound to another machine.
        InvalidArgumentError: The size is outside the pool's limits.
    """
    snapshot = rows.load(session, name)
    pool = snapshot.pool
    rows.require_up(pool)
    _require_below_max(pool, size, "a size")
    if size < pool.min_nodes:
        raise InvalidArgumentError(
            f'a size of {size} is below MIN_NODES={pool.min_nodes} of pool "{name}": lower it with '
            f"`shoal pool alter {name} --min-nodes {size}` or shoal.alter_pool({name!r}, min_nodes={size})"
        )
    operation = _open(session, pool, OperationKind.SCALE, size, holder, now + rollback_after, now)
    operation.block_until_min_cluster_size = block_until_min_cluster_size
    demand = snapshot.demand
    if demand is None:  # brought up by a lease: from here on it stays when that goes
        session.add(Demand(pool=name, size=size, operation_id=operation.id, set_at=now))
    else:
        operation.replaced_size = demand.size
        operation.replaced_operation_id = demand.operation_id
        demand.size, demand.operation_id, demand.set_at = size, operation.id, now
    pool.touched_at = now
    _try_at_once(pool)
    return operation.id


def lease(
    session: Session,
    name: str,
    size: int,
    *,
    holder: str,
    ttl: float,
    rollback_after: float,
    block_until_min_cluster_size: int | None,
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
    snapshot = rows.load(session, name)
    pool = snapshot.pool
    rows.require_up(pool)
    _require_below_max(pool, size, "a lease")
    lease = next((lease for lease in snapshot.leases if lease.holder == holder), None)
    replaced = lease.size if lease else None
    if lease is None:
        lease = Lease(id=uuid.uuid4().hex[:12], pool=name, holder=holder, epoch=0, created_at=now)
        session.add(lease)
    lease.size, lease.ttl = size, ttl
    _prolong(session, lease, now)
    lease.epoch += 1
    operation = _open(session, pool, OperationKind.LEASE, size, holder, now + rollback_after, now)
    operation.lease_id, operation.block_until_min_cluster_size, operation.replaced_size = (
        lease.id,
        block_until_min_cluster_size,
        replaced,
    )
    pool.touched_at = now
    _try_at_once(pool)
    return operation.id, lease


def renew(session: Session, lease_id: str, epoch: int, now: float) -> None:
    """Hold on to a lease for another of its times to live.

    Raises:
        FencedError: It has expired, was released, or was taken over under a newer epoch.
    """
    lease = session.get(Lease, lease_id, with_for_update=True)
    if lease is None:
        raise FencedError(f"lease {lease_id} has expired or was released: what it held may be gone, ask for it anew")
    if lease.epoch != epoch:
        raise FencedError(f"lease {lease_id} is at epoch {lease.epoch}, this is {epoch}: somebody took it over")
    _prolong(session, lease, now)
    pool = session.get_one(Pool, lease.pool)
    clock.follow(session, pool)
    pool.touched_at = now


def renew_held(session: Session, name: str, holder: str, now: float) -> bool:
    """Hold on to what a holder claims; False where it claims nothing any more.

    Raises:
        PoolNotFoundError: There is no such pool.
    """
    mine = next((lease for lease in rows.load(session, name).leases if lease.holder == holder), None)
    if mine is None:
        return False
    renew(session, mine.id, mine.epoch, now)
    return True


def release(session: Session, name: str, holder: str, now: float) -> int:
    """Give up what a holder claims; returns how many leases that were.

    Raises:
        PoolNotFoundError: There is no such pool.
    """
    snapshot = rows.load(session, name)
    mine = [lease for lease in snapshot.leases if lease.holder == holder]
    for lease in mine:
        session.delete(lease)
    snapshot.pool.touched_at = now
    return len(mine)


def down(session: Session, name: str, now: float) -> None:
    """Want a pool down: its demand and leases go at once, its nodes as they are seen to end.

    Raises:
        PoolNotFoundError: There is no such pool.
        PoolDownError: It is bound to another machine.
    """
    snapshot = rows.load(session, name)
    rows.require_here(snapshot.pool)
    rows.stop(session, snapshot.pool, now)


def abandon(session: Session, name: str, now: float) -> None:
    """Have a pool down at once, whatever its cluster may still hold for it.

    Raises:
        PoolNotFoundError: There is no such pool.
        InvalidArgumentError: It is local: what runs on this host is ended, not forgotten.
    """
    pool = rows.load(session, name).pool
    if BACKENDS[PoolSpec.model_validate(pool.spec).backend]().bound_to_host:
        raise InvalidArgumentError(
            f'pool "{name}" is local: its nodes are ended, not forgotten; `shoal sweep` tries again what does not end'
        )
    rows.stop(session, pool, now)
    session.execute(delete(Node).where(Node.pool == name))
    pool.state = PoolState.DOWN


def remove(session: Session, name: str, *, abandon: bool) -> None:
    """Remove all rows of a pool but those of its jobs.

    Args:
        session: A write transaction.
        name: The pool.
        abandon: Whatever its host or cluster may still run for it. Supervisors that find their rows gone end their
            nodes.

    Raises:
        PoolNotFoundError: There is no such pool.
        PoolElsewhereError: It is bound to another machine, and not to be abandoned.
        PoolDownError: It is not down, and not to be abandoned.
        InvalidArgumentError: It is to be abandoned, and this machine can end what runs for it.
    """
    pool = rows.load(session, name).pool
    bound = BACKENDS[PoolSpec.model_validate(pool.spec).backend]().bound_to_host
    if abandon:
        if bound and is_here(pool):
            raise InvalidArgumentError(
                f'pool "{name}" is on this host, which can end its nodes: `shoal pool delete {name}` without --abandon'
            )
    else:
        rows.require_here(pool)
        if pool.state is not PoolState.DOWN:
            raise PoolDownError(f'pool "{name}" is {pool.state.value}: `shoal pool down {name}` ends its nodes first')
    session.delete(pool)


def alter(session: Session, name: str, *, min_nodes: int | None, max_nodes: int | None, now: float) -> None:
    """Change a pool's limits.

    Raises:
        PoolNotFoundError: There is no such pool.
        InvalidArgumentError: The limits contradict each other or what is asked of the pool.
        PoolDownError: It is bound to another machine.
    """
    snapshot = rows.load(session, name)
    pool = snapshot.pool
    rows.require_here(pool)
    low = pool.min_nodes if min_nodes is None else min_nodes
    high = pool.max_nodes if max_nodes is None else max_nodes
    fields = dict(pool.spec) | {"min_nodes": low, "max_nodes": high}
    spec = PoolSpec.parse(fields)
    claims = {f"the lease of {lease.holder}": lease.size for lease in snapshot.leases}
    if snapshot.demand:
        claims["its base demand"] = snapshot.demand.size
    for what, size in claims.items():
        if size > high:
            raise InvalidArgumentError(f'max_nodes={high} of pool "{name}" is below {what} of {size}: scale down first')
    pool.spec = json.loads(spec.model_dump_json())
    pool.min_nodes, pool.max_nodes, pool.touched_at = low, high, now


def _prolong(session: Session, lease: Lease, now: float) -> None:
    """Have a lease expire one time to live from now on."""
    lease.expires_at = stamps.shared_now(session, now) + lease.ttl
    lease.renewed_clock = stamps.stamp(lease.expires_at)


def _try_at_once(pool: Pool) -> None:
    """Somebody asks anew: what failed before may have been mended."""
    pool.start_failures, pool.last_failure, pool.cooldown_until = 0, None, None


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
