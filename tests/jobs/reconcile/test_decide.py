from __future__ import annotations

from typing import Any

import pytest

from shoal.jobs.journal.attempts import End
from shoal.jobs.reconcile.decide import Cancel, Facts, Silence, Step, View, for_host, for_waiter
from shoal.jobs.timeouts import (
    FAR_HEAD_PATIENCE_S,
    FAR_SUBMISSION_GRACE_S,
    HEAD_PATIENCE_S,
    ORPHAN_GRACE_S,
    SUBMISSION_GRACE_S,
)
from shoal.pool.backends.ray_http import RayJob
from shoal.state.schema import Job, JobState

NOW = 10_000.0
PENDING = Job(id="j", attempt=1, pool="p", state=JobState.PENDING, created_at=0.0, submitter={"pid": 7})
RUNNING = Job(id="j", attempt=1, pool="p", state=JobState.RUNNING)


def decided(job: Job, view: View, silent_for: float = 0.0) -> Step | End:
    return for_waiter(Facts(job, view, NOW, silent_for, last_words=lambda: "ImportError: no shoal"))


@pytest.mark.parametrize("job", [PENDING, RUNNING])
@pytest.mark.parametrize("status", ["PENDING", "RUNNING"])
def test_a_driver_that_runs_is_left_alone(job, status):
    assert decided(job, View(RayJob(status))) is Step.WAIT


def test_a_row_without_a_submission_is_to_be_submitted():
    assert decided(PENDING, View()) is Step.SEND


def test_a_running_job_that_the_head_does_not_know_is_lost():
    assert decided(RUNNING, View()) == End(JobState.FAILED, 'the head of pool "p" does not know the job any more')


@pytest.mark.parametrize(
    ("silence", "said"), [(Silence.POOL_GONE, "went down"), (Silence.HEAD_REPLACED, "got a new head")]
)
def test_a_head_that_is_gone_takes_its_jobs_along(silence, said):
    lost = decided(RUNNING, View(silence=silence))

    assert isinstance(lost, End)
    assert lost.state is JobState.FAILED
    assert said in lost.error


@pytest.mark.parametrize(
    ("silence", "patience"), [(Silence.NO_ANSWER, HEAD_PATIENCE_S), (Silence.NO_CONNECTION, FAR_HEAD_PATIENCE_S)]
)
def test_a_head_that_is_silent_is_given_time(silence, patience):
    view = View(silence=silence)

    assert decided(RUNNING, view, patience - 1) is Step.WAIT
    assert isinstance(decided(RUNNING, view, patience), End)


@pytest.mark.parametrize(
    ("ray_job", "state", "said"),
    [
        (RayJob("STOPPED"), JobState.CANCELLED, "stopped through the head's Job API"),
        (RayJob("FAILED", exit_code=-9), JobState.FAILED, "was killed by SIGKILL, by a person or"),
        (RayJob("FAILED", exit_code=-9, why_ended="no memory"), JobState.FAILED, "was killed by SIGKILL: no memory"),
        (RayJob("FAILED", exit_code=137), JobState.FAILED, "was killed by SIGKILL"),
        (RayJob("FAILED", exit_code=-11), JobState.FAILED, "was killed by SIGSEGV; its log ends with"),
        (RayJob("FAILED", exit_code=1), JobState.FAILED, "ImportError: no shoal"),
        (RayJob("FAILED", "x\nno such actor\n"), JobState.FAILED, "no such actor"),
        (RayJob("FAILED"), JobState.FAILED, "could not be started"),
        (RayJob("SUCCEEDED", exit_code=0), JobState.FAILED, "exit code 0"),
    ],
)
def test_a_driver_that_ended_without_a_word(ray_job, state, said):
    lost = decided(RUNNING, View(ray_job))

    assert isinstance(lost, End)
    assert lost.state is state
    assert said in lost.error


def test_a_waiter_gives_the_submitter_time_to_send():
    def sent_at(created_at: float, admitted_at: float | None = None) -> Step | End:
        job = Job(id="j", attempt=1, state=JobState.PENDING, created_at=created_at, admitted_at=admitted_at)
        return for_waiter(Facts(job, View(), NOW))

    assert sent_at(NOW - SUBMISSION_GRACE_S) is Step.WAIT
    assert sent_at(NOW - SUBMISSION_GRACE_S - 1) is Step.SEND
    assert sent_at(0.0, admitted_at=NOW) is Step.WAIT


UNSENT, QUEUED = {"state": JobState.PENDING}, {"state": JobState.PENDING, "queued_at": 1.0}
SENT = {"state": JobState.PENDING, "admitted_at": NOW - 1}
LONG_SENT = {"state": JobState.PENDING, "admitted_at": NOW - 1 - FAR_SUBMISSION_GRACE_S}
UNKNOWN, FAR, GONE = View(), View(silence=Silence.ELSEWHERE), View(silence=Silence.POOL_GONE)


@pytest.mark.parametrize(
    ("row", "facts", "said"),
    [
        (UNSENT, {"view": UNKNOWN}, Step.WAIT),
        (UNSENT, {"view": UNKNOWN, "submitter_is_gone": True}, "FAILED: the submitter (pid 7) died"),
        (SENT, {"view": UNKNOWN}, Step.WAIT),
        (SENT, {"view": UNKNOWN, "submitter_is_gone": True}, Step.SEND),
        (LONG_SENT, {"view": UNKNOWN}, Step.SEND),
        ({"orphan_after": 9.0}, {"unpolled_for": 9.0 + ORPHAN_GRACE_S}, Step.WAIT),
        ({"orphan_after": 9.0}, {"unpolled_for": 10.0 + ORPHAN_GRACE_S}, "cancel: no process polled the job"),
        ({"orphan_after": 9.0}, {"unpolled_for": None}, Step.WAIT),
        ({"orphan_after": None}, {"unpolled_for": 1e9}, Step.WAIT),
        ({}, {"view": View(silence=Silence.NO_ANSWER)}, Step.WAIT),
        ({}, {"view": FAR}, Step.WAIT),
        (QUEUED, {"view": UNKNOWN}, Step.ADMIT),
        (QUEUED, {"view": FAR}, Step.WAIT),
        (QUEUED, {"view": GONE}, 'FAILED: pool "p" went down while the job was waiting'),
        (QUEUED, {"view": UNKNOWN, "waited_too_long": "too long"}, "FAILED: too long"),
        # The end is decided here even where only another host can reach the pool.
        (QUEUED | {"orphan_after": 9.0}, {"view": FAR, "unpolled_for": 10.0}, "CANCELLED: no process has polled"),
    ],
)
def test_the_clean_up_of_a_host(row: dict[str, Any], facts: dict[str, Any], said: Step | str):
    job = Job(**{"id": "j", "attempt": 1, "pool": "p", "state": JobState.RUNNING, "submitter": {"pid": 7}} | row)

    decision = for_host(Facts(**{"job": job, "view": View(RayJob("RUNNING")), "now": NOW} | facts))

    match decision:
        case End(state, reason):
            assert f"{state.name}: {reason}".startswith(str(said))
        case Cancel(reason):
            assert f"cancel: {reason}".startswith(str(said))
        case _:
            assert decision is said
