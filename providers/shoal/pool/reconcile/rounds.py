"""Reconcile a pool: start its missing nodes and end its surplus nodes. Reconciling is safe at any time, repeatedly and
concurrently.

Reconciling has four steps:

1. Read the rows and check the processes, without a lock. Stop here if nothing has to change.
2. In one transaction, write the observed state of the nodes, and which nodes to start and end (the intents).
3. Start and end these nodes.
4. In another transaction, delete the rows of the nodes that have ended, and record which nodes could not be ended.

If the process is killed between two steps, the next run continues from the rows in the database.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.os_processes import ProcessId
from shoal.pool.backends import BACKENDS, Backend, NodeRef, PoolRef, Seen
from shoal.pool.bound_host import is_here
from shoal.pool.holder import job_of
from shoal.pool.journal import commands, lease_limits, rows
from shoal.pool.journal.advance import advance, is_due, record_seen
from shoal.pool.journal.steps import JournalStep, act, transaction
from shoal.pool.snapshot import Snapshot
from shoal.pool.spec import PoolSpec
from shoal.state import Store, stamps
from shoal.state.home import file_name
from shoal.state.schema import NodeState, Pool, PoolState

log = logging.getLogger("shoal.pool")

Clock = Callable[[], float]
"""Function that returns seconds since the epoch."""


@dataclass(frozen=True)
class Changes:
    """The changes that one call of `reconcile` has made to a pool.

    Attributes:
        started: Names of the started nodes.
        ended: Names of the ended nodes.
        decided: One sentence for each operation or lease that ended.
        left: Reasons why nodes could not be ended yet, or why the size is not confirmed yet.
    """

    started: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    decided: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """Return the changes as sentences for the log, one sentence for each change."""
        return [*self.decided, *(f"started {name}" for name in self.started), *(f"ended {name}" for name in self.ended)]


def reconcile(store: Store, name: str, *, clock: Clock = time.time) -> Changes:
    """Start the missing nodes and end the surplus nodes of one pool. Return without waiting until the started nodes are
    ready.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    with store.reading() as session:
        snapshot = rows.load(session, name, lock=False)
        shared_now = stamps.shared_now(session, clock())
        spent = bool(lease_limits.spent_leases(session, snapshot, clock()))
    if not is_here(snapshot.pool):
        return Changes()
    spec = PoolSpec.model_validate(snapshot.pool.spec)
    backend = BACKENDS[spec.backend]()
    for node in snapshot.nodes:  # both become names of files and folders
        file_name(node.id)
        file_name(node.name)
    refs = [NodeRef.of(node) for node in snapshot.nodes if node.state is not NodeState.ENDING]
    seen = Seen()
    if snapshot.pool.state is PoolState.UP:
        backend.renew(PoolRef.of(snapshot.pool, len(refs), clock()))
        seen = backend.look(spec, refs)
    abandoned = is_abandoned(snapshot)
    if not abandoned and not spent and not is_due(snapshot, refs, seen, clock(), shared_now=shared_now):
        return Changes()
    with transaction(store, JournalStep.INTEND) as session:
        now = clock()
        # Check again inside the transaction, because a process may have submitted the pool's job again in the meantime.
        if abandoned and is_abandoned(rows.load(session, name)):
            commands.down(session, name, now)
        snapshot = rows.load(session, name)
        rows.adopt(snapshot.pool)
        record_seen(session, snapshot, refs, seen)
        intents = advance(session, snapshot, now)
        ref = PoolRef.of(snapshot.pool, intents.size, now, intents.held)
    if intents.start:
        with act(JournalStep.START):
            backend.start(ref, intents.start)
    left = {}
    if intents.end or intents.is_unconfirmed:
        left = _end(store, backend, ref, intents.end)
    if snapshot.pool.state is PoolState.DOWN:
        _clean_up(store, backend, name, clock())
    return Changes(
        tuple(node.name for node in intents.start),
        tuple(node.name for node in intents.end if node.id not in left),
        tuple(intents.decided),
        tuple(dict.fromkeys(left.values())),
    )


def _end(store: Store, backend: Backend, pool: PoolRef, nodes: list[NodeRef]) -> dict[str, str]:
    """End nodes, record the result, and return what is left, by the id of the node or the pool."""
    with act(JournalStep.END):
        outcome = backend.end(pool, nodes)
    left = {key: problem for key, problem in outcome.items() if problem}
    with transaction(store, JournalStep.CONFIRM) as session:
        rows.forget(session, [node_id for node_id, problem in outcome.items() if problem is None])
        for node_id, problem in left.items():
            rows.note_stuck(session, node_id, problem)
        rows.confirm(session, pool.spec.name, pool.decision, left.get(pool.id))
    return left


def _clean_up(store: Store, backend: Backend, name: str, now: float) -> None:
    """Remove the token of a pool that is down.

    If the pool belonged to a process (an embedded pool) and this process has ended, remove the pool's folder and row,
    and record the end of its jobs, so that they can be submitted again at once.
    """
    with transaction(store, JournalStep.TIDY) as session:
        pool = rows.load(session, name).pool
        if pool.state is not PoolState.DOWN:
            return
        forgotten = owner_has_ended(pool)
        backend.discard(name, everything=forgotten)
        if forgotten:
            why = "the process that started the job, and to which its pool belonged, has ended: submit the job again"
            lease_limits.end_jobs_of_pool(session, name, why, now)
            session.delete(pool)


def is_abandoned(snapshot: Snapshot) -> bool:
    """Return whether a pool is up although nobody needs it any more: it is an embedded pool, the process that it
    belongs to has ended, and no job has a lease on it."""
    if snapshot.pool.state is not PoolState.UP:
        return False
    if any(job_of(lease.holder) is not None for lease in snapshot.leases):
        return False
    return owner_has_ended(snapshot.pool)


def owner_has_ended(pool: Pool) -> bool:
    """Return whether a pool is an embedded pool, and the process that it belongs to has ended."""
    return pool.owner is not None and ProcessId.from_json(pool.owner).known_dead()
