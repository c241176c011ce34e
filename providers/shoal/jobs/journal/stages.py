"""The life of an attempt: its stage, derived from its row, and the table of the stages that follow each event."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Protocol

from shoal.state.schema import JOB_ENDED, Job, JobState


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


class Event(Enum):
    """What happens to an attempt."""

    QUEUE = auto()
    """The submitter puts the attempt into its pool's queue."""
    ADMIT = auto()
    """A process takes the attempt out of the queue, or past it, to send it to the head."""
    PUT_BACK = auto()
    """The head has not answered, so the attempt waits again."""
    START = auto()
    """The driver begins. It may have been sent although the answer was lost and the attempt was put back."""
    END = auto()
    """The driver, or a process that has found it lost or cancels it, records the end."""


LIFE = {
    (Stage.UNQUEUED, Event.QUEUE): Stage.WAITING,
    (Stage.UNQUEUED, Event.ADMIT): Stage.SENT,
    (Stage.UNQUEUED, Event.START): Stage.RUNNING,
    (Stage.UNQUEUED, Event.END): Stage.ENDED,
    (Stage.WAITING, Event.ADMIT): Stage.SENT,
    (Stage.WAITING, Event.START): Stage.RUNNING,
    (Stage.WAITING, Event.END): Stage.ENDED,
    (Stage.SENT, Event.PUT_BACK): Stage.WAITING,
    (Stage.SENT, Event.START): Stage.RUNNING,
    (Stage.SENT, Event.END): Stage.ENDED,
    (Stage.RUNNING, Event.END): Stage.ENDED,
}
"""Stage after each event. An event that is not here changes nothing. Every change is made under a lock on the row."""


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


def may(row: Row, event: Event) -> bool:
    """Return whether an event changes the stage of the attempt."""
    return (stage_of(row), event) in LIFE


def not_admitted(*, is_queued: bool) -> tuple[Any, ...]:
    """Return conditions of a query for the attempts that wait in a queue, or for those that have not joined one."""
    queued = Job.queued_at.is_not(None) if is_queued else Job.queued_at.is_(None)
    return Job.state == JobState.PENDING, Job.admitted_at.is_(None), queued
