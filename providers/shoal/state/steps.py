"""Named steps: every transaction and action before, during or after which a process may die.

The crash tests replace `passing` to kill a process at every point of every step. The steps of pools are in
`shoal.pool.journal.steps`, the steps of jobs in `shoal.jobs.journal.steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from sqlalchemy.orm import Session

from shoal.state.store import Store


class At(StrEnum):
    """A point of a step that a process passes."""

    BEFORE = "before"
    WRITTEN = "written"
    """Only in transactions: everything is written, but not yet committed."""
    AFTER = "after"


def _go_on(step: StrEnum, at: At) -> None:
    """Do nothing. This is the default of `passing`; only the crash tests replace it."""


passing: Callable[[StrEnum, At], None] = _go_on
"""Function that is called at each point of each step."""


@contextmanager
def transaction(store: Store, step: StrEnum) -> Iterator[Session]:
    """Run a block as a step that is one write transaction.

    Raises:
        StoreError: The database reported an error.
    """
    passing(step, At.BEFORE)
    with store.transaction() as session:
        yield session
        passing(step, At.WRITTEN)
    passing(step, At.AFTER)


@contextmanager
def act(step: StrEnum) -> Iterator[None]:
    """Run a block as a step that changes files, processes or other systems, but not the store."""
    passing(step, At.BEFORE)
    yield
    passing(step, At.AFTER)
