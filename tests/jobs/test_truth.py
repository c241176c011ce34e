from __future__ import annotations

import pytest

from shoal.jobs.client import RayJob
from shoal.jobs.truth import HEAD_PATIENCE_S, Lost, Missing, Silence, View, judge
from shoal.jobs.watchdog import Reason, why_end
from shoal.state.schema import Job, JobState

PENDING = Job(id="j", attempt=1, pool="p", state=JobState.PENDING)
RUNNING = Job(id="j", attempt=1, pool="p", state=JobState.RUNNING)


def judged(job: Job, view: View, silent_for: float = 0.0) -> Lost | Missing | None:
    return judge(job, view, silent_for=silent_for, last_words=lambda: "ImportError: no shoal")


@pytest.mark.parametrize("job", [PENDING, RUNNING])
@pytest.mark.parametrize("status", ["PENDING", "RUNNING"])
def test_a_driver_that_runs_is_left_alone(job, status):
    assert judged(job, View(RayJob(status))) is None


def test_a_row_without_a_submission_is_to_be_submitted():
    assert judged(PENDING, View()) is Missing.SUBMISSION


def test_a_running_job_that_the_head_does_not_know_is_lost():
    assert judged(RUNNING, View()) == Lost(JobState.FAILED, 'the head of pool "p" has forgotten the job')


@pytest.mark.parametrize(
    ("silence", "said"), [(Silence.POOL_GONE, "went down"), (Silence.HEAD_REPLACED, "got a new head")]
)
def test_a_head_that_is_gone_takes_its_jobs_along(silence, said):
    lost = judged(RUNNING, View(silence=silence))

    assert isinstance(lost, Lost)
    assert lost.state is JobState.FAILED
    assert said in lost.reason


def test_a_head_that_is_silent_is_given_time():
    view = View(silence=Silence.NO_ANSWER)

    assert judged(RUNNING, view, HEAD_PATIENCE_S - 1) is None
    assert isinstance(judged(RUNNING, view, HEAD_PATIENCE_S), Lost)


@pytest.mark.parametrize(
    ("ray_job", "state", "said"),
    [
        (RayJob("STOPPED"), JobState.CANCELLED, "stopped through Ray"),
        (RayJob("FAILED", exit_code=-9), JobState.FAILED, "was killed"),
        (RayJob("FAILED", exit_code=137), JobState.FAILED, "was killed"),
        (RayJob("FAILED", exit_code=1), JobState.FAILED, "ImportError: no shoal"),
        (RayJob("FAILED", "x\nno such actor\n"), JobState.FAILED, "no such actor"),
        (RayJob("FAILED"), JobState.FAILED, "could not be run"),
        (RayJob("SUCCEEDED", exit_code=0), JobState.FAILED, "exit code 0"),
    ],
)
def test_a_driver_that_ended_without_a_word(ray_job, state, said):
    lost = judged(RUNNING, View(ray_job))

    assert isinstance(lost, Lost)
    assert lost.state is state
    assert said in lost.reason


class TestWatchdog:
    def job(self, **fields: object) -> Job:
        known = {"state": JobState.RUNNING, "orphan_after": 900.0, "asked_at": 100.0, "started_at": 100.0}
        return Job(id="j", attempt=1, **(known | fields))

    def test_a_job_that_is_asked_about_goes_on(self):
        assert why_end(self.job(), 1000.0, None) is None

    def test_an_orphan_ends_itself(self):
        reason = why_end(self.job(), 1000.1, None)

        assert reason is not None
        assert reason.state is JobState.CANCELLED
        assert "nobody has asked about it for 900 s" in reason.text

    def test_a_detached_job_does_not(self):
        assert why_end(self.job(orphan_after=None), 1e9, None) is None

    def test_its_time_is_up(self):
        assert why_end(self.job(), 160.0, 60.0) is None
        reason = why_end(self.job(), 161.0, 60.0)

        assert reason is not None
        assert reason.state is JobState.FAILED
        assert "timeout=60 s" in reason.text

    def test_its_row_says_so(self):
        job = self.job(state=JobState.CANCELLED, error="on request")

        assert why_end(job, 101.0, None) == Reason(JobState.CANCELLED, "on request")
        assert why_end(None, 101.0, None) is not None
