"""Closing the difference between demand and nodes: one routine, safe to run at any time, by anyone, at once, again.

Four steps: look at the rows and the processes, without a lock, and stop there if nothing has to change; in one
transaction write what was seen and what shall be (intents); act; in another transaction confirm. A process killed
between any two of them leaves rows that the next run goes on from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import select

from shoal.errors import PoolNotFoundError
from shoal.pool.backends import BACKENDS, Backend, NodeRef, PoolRef
from shoal.pool.holder import is_here
from shoal.pool.journal import commands, rows
from shoal.pool.journal.advance import advance, is_due, record_seen
from shoal.pool.journal.retention import retain
from shoal.pool.journal.steps import JournalStep, act, transaction
from shoal.pool.spec import PoolSpec
from shoal.state import Store, stamps
from shoal.state.process import ProcessId
from shoal.state.schema import Node, NodeState, PoolState

log = logging.getLogger("shoal.pool")

_SWEEP_PASSES = 5
"""Ending a node may ask for another pass (a head that is gone takes its workers along); more never helped."""

Clock = Callable[[], float]
"""Seconds since the epoch."""


@dataclass(frozen=True)
class Changes:
    """What one run did.

    Attributes:
        started: Names of nodes.
        ended: Names of nodes.
        decided: What became of operations and leases, a sentence each.
    """

    started: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    decided: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """All of it, a sentence each."""
        return [*self.decided, *(f"started {name}" for name in self.started), *(f"ended {name}" for name in self.ended)]


def reconcile(store: Store, name: str, *, clock: Clock = time.time) -> Changes:
    """Bring one pool's nodes to its demand, as far as that goes now.

    Args:
        store: The state store.
        name: The pool.
        clock: Time, for tests.

    Returns:
        What was begun and what was seen to end.

    Raises:
        PoolNotFoundError: There is no such pool.
    """
    with store.reading() as session:
        snapshot = rows.load(session, name, lock=False)
        shared_now = stamps.shared_now(session, clock())
    if not is_here(snapshot.pool):
        return Changes()
    spec = PoolSpec.model_validate(snapshot.pool.spec)
    backend = BACKENDS[spec.backend]()
    refs = [NodeRef.of(node) for node in snapshot.nodes if node.state is not NodeState.ENDING]
    seen = backend.look(spec, refs)
    orphaned = snapshot.pool.owner is not None and ProcessId.from_json(snapshot.pool.owner).known_dead()
    orphaned = orphaned and snapshot.pool.state is PoolState.UP
    if not orphaned and not is_due(snapshot, refs, seen, clock(), shared_now=shared_now):
        return Changes()
    with transaction(store, JournalStep.INTEND) as session:
        now = clock()
        if orphaned:
            commands.down(session, name, now)
        snapshot = rows.load(session, name)
        rows.adopt(snapshot.pool)
        record_seen(session, snapshot, refs, seen)
        intents = advance(session, snapshot, now)
        ref = PoolRef(PoolSpec.model_validate(snapshot.pool.spec), intents.size, now)
    if intents.start:
        with act(JournalStep.START):
            backend.start(ref, intents.start)
    if intents.end:
        _end(store, backend, ref, intents.end)
    if snapshot.pool.state is PoolState.DOWN:
        _tidy(store, backend, name)
    return Changes(
        tuple(node.name for node in intents.start), tuple(node.name for node in intents.end), tuple(intents.decided)
    )


def _end(store: Store, backend: Backend, pool: PoolRef, nodes: list[NodeRef]) -> None:
    with act(JournalStep.END):
        outcome = backend.end(pool, nodes)
    with transaction(store, JournalStep.CONFIRM) as session:
        rows.forget(session, [node_id for node_id, problem in outcome.items() if problem is None])
        for node_id, problem in outcome.items():
            if problem:
                rows.note_stuck(session, node_id, problem)


def _tidy(store: Store, backend: Backend, name: str) -> None:
    """Remove the token of a pool that is down, and all trace of one that was embedded in a process that has ended."""
    with transaction(store, JournalStep.TIDY) as session:
        pool = rows.load(session, name).pool
        if pool.state is not PoolState.DOWN:
            return
        forgotten = pool.owner is not None and ProcessId.from_json(pool.owner).known_dead()
        backend.discard(name, everything=forgotten)
        if forgotten:
            session.delete(pool)


def sweep(store: Store, *, clock: Clock = time.time) -> list[str]:
    """End what no live demand or operation owns, on this host. Safe at any time, concurrently, twice.

    A pool that raises does not keep the others from their turn.

    Returns:
        What it did, and which pools raised, a sentence each.
    """
    did: list[str] = []
    with store.reading() as session:
        names = rows.pool_names(session, embedded=True)
    for name in names:
        try:
            did.extend(f"{name}: {sentence}" for sentence in _sweep_one(store, name, clock))
        except Exception as error:
            log.exception("pool %s could not be swept", name)
            did.append(f"{name}: could not be swept: {type(error).__name__}: {error}")
    # Folders first, rows second: a node that is there and has no row by then had one before, and lost it.
    backends = [make() for make in BACKENDS.values()]
    found = [(backend, node_id) for backend in backends for node_id in backend.existing()]
    with store.reading() as session:
        known = set(session.scalars(select(Node.id)))
    for backend, node_id in found:
        if node_id not in known:
            with act(JournalStep.CLEAR):
                problem = backend.clear(node_id)
            did.append(f"left-over node {node_id}: {problem or 'ended'}")
    return did


def _sweep_one(store: Store, name: str, clock: Clock) -> Iterator[str]:
    for _ in range(_SWEEP_PASSES):
        try:
            changes = reconcile(store, name, clock=clock)
        except PoolNotFoundError:
            return  # an embedded pool, gone with its process
        yield from changes.sentences()
        if changes == Changes():
            with suppress(PoolNotFoundError):
                retain(store, name, clock())
            return
