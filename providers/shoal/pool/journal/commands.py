"""Write the requests of users to the database rows of a pool: up, scale, lease, renew, release, alter, down and delete.

Every function works inside the caller's transaction, and either raises an error or writes the request to the rows.
`shoal.pool.reconciling` carries the request out.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from sqlalchemy import delete
from sqlalchemy.orm import Session

from shoal import history
from shoal.errors import FencedError, InvalidArgumentError, PoolInUseError, PoolStoppingError, ScaleError
from shoal.pool import bound_host
from shoal.pool.backends import backend_of
from shoal.pool.bound_host import ANYWHERE, bind_here, is_here
from shoal.pool.holder import Ancestors, ends_with, require_team, run_of
from shoal.pool.journal import rows, usage
from shoal.pool.scaling_plan import Snapshot, grantable, leased, may_resize, queue, taken_by
from shoal.pool.spec import LeaseOptions, PoolSpec, ScaleOptions, spec_of_row
from shoal.pool.timeouts import RETIRE_WITHIN
from shoal.state import stamps
from shoal.state.schema import Demand, Lease, Node, NodeState, Operation, OperationKind, OperationState, Pool, PoolState

_MOST_NAMED = 5
"""Largest number of leases and jobs that the error message about a pool in use lists."""


def begin_life(session: Session, spec: PoolSpec, *, owner: dict[str, Any] | None, now: float) -> bool:
    """Set a pool's state to up, and record the pool in this home, but do not request any nodes yet. Return whether the
    pool was down before.

    If the pool was down, its epoch increases by one.

    Raises:
        PoolStoppingError: The pool is still going down.
        PoolDownError: The pool is bound to another machine.
    """
    pool = session.get(Pool, spec.name, with_for_update=True)
    if pool is None:
        pool = Pool(
            name=spec.name, epoch=0, created_at=now, state=PoolState.DOWN, host=ANYWHERE, clock=stamps.present()
        )
        session.add(pool)
    else:
        rows.follow_clock(session, pool)
    if pool.state is PoolState.STOPPING:
        raise PoolStoppingError(f'pool "{spec.name}" is still going down: try again in a few seconds')
    if pool.state is PoolState.UP:
        rows.require_here(pool)
        return False
    _write_spec(pool, spec)
    pool.state = PoolState.UP
    if backend_of(spec).bound_to_host:
        bind_here(pool)
    else:
        pool.host, pool.host_id = ANYWHERE, None
    pool.epoch += 1
    pool.next_node = 0
    pool.decision = pool.decision and {**pool.decision, "found": None}
    pool.owner = owner
    _reset_cooldown(pool)
    pool.touched_at = now
    session.flush()
    bound_host.record(spec)
    return True


def up(session: Session, spec: PoolSpec, *, holder: str, rollback_after: float, now: float) -> str:
    """Create an operation that succeeds when the pool has MIN_NODES ready nodes, and return the operation's id. The
    caller must have set the pool's state to up (`begin_life`).

    If the pool has no base demand (the number of nodes to keep), set the base demand to MIN_NODES.

    Raises:
        InvalidArgumentError: The pool is up with other settings.
    """
    pool = session.get_one(Pool, spec.name)
    if PoolSpec.model_validate(pool.spec) != spec:
        raise InvalidArgumentError(
            f'pool "{spec.name}" is already up with other settings, {PoolSpec.model_validate(pool.spec).uri}: '
            f"change its limits with `shoal pool alter`, or run `shoal pool down {spec.name}` first"
        )
    pool.touched_at = now
    demand = session.get(Demand, spec.name)
    options = ScaleOptions.model_construct(rollback_after_seconds=rollback_after)
    operation = _open(session, pool, OperationKind.UP, pool.min_nodes, holder, options, now)
    if demand is None:
        session.add(Demand(pool=pool.name, size=pool.min_nodes, operation_id=operation.id, set_at=now))
    return operation.id


def scale(session: Session, name: str, size: int, *, holder: str, options: ScaleOptions, now: float) -> str:
    """Set a pool's base demand (the number of nodes to keep). Return the id of the new operation.

    Raises:
        PoolNotFoundError: No pool has this name.
        PoolDownError: The pool is not up, or is bound to another machine.
        InvalidArgumentError: The size is outside the pool's limits.
    """
    snapshot = rows.load(session, name)
    pool = snapshot.pool
    rows.require_up(pool)
    _require_below_max(pool, size, "a size")
    if size < pool.min_nodes:
        raise InvalidArgumentError(
            f'a size of {size} is below MIN_NODES={pool.min_nodes} of pool "{name}": lower the limit with '
            f"`shoal pool alter {name} --min-nodes {size}` or shoal.alter_pool({name!r}, min_nodes={size})"
        )
    operation = _open(session, pool, OperationKind.SCALE, size, holder, options, now)
    demand = snapshot.demand
    # A pool that was started by a lease has no base demand (size set by `up` or `scale`) yet, and would go down after
    # its last lease. The base demand that is set here keeps the pool up.
    if demand is None:
        session.add(Demand(pool=name, size=size, operation_id=operation.id, set_at=now))
    else:
        operation.replaced_size = demand.size
        operation.replaced_operation_id = demand.operation_id
        demand.size, demand.operation_id, demand.set_at = size, operation.id, now
    pool.touched_at = now
    _reset_cooldown(pool)
    return operation.id


def lease(
    session: Session,
    name: str,
    size: int,
    *,
    exclusive: bool,
    holder: str,
    ttl: float,
    options: LeaseOptions,
    now: float,
    team: str | None = None,
    ancestors: Ancestors | None = None,
) -> tuple[str, Lease]:
    """Create a lease for a holder. If the holder already has a lease on the pool, give that lease the new size and
    renew it.

    Each request increases the lease's epoch, so that handles from earlier requests can no longer renew the lease.

    A new lease waits in the pool's queue if it does not fit into MAX_NODES beside the other leases, or if a lease waits
    already. A lease that waits keeps its place when it is requested again, unless the new size is larger.

    Raises:
        PoolNotFoundError: No pool has this name.
        PoolDownError: The pool is not up, or is bound to another machine.
        InvalidArgumentError: The size is above MAX_NODES, alone or together with the leases of blocks around this one;
            or the holder already has a lease of the other kind (shared instead of exclusive, or exclusive instead of
            shared).
        ScaleError: The holder's lease was already granted, and the pool has no room for the larger size.
        BudgetError: The run has used up its budget of node-hours, or the request is above the quota of its team.
    """
    snapshot = rows.load(session, name)
    pool = snapshot.pool
    rows.require_up(pool)
    _require_below_max(pool, size, "a lease")
    usage.check_request(session, name, holder, options, now)
    usage.check_quota(session, pool, team, size, options, now)
    lease = next((lease for lease in snapshot.leases if lease.holder == holder), None)
    replaced = None
    if lease is None:
        lease = Lease(id=uuid.uuid4().hex[:12], pool=name, holder=holder, epoch=0, created_at=now)
        lease.exclusive, lease.waiting, lease.queue_number = exclusive, True, _next_number(snapshot)
        session.add(lease)
        snapshot = replace(snapshot, leases=(*snapshot.leases, lease))
    elif lease.exclusive is not exclusive:
        raise InvalidArgumentError(
            f'{holder} already has {_kind(lease.exclusive)} lease of {lease.size} nodes on pool "{name}". This lease '
            f"cannot be changed to {_kind(exclusive)} one: release the lease first"
        )
    elif lease.waiting:
        _supersede_requests(session, snapshot, lease, now)
        if size > lease.size:
            lease.queue_number = _next_number(snapshot)
    else:
        if size > lease.size and not may_resize(snapshot, lease, size):
            raise ScaleError(
                f'the lease of {lease.holder} on pool "{lease.pool}" cannot grow from {lease.size} to {size} nodes: '
                f"{leased(snapshot)} of {snapshot.pool.max_nodes} nodes are taken, and {len(queue(snapshot))} leases "
                "wait. A granted lease does not wait for more nodes, because two granted leases could wait for each "
                "other: release the lease and request a new one, or try again later"
            )
        replaced = lease.size
    lease.size, lease.ttl = size, ttl
    lease.team = team
    lease.ancestors = dict(ancestors) if ancestors else None
    _require_room_inside(snapshot, lease)
    lease.max_lifetime, lease.budget_node_hours = options.max_lifetime, options.budget_node_hours
    for granted in grantable(snapshot):
        granted.waiting = False
    _set_expiry(session, lease, now)
    lease.epoch += 1
    operation = _open(session, pool, OperationKind.LEASE, size, holder, options, now)
    operation.lease_id, operation.replaced_size = lease.id, replaced
    pool.touched_at = now
    _reset_cooldown(pool)
    usage.follow_leases(session, name, now)
    return operation.id, lease


def renew(session: Session, lease_id: str, epoch: int, now: float) -> None:
    """Renew a lease: set its expiry to now plus the lease's time to live.

    Raises:
        FencedError: The lease has expired, was released, was ended by shoal, or was requested again, so that its epoch
            is newer.
    """
    lease = session.get(Lease, lease_id, with_for_update=True)
    if lease is None:
        if reason := usage.end_reason(session, lease_id):
            raise FencedError(reason)
        raise FencedError(f"lease {lease_id} has expired or was released: its nodes may be gone; request a new lease")
    if lease.epoch != epoch:
        raise FencedError(
            f"this handle of lease {lease_id} is outdated (epoch {epoch} instead of {lease.epoch}), because the same "
            "holder has requested the lease again: renew the lease with the newest handle"
        )
    _set_expiry(session, lease, now)
    pool = session.get_one(Pool, lease.pool)
    rows.follow_clock(session, pool)
    pool.touched_at = now


def let_expire(session: Session, lease_id: str, epoch: int, now: float) -> bool:
    """Set a lease's expiry to now. The lease of a job nevertheless lasts until the job has ended."""
    lease = session.get(Lease, lease_id, with_for_update=True)
    if lease is None or lease.epoch != epoch or lease.ttl == 0.0:
        return False
    lease.ttl = 0.0
    _set_expiry(session, lease, now)
    return True


