"""The stage of an attempt, from the three columns that tell it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shoal.jobs.journal.stages import LIFE, Event, Stage, may, stage_of
from shoal.state.schema import JOB_ENDED, JobState


def row(state: JobState, queued_at: float | None = None, admitted_at: float | None = None) -> SimpleNamespace:
    return SimpleNamespace(state=state, queued_at=queued_at, admitted_at=admitted_at)


@pytest.mark.parametrize(
    ("attempt", "stage"),
    [
        (row(JobState.PENDING), Stage.UNQUEUED),
        (row(JobState.PENDING, 1.0), Stage.WAITING),
        (row(JobState.PENDING, 1.0, 2.0), Stage.SENT),
        (row(JobState.PENDING, None, 2.0), Stage.SENT),
        (row(JobState.RUNNING, 1.0, 2.0), Stage.RUNNING),
        *[(row(state, 1.0, 2.0), Stage.ENDED) for state in JOB_ENDED],
    ],
)
def test_the_stage_of_a_row(attempt: SimpleNamespace, stage: Stage) -> None:
    assert stage_of(attempt) is stage
    assert {each for each in Event if may(attempt, each)} == {event for of, event in LIFE if of is stage}


def test_nothing_follows_the_end_and_only_a_sent_attempt_goes_back() -> None:
    assert Stage.ENDED not in {stage for stage, _ in LIFE}
    assert {stage for (stage, _), following in LIFE.items() if following is Stage.WAITING} == {
        Stage.UNQUEUED,
        Stage.SENT,
    }
    assert {stage for stage, event in LIFE if event is Event.END} == set(Stage) - {Stage.ENDED}
