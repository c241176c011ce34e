"""Reconcile a pool: start its missing nodes and end its surplus nodes. Reconciling is safe at any time, repeatedly and
concurrently.

Reconciling has four steps:

1. Read the rows and check the processes, without a lock. Stop here if nothing has to change.
2. In one transaction, write the observed state of the nodes, and which nodes to start and end (the intents).
3. Start and end these nodes.
4. In another transaction, delete the rows of the nodes that have ended, and record which nodes could not be ended.

If the process is killed between two steps, the next run continues from the rows in the database.

A sweep of this host also ends the nodes that have no row in the database.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import select

from shoal.errors import PoolNotFoundError
from shoal.os_processes import ProcessId
from shoal.pool.backends import BACKENDS, Backend, NodeRef, PoolRef, Seen
from shoal.pool.bound_host import is_here, unrecorded
from shoal.pool.holder import Notice, job_of
from shoal.pool.journal import commands, rows, usage
from shoal.pool.journal.advance import advance, is_due, record_seen
from shoal.pool.journal.rows import JournalStep, act, retain, transaction
from shoal.pool.scaling_plan import Snapshot
from shoal.pool.spec import PoolSpec
from shoal.state import Store, stamps
from shoal.state.home import file_name
from shoal.state.schema import Node, NodeState, Pool, PoolState

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
        spent = bool(usage.spent_leases(session, snapshot, clock()))
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
            usage.end_jobs_of_pool(session, name, why, now)
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


_PASSES = 5
"""Largest number of times that one sweep reconciles each pool. Once may not be enough, because the workers are ended
only after their head has ended. More than five times were never needed."""


def sweep(store: Store, *, clock: Clock = time.time) -> list[str]:
    """End the nodes on this host that no pool needs any more, and the nodes that have no row in the database.

    The sweep is safe at any time, repeatedly and concurrently. After an error in one pool, it goes on with the next.
    """
    did: list[str] = []
    with store.reading() as session:
        names = rows.pool_names(session, embedded=True)
    for name in names:
        try:
            did.extend(
                Notice(f"{name}: {each}", Notice.of(each).holder, name) for each in _sweep_one(store, name, clock)
            )
        except Exception as error:
            log.exception("pool %s could not be swept", name)
            did.append(Notice(f"{name}: could not be swept: {type(error).__name__}: {error}", pool=name))
    for backend, node_id in left_over(store):
        with act(JournalStep.CLEAR):
            problem = backend.clear(node_id)
        did.append(f"left-over node {node_id}: {problem or 'ended'}")
    return did


def left_over(store: Store) -> list[tuple[Backend, str]]:
    """Return the nodes that have processes or files on this host, but no row in the store."""
    # The nodes' folders are listed before the rows are read. A node's row is written before its folder is created. So a
    # listed folder without a row does not belong to a node that is about to start, and can be removed.
    backends = [make() for make in BACKENDS.values()]
    found = [(backend, node_id) for backend in backends for node_id in backend.existing()]
    with store.reading() as session:
        known = set(session.scalars(select(Node.id)))
    return [(backend, node_id) for backend, node_id in found if node_id not in known]


def _sweep_one(store: Store, name: str, clock: Clock) -> Iterator[str]:
    with store.reading() as session:
        pool = session.get(Pool, name)
    if pool is not None and pool.state is not PoolState.DOWN and (why := unrecorded(pool)):
        yield why
        return
    changes = Changes()
    for _ in range(_PASSES):
        try:
            changes = reconcile(store, name, clock=clock)
        except PoolNotFoundError:
            # The pool belonged to a process that has ended, so its row was removed, and nothing is left to sweep.
            return
        yield from changes.sentences()
        if changes == Changes():
            with suppress(PoolNotFoundError):
                retain(store, name, clock())
            return
    yield from changes.left
