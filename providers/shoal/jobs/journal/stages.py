"""The stages of an attempt, derived from its row, and which stage may follow which."""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from shoal.state.schema import JOB_ENDED, JobState


class Stage(Enum):
    """Stage of an attempt. The first three are those of the state `pending`, which users see."""

    UNQUEUED = auto()
    """The row exists, and the submitter still stages data and stores credentials."""
    WAITING = auto()
    """The attempt waits in its pool's queue. From now on, any process may send it to the head."""
    SENT = auto()
    """The attempt has left the queue, and its driver has not reported yet."""
    RUNNING = auto()
    ENDED = auto()


NEXT = {
    # A driver may start although the head's answer was lost and the attempt was put back into the queue.
    Stage.UNQUEUED: {Stage.WAITING, Stage.SENT, Stage.RUNNING, Stage.ENDED},
    Stage.WAITING: {Stage.SENT, Stage.RUNNING, Stage.ENDED},
    Stage.SENT: {Stage.WAITING, Stage.RUNNING, Stage.ENDED},
    Stage.RUNNING: {Stage.ENDED},
    Stage.ENDED: set[Stage](),
}
"""Stages that may follow each stage. Every change of a row's stage is made under a lock on the row."""


class Row(Protocol):
    """The columns of an attempt's row that tell its stage."""

    @property
    def state(self) -> JobState:
        """State that users see."""

    @property
    def queued_at(self) -> float | None:
        """Time at which the attempt joined the queue."""

    @property
    def admitted_at(self) -> float | None:
        """Time at which it left the queue."""


def stage_of(row: Row) -> Stage:
    """Return the stage of an attempt."""
    if row.state in JOB_ENDED:
        return Stage.ENDED
    if row.state is JobState.RUNNING:
        return Stage.RUNNING
    if row.admitted_at is not None:
        return Stage.SENT
    return Stage.UNQUEUED if row.queued_at is None else Stage.WAITING


def is_waiting(row: Row) -> bool:
    """Return whether the attempt waits in its pool's queue."""
    return stage_of(row) is Stage.WAITING


def may_become(row: Row, stage: Stage) -> bool:
    """Return whether the attempt may change to a stage."""
    return stage in NEXT[stage_of(row)]