def renew_held(session: Session, name: str, runs: Collection[str], now: float) -> bool:
    """Renew the leases of some runs on a pool: set their expiry to now plus the lease's time to live. Return False if
    the runs have no lease on the pool.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    held = [lease for lease in rows.load(session, name).leases if run_of(lease.holder) in runs]
    for lease in held:
        renew(session, lease.id, lease.epoch, now)
    return bool(held)


def release(session: Session, name: str, holder: str, now: float, *, team: str | None = None) -> list[str]:
    """Delete a holder's leases on a pool, and the leases that end with them. Return the holders of the deleted leases.

    Raises:
        PoolNotFoundError: No pool has this name.
        TeamError: A lease belongs to another team than `team`.
    """
    snapshot = rows.load(session, name)
    ending = [lease for lease in snapshot.leases if ends_with(lease.holder, lease.ancestors, holder)]
    for lease in ending:
        require_team(lease.team, team, f'the lease of {lease.holder} on pool "{name}"')
        session.delete(lease)
    snapshot.pool.touched_at = now
    usage.follow_leases(session, name, now)
    return [lease.holder for lease in ending]


def down(session: Session, name: str, now: float) -> None:
    """Request that a pool goes down. The pool's leases and its base demand (the size that `up` or `scale` has set) are
    deleted at once. The row of each node is deleted after the node has ended.

    Raises:
        PoolNotFoundError: No pool has this name.
        PoolDownError: The pool is bound to another machine.
    """
    snapshot = rows.load(session, name)
    rows.require_here(snapshot.pool)
    rows.stop(session, snapshot.pool, now)


def abandon(session: Session, name: str, now: float) -> None:
    """Set a pool's state to down and delete the rows of its nodes, without contacting the pool's cluster.

    Raises:
        PoolNotFoundError: No pool has this name.
        InvalidArgumentError: The pool is local. The nodes of a local pool must be ended first.
    """
    pool = rows.load(session, name).pool
    if _is_bound(pool):
        raise InvalidArgumentError(
            f'pool "{name}" is local and cannot be abandoned: `shoal pool down {name}` ends its nodes; if a node does '
            "not end, run `shoal sweep` to try again"
        )
    rows.stop(session, pool, now)
    session.execute(delete(Node).where(Node.pool == name))
    pool.state = PoolState.DOWN
    pool.decision = {**(pool.decision or {"number": 0}), "size": 0, "unconfirmed": None}


def _is_bound(pool: Pool) -> bool:
    """Return whether only one host can end the nodes of a pool. Without its backend, nothing here can end them, so the
    pool may be abandoned."""
    spec = spec_of_row(pool.spec)
    return spec is not None and backend_of(spec).bound_to_host


def remove(session: Session, name: str, now: float, *, abandon: bool) -> None:
    """Delete all rows of a pool except those of its jobs.

    Raises:
        PoolNotFoundError: No pool has this name.
        PoolElsewhereError: The pool is bound to another machine, and `abandon` is False.
        PoolInUseError: The pool is not down, or has unfinished jobs, and `abandon` is False.
        InvalidArgumentError: `abandon` is True, but the pool is bound to this machine, which can end its nodes.
    """
    snapshot = rows.load(session, name)
    pool = snapshot.pool
    bound = _is_bound(pool)
    if abandon:
        if bound and is_here(pool):
            raise InvalidArgumentError(
                f'pool "{name}" is on this host, which can end its nodes: run `shoal pool delete {name}` without '
                "--abandon"
            )
    else:
        rows.require_here(pool)
        users = [f"a lease of {lease.holder}" for lease in snapshot.leases]
        users += [f"unfinished job {job.id}" for job in rows.unfinished_jobs(session, [name])]
        more = f" and {len(users) - _MOST_NAMED} more" if users[_MOST_NAMED:] else ""
        state = pool.state.value + (f" ({', '.join(users[:_MOST_NAMED])}{more})" if users else "")
        first = f"`shoal pool down {name}`, which ends its nodes, leases and jobs"
        if pool.state is PoolState.DOWN:
            first = "`shoal sweep`, which records the end of jobs that have died"
        if users or pool.state is not PoolState.DOWN:
            raise PoolInUseError(f'pool "{name}" is {state} and cannot be deleted: first run {first}')
    session.delete(pool)
    usage.follow_leases(session, name, now)


def retire(session: Session, name: str, node_name: str, within: float, now: float) -> None:
    """Record in a node's row that the node will end soon, and when.

    Raises:
        PoolNotFoundError: No pool has this name.
        PoolDownError: The pool is not up, or is bound to another machine.
        InvalidArgumentError: The pool has no ready node with this name, the node is the head, or the pool is not local.
    """
    snapshot = rows.load(session, name)
    rows.require_up(snapshot.pool)
    if not backend_of(PoolSpec.model_validate(snapshot.pool.spec)).can_retire:
        raise InvalidArgumentError(
            f'nodes of pool "{name}" cannot be retired, because its Ray cluster decides which nodes end. When a node '
            "is gone, the reconciler requests a replacement"
        )
    ready = [node for node in snapshot.nodes if node.state is NodeState.READY]
    node = next((node for node in ready if node.name == node_name), None)
    if node is None:
        names = ", ".join(node.name for node in ready if not node.is_head) or "none"
        raise InvalidArgumentError(f'pool "{name}" has no ready node "{node_name}"; nodes that can be retired: {names}')
    if node.is_head:
        raise InvalidArgumentError(
            f'"{node_name}" is the head of pool "{name}" and cannot be retired, because a pool has only one head. Wait '
            f"until the pool's jobs have ended, then run `shoal pool down {name}` and `shoal pool up {name}`"
        )
    node.leaving_at = now + within
    _reset_cooldown(snapshot.pool)


def note_leaving(session: Session, name: str, leaving: Collection[str], now: float) -> None:
    """Record that some nodes of a `ray://` pool will end soon: write the expected time to the row of each such node.

    Ray does not report when a node will end. So the expected end is `RETIRE_WITHIN` seconds from now, because a
    replacement should be ready by then.

    Local pools are skipped, because the ends of their nodes are announced with `retire`. The head is skipped because it
    cannot be replaced before it ends.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    snapshot = rows.load(session, name)
    if backend_of(PoolSpec.model_validate(snapshot.pool.spec)).can_retire:
        return
    for node in snapshot.nodes:
        node_id = (node.endpoint or {}).get("ray_node_id")
        if node_id in leaving and node.state is NodeState.READY and not node.is_head and node.leaving_at is None:
            node.leaving_at = now + RETIRE_WITHIN
            _reset_cooldown(snapshot.pool)


