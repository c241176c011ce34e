"""The journal's steps: every transaction and every act by which a pool changes, each with a name.

A process may die before, in and after any of them, and whoever sweeps next goes on from there. The crash tests hook in
here and try them all: what changes a pool and is no `JournalStep` is not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from sqlalchemy.orm import Session

from shoal.state import Store


class JournalStep(StrEnum):
    """One step of changing a pool, in the order that an operation goes through them."""

    REQUEST = "request"
    """Transaction: what somebody wants (demand, lease, limits, `down`) and the operation that carries it out."""
    WITHDRAW = "withdraw"
    """Transaction: an operation whose caller gave it up is rolled back."""
    INTEND = "intend"
    """Transaction: what was seen of the nodes, what becomes of the operations, which nodes shall start and end."""
    START = "start"
    """Act: nodes that are planned are started (local ones: a supervisor is spawned for each)."""
    CLAIM = "claim"
    """Transaction, the supervisor's: the node is its own, and being started."""
    REPORT = "report"
    """Transaction, the supervisor's: the node is ready, works, or has failed."""
    END = "end"
    """Act: what there is of nodes that are to end is ended, and looked for until nothing is found."""
    CONFIRM = "confirm"
    """Transaction: nodes that were seen to end are forgotten."""
    TIDY = "tidy"
    """Transaction, with the act in it: a pool that is down loses its token, an embedded one all trace."""
    CLEAR = "clear"
    """Act, the sweep's: a node that is there and has no row is ended."""


class At(StrEnum):
    """Where in a step a process is."""

    BEFORE = "before"
    WRITTEN = "written"
    """In a transaction only: everything is written, nothing committed."""
    AFTER = "after"


def _go_on(step: JournalStep, at: At) -> None:
    """What everybody but a crash test does."""


passing: Callable[[JournalStep, At], None] = _go_on
"""Called wherever a process passes a point of a step."""


@contextmanager
def transaction(store: Store, step: JournalStep) -> Iterator[Session]:
    """A step that is one write transaction.

    Raises:
        StoreError: The database refused.
    """
    passing(step, At.BEFORE)
    with store.transaction() as session:
        yield session
        passing(step, At.WRITTEN)
    passing(step, At.AFTER)


@contextmanager
def act(step: JournalStep) -> Iterator[None]:
    """A step that changes the world and not the store."""
    passing(step, At.BEFORE)
    yield
    passing(step, At.AFTER)
