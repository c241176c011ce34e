"""Who waits for a job writes seldom, and never so seldom that the job takes itself for forgotten."""

from __future__ import annotations

import itertools

import pytest

from shoal.jobs.reconcile.look import PollTimer
from shoal.state.schema import Job


def writes(timer: PollTimer, job: Job, *, until: int, ahead: float = 0.0) -> list[int]:
    """The seconds at which a waiter that looks each second writes; `ahead` is by how much its clock is wrong."""
    found = []
    for second in range(until):
        if timer.is_due(job, second + ahead):
            job.last_polled_at = second + ahead
            found.append(second)
    return found


@pytest.mark.parametrize(("orphan_after", "period"), [(900.0, 30), (None, 30), (30.0, 10), (6.0, 2)])
def test_one_waiter_writes_about_once_a_period(orphan_after, period):
    job = Job(last_polled_at=0.0, orphan_after=orphan_after)
    written = writes(PollTimer(), job, until=301)
    # One look more than the period, because the first look after a write begins to count.
    assert written == list(range(period, 301, period + 1))


def test_many_waiters_write_no_more_than_one():
    job = Job(last_polled_at=0.0, orphan_after=900.0)
    waiters = [PollTimer() for _ in range(200)]
    written = sum(waiter.is_due(job, second) and not setattr(job, "last_polled_at", float(second))
                  for second in range(1, 301) for waiter in waiters)  # fmt: skip
    assert written == 10


@pytest.mark.parametrize("ahead", [-3600.0, -20.0, 20.0, 3600.0])
def test_waiters_whose_clocks_differ_do_not_answer_each_other(ahead):
    """By comparing stored times each would take the other's for old, or for one of the future, at every look."""
    job = Job(last_polled_at=0.0, orphan_after=900.0)
    mine, other = PollTimer(), PollTimer()
    written = 0
    for second in range(300):
        for waiter, skew in ((mine, 0.0), (other, ahead)):
            if waiter.is_due(job, second + skew):
                job.last_polled_at = second + skew
                written += 1
    assert written <= 12


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_a_wrong_clock_keeps_a_job_alive(ahead):
    job = Job(last_polled_at=0.0, orphan_after=90.0)
    written = writes(PollTimer(), job, until=301, ahead=ahead)
    assert written[0] <= 30
    assert max(late - soon for soon, late in itertools.pairwise(written)) <= 31


def test_a_clock_that_is_set_back_does_not_stop_the_writing():
    job, timer = Job(last_polled_at=7200.0, orphan_after=90.0), PollTimer()
    assert not timer.is_due(job, 7210.0)
    assert timer.is_due(job, 3600.0)
