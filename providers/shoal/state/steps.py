"""Name each transaction and each action on files or processes, so that crash tests can kill a process at these points.

Such a named transaction or action is called a step. A process may be killed before, during or after each step, and the
next process has to continue from there. The crash tests check that it can: they replace the function `passing` by one
that kills the process at a chosen point of a step. The names of the steps of pools are in `shoal.pool.journal.rows`,
those of the steps of jobs in `shoal.jobs.journal.steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from sqlalchemy.orm import Session

from shoal.state.store import Store


class At(StrEnum):
    """Points of a step (a named transaction or action) at which the crash tests may kill the process."""

    BEFORE = "before"
    WRITTEN = "written"
    """The transaction has written everything, but has not committed yet. Actions do not have this point."""
    AFTER = "after"


def _go_on(step: StrEnum, at: At) -> None:
    """Do nothing. Crash tests replace this function by a function that kills the calling process."""


passing: Callable[[StrEnum, At], None] = _go_on
"""Function that every process calls at each point of each step."""


@contextmanager
def transaction(store: Store, step: StrEnum) -> Iterator[Session]:
    """Run a ``with`` block in a write transaction. Crash tests can kill the calling process before, during or after the
    transaction.
    """
    passing(step, At.BEFORE)
    with store.transaction() as session:
        yield session
        passing(step, At.WRITTEN)
    passing(step, At.AFTER)


@contextmanager
def act(step: StrEnum) -> Iterator[None]:
    """Run a ``with`` block that acts on files or processes. Crash tests can kill the calling process before or after
    the block.
    """
    passing(step, At.BEFORE)
    yield
    passing(step, At.AFTER)
