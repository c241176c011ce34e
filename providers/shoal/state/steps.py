"""Steps by name: transactions and acts before, in and after which a process may die.

The crash tests hook in at `passing` and try every point of every step. The steps of pools are in
`shoal.pool.journal.steps`, those of jobs in `shoal.jobs.journal.steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from sqlalchemy.orm import Session

from shoal.state.store import Store


class At(StrEnum):
    """Where in a step a process is."""

    BEFORE = "before"
    WRITTEN = "written"
    """In a transaction only: everything is written, nothing committed."""
    AFTER = "after"


def _go_on(step: StrEnum, at: At) -> None:
    """Do nothing, as everywhere but in a crash test."""


passing: Callable[[StrEnum, At], None] = _go_on
"""Called wherever a process passes a point of a step."""


@contextmanager
def transaction(store: Store, step: StrEnum) -> Iterator[Session]:
    """Carry out a step that is one write transaction.

    Raises:
        StoreError: The database refused.
    """
    passing(step, At.BEFORE)
    with store.transaction() as session:
        yield session
        passing(step, At.WRITTEN)
    passing(step, At.AFTER)


@contextmanager
def act(step: StrEnum) -> Iterator[None]:
    """Carry out a step that changes files or the world, and not the store."""
    passing(step, At.BEFORE)
    yield
    passing(step, At.AFTER)
