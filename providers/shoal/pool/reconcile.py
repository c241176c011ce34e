"""Closing the difference between demand and nodes: one routine, safe to run at any time, by anyone, at once, again.

Four steps: look at the processes; in one transaction write what was seen and what shall be (intents); act; in another
transaction confirm. A process killed between any two of them leaves rows that the next run goes on from.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import select

from shoal.errors import PoolNotFoundError
from shoal.pool import journal
from shoal.pool.backends import BACKENDS, Backend, NodeRef
from shoal.pool.backends.local import token_path
from shoal.pool.holder import host
from shoal.pool.processes import ProcessId
from shoal.state import Store
from shoal.state.schema import Node, NodeState, PoolState

_SWEEP_PASSES = 5
"""Ending a node may ask for another pass (a head that is gone takes its workers along); more never helped."""

Clock = Callable[[], float]
"""Seconds since the epoch."""


@dataclass(frozen=True)
class Changes:
    """What one run did: names of nodes."""

    started: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


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
        snapshot = journal.load(session, name, lock=False)
    if snapshot.pool.host != host():
        return Changes()
    backend = BACKENDS[snapshot.pool.spec["backend"]]()
    claimed = [NodeRef.of(node) for node in snapshot.nodes if node.supervisor and node.state is not NodeState.ENDING]
    losses = {node.id: (node, reason) for node in claimed if (reason := backend.lost(node))}
    orphaned = snapshot.pool.owner is not None and not ProcessId.from_json(snapshot.pool.owner).alive()
    with store.transaction() as session:
        now = clock()
        if orphaned and snapshot.pool.state is PoolState.UP:
            journal.request_down(session, name, now)
        snapshot = journal.load(session, name)
        journal.record_losses(session, snapshot, losses)
        start, end = journal.advance(session, snapshot, now)
    for node in start:
        backend.start(node)
    if end:
        _end(store, backend, end)
    _tidy(store, name)
    return Changes(tuple(node.name for node in start), tuple(node.name for node in end))


def _end(store: Store, backend: Backend, nodes: list[NodeRef]) -> None:
    outcome = backend.end(nodes)
    with store.transaction() as session:
        journal.forget(session, [node_id for node_id, problem in outcome.items() if problem is None])
        for node_id, problem in outcome.items():
            if problem:
                journal.note_stuck(session, node_id, problem)


def _tidy(store: Store, name: str) -> None:
    """Remove the token of a pool that is down, and all trace of one that was embedded in a process that has ended."""
    with store.transaction() as session:
        pool = journal.load(session, name).pool
        if pool.state is not PoolState.DOWN:
            return
        token_path(name).unlink(missing_ok=True)
        if pool.owner is not None and not ProcessId.from_json(pool.owner).alive():
            session.delete(pool)
            shutil.rmtree(token_path(name).parent, ignore_errors=True)


def sweep(store: Store, *, clock: Clock = time.time) -> list[str]:
    """End what no live demand or operation owns, on this host. Safe at any time, concurrently, twice.

    Returns:
        What it did, a sentence each.
    """
    did: list[str] = []
    with store.reading() as session:
        names = journal.pool_names(session, embedded=True)
    for name in names:
        for _ in range(_SWEEP_PASSES):
            try:
                changes = reconcile(store, name, clock=clock)
            except PoolNotFoundError:
                break  # an embedded pool, gone with its process
            did += [f"{name}: started {node}" for node in changes.started]
            did += [f"{name}: ended {node}" for node in changes.ended]
            if changes == Changes():
                break
    # Folders first, rows second: a node that is there and has no row by then had one before, and lost it.
    backends = [make() for make in BACKENDS.values()]
    found = [(backend, node_id) for backend in backends for node_id in backend.existing()]
    with store.reading() as session:
        known = set(session.scalars(select(Node.id)))
    for backend, node_id in found:
        if node_id not in known:
            problem = backend.end([NodeRef(node_id, node_id, "", 0, None)])[node_id]
            did.append(f"left-over node {node_id}: {problem or 'ended'}")
    return did
