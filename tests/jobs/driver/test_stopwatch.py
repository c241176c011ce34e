"""The seconds of each step of a job."""

from __future__ import annotations

import pytest

from shoal.jobs.driver.attempt_context import Stopwatch
from shoal.jobs.results import JobResult
from shoal.state.schema import Job
from tests.support.job_results import result_of


def test_the_steps_add_up_to_the_time_since_the_submission(capsys):
    now = 100.0
    watch = Stopwatch(Job(created_at=10.0, admitted_at=14.0), 16.0, monotonic=lambda: now)
    now += 10
    watch.worked(read_s=1.5, train_s=3.0)
    now += 5
    with watch.scoring():
        now += 2
    now += 1
    times = watch.times()
    assert times.measured() == {"queue": 4, "start": 7.5, "read": 1.5, "train": 3, "score": 2, "upload": 6}
    assert sum(times.measured().values()) == 4 + 2 + 18
    assert capsys.readouterr().out == "seconds: queue 4.0, start 7.5, read 1.5, train 3.0, score 2.0, upload 6.0\n"


def test_steps_that_a_job_does_not_have_are_left_out():
    watch = Stopwatch(Job(created_at=10.0), 10.0)
    watch.worked(train_s=0.0)
    assert watch.times().measured().keys() == {"queue", "start", "train", "upload"}


@pytest.mark.parametrize(
    ("admitted_at", "queue", "start"),
    [(None, 0, 5), (12.0, 2, 3), (9.0, 0, 6), (20.0, 10, 0)],
    ids=["sent at once", "waited", "the clock of another host is behind", "ahead"],
)
def test_the_wait_in_the_queue_is_told_from_the_start(admitted_at, queue, start):
    job = Job(created_at=10.0, admitted_at=admitted_at)
    watch = Stopwatch(job, 15.0)
    watch.worked(train_s=0.0)
    times = watch.times()
    assert (times.queue, times.start) == (queue, start)


def test_a_stored_result_has_the_times():
    times = Stopwatch(Job(created_at=10.0), 10.0).times()
    assert JobResult.model_validate(result_of(times=times).document()).times == times