def alter(session: Session, name: str, *, min_nodes: int | None, max_nodes: int | None, now: float) -> None:
    """Change a pool's limits MIN_NODES and MAX_NODES.

    Raises:
        PoolNotFoundError: No pool has this name.
        InvalidArgumentError: MIN_NODES is above MAX_NODES, or MAX_NODES is below the base demand, below the nodes that
            the granted leases take together, or below the size of a waiting lease.
        PoolDownError: The pool is bound to another machine.
    """
    snapshot = rows.load(session, name)
    pool = snapshot.pool
    rows.require_here(pool)
    given = {"min_nodes": min_nodes, "max_nodes": max_nodes}
    spec = PoolSpec.parse({**pool.spec, **{name: value for name, value in given.items() if value is not None}})
    sizes = {f"the size of the lease of {lease.holder}": lease.size for lease in snapshot.leases}
    sizes["the number of nodes that its leases take together"] = leased(snapshot)
    if snapshot.demand:
        sizes["the size that `up` or `scale` has set"] = snapshot.demand.size
    for what, size in sizes.items():
        if size > spec.max_nodes:
            raise InvalidArgumentError(
                f'max_nodes={spec.max_nodes} of pool "{name}" is below {what} ({size} nodes): scale down first, '
                "or wait until leases are released"
            )
    _write_spec(pool, spec)
    pool.touched_at = now


