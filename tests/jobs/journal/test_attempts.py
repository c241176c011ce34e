from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Mark, Order
from shoal.jobs.journal.owners import TaskTry
from shoal.state import Store
from shoal.state.schema import Job, JobState

ORDER = Order("job", "retrain", "airflow:d/r", {"fingerprint": "q"}, {"api": "a", "gcs": "g"}, 900.0)
FIRST = Key("job", 1)


def asked(store: Store, now: float = 0.0, **changes: object) -> Job:
    return attempts.ask(store, dataclasses.replace(ORDER, **changes), now)


def test_the_first_to_ask_makes_an_attempt(store):
    job = asked(store, 5.0)

    assert (job.id, job.attempt, job.state, job.created_at) == ("job", 1, JobState.PENDING, 5.0)
    assert Key(job.id, job.attempt).submission_id == "job-1"


def test_asking_again_attaches_while_it_is_pending_or_runs(store):
    asked(store)
    assert asked(store, 1.0).attempt == 1
    assert attempts.start(store, FIRST, {}, 2.0)

    again = asked(store, 3.0)

    assert (again.attempt, again.state, again.last_polled_at) == (1, JobState.RUNNING, 3.0)


def test_many_attempts_are_read_and_polled_at_once(either_store, store, monkeypatch):
    monkeypatch.setattr(attempts, "_MOST_KEYS", 2)
    keys = [Key(f"job-{number}", 1) for number in range(5)]
    for key in keys:
        asked(store, job_id=key.job_id, task=TaskTry("train/-1", 1))
    attempts.end(store, keys[0], JobState.FAILED, 1.0, error="why")
    asked(store, job_id="job-1", task=TaskTry("train/-1", 2))

    attempts.touch_all(store, [Mark(key, 100 + place, 1) for place, key in enumerate(keys)], 2.0)

    found = attempts.look_at(store, [*keys, Key("another", 1)])
    assert [found[key].last_polled_at for key in keys] == [0.0, 2.0, 2.0, 2.0, 2.0]
    # What an older try has shown is not recorded.
    assert [found[key].log_shown for key in keys] == [None, None, 102, 103, 104]
    assert attempts.load(store, keys[2]).last_polled_clock is not None


def test_a_result_is_handed_out_until_it_was_collected(store):
    asked(store)
    attempts.end(store, FIRST, JobState.SUCCEEDED, 1.0, result={"rows": 1})

    assert asked(store, 2.0).attempt == 1
    attempts.collect(store, FIRST, 3.0)
    assert asked(store, 4.0).attempt == 2


def test_every_attempt_of_a_job_uses_the_device_of_the_first(store):
    asked(store, gang={"workers": 1, "cpus": 1, "gpus": -1})
    assert attempts.keep_choice(store, FIRST, "uses_gpu", True) is True
    attempts.end(store, FIRST, JobState.FAILED, 1.0, error="why")

    again = asked(store, 2.0, gang={"workers": 1, "cpus": 1, "gpus": -1})

    assert again.gang == {"workers": 1, "cpus": 1, "gpus": 1}  # known in the queue, before the driver starts
    assert attempts.keep_choice(store, Key("job", again.attempt), "uses_gpu", False) is True
    assert attempts.load(store, Key("job", again.attempt)).gang == {"workers": 1, "cpus": 1, "gpus": 1}
    attempts.end(store, Key("job", again.attempt), JobState.FAILED, 3.0, error="why")
    another = asked(store, 4.0, spec={"fingerprint": "another"})
    assert attempts.keep_choice(store, Key("job", another.attempt), "uses_gpu", False) is False


def test_every_attempt_of_a_job_reads_the_versions_that_the_first_has_found(store):
    asked(store)
    assert attempts.keep_choice(store, FIRST, "versions", {"table": 3}) == {"table": 3}
    attempts.end(store, FIRST, JobState.FAILED, 1.0, error="why")

    again = asked(store, 2.0)

    assert again.versions == {"table": 3}
    assert attempts.keep_choice(store, Key("job", again.attempt), "versions", {"table": 4}) == {"table": 3}


