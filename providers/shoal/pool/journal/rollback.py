"""Record the end of operations (requests to change a pool's size). If an operation is rolled back, also restore the
size that the pool or the lease had before the operation."""

from __future__ import annotations

from sqlalchemy.orm import Session

from shoal import history
from shoal.pool.journal import rows, usage
from shoal.pool.lease_queue import may_resize
from shoal.pool.notice import Notice
from shoal.pool.scaling_plan import Verdict
from shoal.pool.snapshot import Snapshot
from shoal.state.schema import Lease, Operation, OperationKind, OperationState


def withdraw(session: Session, operation_id: str, reason: str, now: float) -> bool:
    """Roll back an operation (a request to change a pool's size), because its caller no longer waits for it. Return
    False if the operation has already ended or does not exist."""
    operation = session.get(Operation, operation_id)
    if operation is None or operation.state is not OperationState.OPEN:
        return False
    snapshot = rows.load(session, operation.pool)
    end_operation(session, snapshot, Verdict(operation_id, OperationState.ROLLED_BACK, reason), now)
    usage.follow_leases(session, operation.pool, now)
    return True


def end_operation(session: Session, snapshot: Snapshot, verdict: Verdict, now: float) -> str:
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


def _apply(session: Session, snapshot: Snapshot, operation: Operation, verdict: Verdict, now: float) -> None:
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


def _take_back(session: Session, snapshot: Snapshot, operation: Operation, lease: Lease) -> None:
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
    elif may_resize(snapshot, lease, operation.replaced_size):
        lease.size = operation.replaced_size
    else:
        operation.replaced_size = lease.size
