"""Sweep this host: end the nodes that no pool needs any more, and the nodes that have no row in the database."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress

from sqlalchemy import select

from shoal.errors import PoolNotFoundError
from shoal.pool.backends import BACKENDS, Backend
from shoal.pool.bound_host import unrecorded
from shoal.pool.journal import rows
from shoal.pool.journal.retention import retain
from shoal.pool.journal.steps import JournalStep, act
from shoal.pool.notice import Notice
from shoal.pool.reconcile.rounds import Changes, Clock, reconcile
from shoal.state import Store
from shoal.state.schema import Node, Pool, PoolState

log = logging.getLogger("shoal.pool")

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