@pytest.mark.parametrize(
    ("state", "end", "asks"),
    [
        (JobState.SUCCEEDED, {"result": {"rows": 1}}, {}),
        (JobState.FAILED, {"error": "the label is null", "error_is_permanent": True}, {}),
        (JobState.FAILED, {"error": "a node was lost"}, {"holder": "the next run"}),
    ],
)
def test_only_a_retry_reads_the_versions_of_before(store, state, end, asks):
    asked(store)
    attempts.keep_choice(store, FIRST, "versions", {"table": 3})
    attempts.end(store, FIRST, state, 1.0, **end)
    attempts.collect(store, FIRST, 1.0)

    again = asked(store, 2.0, **asks)

    assert again.attempt == 2 and again.versions is None


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_what_ended_badly_is_tried_anew(store, state):
    asked(store)
    attempts.end(store, FIRST, state, 1.0, error="why")

    assert asked(store, 2.0).attempt == 2
    assert attempts.latest(store, "job").attempt == 2


def test_another_spec_under_the_id_of_a_job_that_runs_is_refused(store):
    asked(store)

    with pytest.raises(InvalidArgumentError, match='"job" is pending with another spec'):
        asked(store, spec={"fingerprint": "other"})


def test_another_spec_is_not_answered_with_an_old_result(store):
    asked(store)
    attempts.end(store, FIRST, JobState.SUCCEEDED, 1.0, result={})

    assert asked(store, spec={"fingerprint": "other"}).attempt == 2


def test_whoever_writes_an_end_first_has_the_last_word(store):
    asked(store)
    attempts.start(store, FIRST, {}, 1.0)

    assert attempts.end(store, FIRST, JobState.CANCELLED, 2.0, error="on request")
    assert not attempts.end(store, FIRST, JobState.SUCCEEDED, 3.0, result={"rows": 1})

    job = attempts.load(store, FIRST)
    assert (job.state, job.error, job.result) == (JobState.CANCELLED, "on request", None)


def test_an_end_decided_on_an_old_look_changes_nothing(store):
    asked(store)
    attempts.start(store, FIRST, {}, 1.0)

    assert not attempts.end(store, FIRST, JobState.FAILED, 2.0, seen={JobState.PENDING}, error="not submitted")
    assert attempts.load(store, FIRST).state is JobState.RUNNING
    assert attempts.end(store, FIRST, JobState.FAILED, 3.0, seen={JobState.RUNNING}, error="killed")


def test_a_driver_that_is_not_wanted_does_not_start(store):
    asked(store)
    assert attempts.start(store, FIRST, {"pid": 1}, 1.0)
    assert attempts.start(store, FIRST, {"pid": 2}, 2.0) is None
    assert attempts.start(store, Key("job", 7), {}, 2.0) is None
    attempts.end(store, FIRST, JobState.CANCELLED, 3.0)
    assert attempts.start(store, FIRST, {"pid": 3}, 4.0) is None
    assert attempts.load(store, FIRST).driver == {"pid": 1}


def test_all_who_ask_at_once_get_the_same_attempt(store):
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: asked(Store()).attempt, range(16)))

    assert answers == [1] * 16


def test_an_unknown_job_is_said_to_be_unknown(store):
    with pytest.raises(JobError, match='job "nobody" does not exist'):
        attempts.latest(store, "nobody")


def test_listing_by_pool_and_state(store):
    for number, pool in enumerate(("a", "b", "a")):
        asked(store, float(number), job_id=f"job{number}", pool=pool)
    attempts.end(store, Key("job0", 1), JobState.FAILED, 9.0)

    def listed(pool: str | None = None, states: tuple[JobState, ...] = (), limit: int = 10) -> list[str]:
        return [job.id for job in attempts.newest(store, pool=pool, states=states, limit=limit)]

    assert listed() == ["job2", "job1", "job0"]
    assert listed(pool="a") == ["job2", "job0"]
    assert listed(states=(JobState.FAILED,)) == ["job0"]
    assert listed(limit=1) == ["job2"]