def _write_spec(pool: Pool, spec: PoolSpec) -> None:
    """Write a pool's settings; its limits are columns, too, for queries."""
    pool.spec = json.loads(spec.model_dump_json())
    pool.min_nodes, pool.max_nodes = spec.min_nodes, spec.max_nodes


def _set_expiry(session: Session, lease: Lease, now: float) -> None:
    """Set a lease's expiry to now plus the lease's time to live."""
    lease.expires_at = stamps.shared_now(session, now) + lease.ttl
    lease.renewed_clock = stamps.stamp(lease.expires_at)


def _next_number(snapshot: Snapshot) -> int:
    return 1 + max((lease.queue_number for lease in snapshot.leases), default=0)


def _kind(exclusive: bool) -> str:
    return "an exclusive" if exclusive else "a shared"


def _supersede_requests(session: Session, snapshot: Snapshot, lease: Lease, now: float) -> None:
    """End the unfinished operations of a waiting lease, because its holder has requested the lease again. The new
    request has its own operation with its own deadline."""
    for operation in snapshot.operations:
        if operation.lease_id == lease.id and operation.state is OperationState.OPEN:
            operation.state, operation.ended_at = OperationState.SUPERSEDED, now
            operation.error = "the same holder requested the lease again"
            history.record_end(session, operation.id, f"superseded: {operation.error}", at=now)


def _require_room_inside(snapshot: Snapshot, lease: Lease) -> None:
    """Refuse a lease for which there is no room as long as the blocks around it hold their leases, and they wait for
    this lease."""
    around = [one for one in snapshot.leases if (lease.ancestors or {}).get(one.holder)]
    taken = taken_by([lease, *around])
    if taken > snapshot.pool.max_nodes:
        held = ", ".join(f"{one.size} of {one.holder}" for one in around)
        raise InvalidArgumentError(
            f'{_kind(lease.exclusive)} lease of {lease.size} nodes on pool "{lease.pool}" inside of other leases '
            f"({held}) needs {taken} nodes, above MAX_NODES={snapshot.pool.max_nodes}: request it outside of them, or "
            "without exclusive=True"
        )


def _reset_cooldown(pool: Pool) -> None:
    """Reset a pool's failure count and cooldown, so that a new request starts nodes at once. The cause of the earlier
    failures may be fixed by now."""
    pool.start_failures, pool.last_failure, pool.cooldown_until = 0, None, None


def _require_below_max(pool: Pool, size: int, what: str) -> None:
    if size > pool.max_nodes:
        raise InvalidArgumentError(
            f'{what} of {size} is above MAX_NODES={pool.max_nodes} of pool "{pool.name}": raise the limit with '
            f"`shoal pool alter {pool.name} --max-nodes {size}` or shoal.alter_pool({pool.name!r}, max_nodes={size}), "
            f"or with max_nodes={size} in the URI if you name the pool by one"
        )


def _open(
    session: Session, pool: Pool, kind: OperationKind, size: int, holder: str, options: ScaleOptions, now: float
) -> Operation:
    operation = Operation(
        id=uuid.uuid4().hex[:12],
        pool=pool.name,
        kind=kind,
        state=OperationState.OPEN,
        holder=holder,
        size=size,
        block_until_min_cluster_size=options.block_until_min_cluster_size,
        deadline=now + options.rollback_after_seconds,
        failures=0,
        node_errors={},
        created_at=now,
    )
    session.add(operation)
    return operation
