"""Which job a try of a workflow engine's task gets: that of an earlier try, whatever its spec renders to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal import jobs
from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs import FlowTask, JobHandle, TaskTry
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.reconcile import acts
from shoal.state import Store
from shoal.state.schema import Job, JobState
from tests.support.job_results import result_of
from tests.support.job_store import POOL

RUN = "airflow:dag/run"


def submit(spec, head, number: int, *, rounds: int = 100, key: str = "train/-1", **task) -> JobHandle:
    """What a try of the task submits; another `rounds` stands for a template with another value."""
    return jobs.submit(
        spec.on_pool(POOL).model_copy(update={"n_estimators": rounds}),
        holder=RUN,
        key=key,
        task=TaskTry(key, number, **task),
        endpoint_of=lambda name: head.endpoint,
    )


def row(handle: JobHandle) -> Job:
    return attempts.load(Store(), Key(handle.job_id, handle.attempt))


def runs(handle: JobHandle) -> None:
    attempts.start(Store(), Key(handle.job_id, handle.attempt), {}, 1.0)


def succeeds(handle: JobHandle) -> None:
    runs(handle)
    result = result_of(model_path=__file__).document()
    attempts.end(Store(), Key(handle.job_id, handle.attempt), JobState.SUCCEEDED, 2.0, result=result)


def same(one: JobHandle, other: JobHandle) -> bool:
    return (one.job_id, one.attempt) == (other.job_id, other.attempt)


@pytest.mark.parametrize("state", ["queued", "running", "succeeded"])
def test_a_retry_with_another_rendering_of_the_spec_finds_the_job_of_its_task(store, head, spec, state):
    first = submit(spec, head, 1)
    {"queued": lambda _: None, "running": runs, "succeeded": succeeds}[state](first)

    retry = submit(spec, head, 2, rounds=101)

    assert same(retry, first)
    assert head.submissions == 1
    assert row(retry).task_try == 2
    assert len(jobs.list_jobs()) == 1


def test_the_older_try_leaves_the_job_to_the_newer_one(store, head, spec):
    first = submit(spec, head, 1)
    runs(first)
    submit(spec, head, 2, rounds=101)

    assert not first.cancel("ended late", unless_resubmitted=True)
    assert row(first).state is JobState.RUNNING


def test_a_job_of_another_task_is_not_taken_over(store, head, spec):
    other = submit(spec, head, 1, key="train/1")
    assert not same(submit(spec, head, 2), other)
    assert row(other).state is JobState.PENDING


def test_a_retry_takes_the_result_that_an_earlier_try_could_not_store(store, head, spec):
    """Until a user clears the task."""
    first = submit(spec, head, 1)
    succeeds(first)
    assert first.wait(on_log=None)

    for number in (2, 3):
        retry = submit(spec, head, number, rounds=100 + number)
        assert same(retry, first) and retry.wait(on_log=None) == first.wait(on_log=None)

    assert head.submissions == 1
    assert not same(submit(spec, head, 4, cleared=3), first)


@pytest.mark.parametrize("task", [{"cleared": 1}, {"durable": False}], ids=["cleared", "not durable"])
@pytest.mark.parametrize("rounds", [100, 101])
def test_a_cleared_task_and_one_that_is_not_durable_end_the_running_job_and_train_anew(store, head, spec, task, rounds):
    first = submit(spec, head, 1)
    runs(first)

    again = submit(spec, head, 2, rounds=rounds, **task)

    assert not same(again, first)
    assert row(first).state is JobState.CANCELLED
    assert head.stops == [f"{first.job_id}-1"]
    runs(again)
    assert same(submit(spec, head, 3, cleared=1), again)  # a retry after the clear


@pytest.mark.parametrize("task", [{"cleared": 1}, {"durable": False}], ids=str)
def test_a_cleared_task_and_one_that_is_not_durable_do_not_take_a_result(store, head, spec, task):
    first = submit(spec, head, 1)
    succeeds(first)
    assert not same(submit(spec, head, 2, **task), first)


@pytest.mark.parametrize("rounds", [100, 101])
@pytest.mark.parametrize("durable", [True, False])
def test_an_older_try_that_comes_back_takes_nothing_from_the_newer_one(store, head, spec, rounds, durable):
    newer = submit(spec, head, 2)
    runs(newer)
    with pytest.raises(JobError, match="belongs to try 2 of this task, and this is try 1"):
        submit(spec, head, 1, rounds=rounds, durable=durable)
    # Nor if it has looked for the task's jobs before the newer try submitted its job.
    with pytest.raises(JobError, match="belongs to try 2"):
        attempts.join(Store(), Key(newer.job_id, newer.attempt), 1.0, TaskTry("train/-1", 1))
    assert (row(newer).state, row(newer).task_try, len(jobs.list_jobs())) == (JobState.RUNNING, 2, 1)
    assert newer.cancel("the task was marked", unless_resubmitted=True)


def test_a_job_that_was_never_sent_is_replaced_if_the_spec_has_changed(store, head, spec, monkeypatch):
    """The credentials of such a job are lost with the process that submitted it."""
    with monkeypatch.context() as patched:
        patched.setattr(acts, "send", lambda target, supplies: True)  # killed before it sends the job
        first = submit(spec, head, 1)
    assert row(first).queued_at is None

    retry = submit(spec, head, 2, rounds=101)

    assert row(first).state is JobState.CANCELLED
    assert head.submissions == 1 and list(head.jobs) == [f"{retry.job_id}-1"]


def test_a_lost_job_is_not_taken_over(store, head, spec):
    first = submit(spec, head, 1)
    runs(first)
    head.jobs[f"{first.job_id}-1"].status = "FAILED"

    retry = submit(spec, head, 2, rounds=101)

    assert not same(retry, first)
    with pytest.raises(JobError):
        first.wait(on_log=None)


@pytest.mark.parametrize("state", ["queued", "running", "succeeded"])
def test_a_retry_with_a_corrected_function_ends_the_old_job_and_trains_anew(store, head, spec, state):
    """The function has no part in the fingerprint, so both jobs have the same one."""
    first = submit(spec, head, 1, digest="wrong")
    {"queued": lambda _: None, "running": runs, "succeeded": succeeds}[state](first)

    retry = submit(spec, head, 2, digest="corrected")

    assert (retry.job_id, retry.attempt) == (first.job_id, 2)
    assert row(first).state is (JobState.SUCCEEDED if state == "succeeded" else JobState.CANCELLED)
    runs(retry)
    assert same(submit(spec, head, 3, digest="corrected"), retry)
    succeeds(retry)
    assert same(submit(spec, head, 4, digest="corrected"), retry)


def test_another_function_in_the_same_try_is_refused(store, head, spec):
    """Two Airflows with the same id, whose scheduled runs have the same names."""
    first = submit(spec, head, 1, digest="staging")
    runs(first)

    with pytest.raises(InvalidArgumentError, match=r"another function or other arguments.*\[shoal\] deployment"):
        submit(spec, head, 1, rounds=101, digest="production")
    with pytest.raises(InvalidArgumentError, match=r"\[shoal\] deployment"):
        attempts.join(Store(), Key(first.job_id, first.attempt), 1.0, TaskTry("train/-1", 1, digest="production"))

    assert row(first).state is JobState.RUNNING
    succeeds(first)
    assert not same(submit(spec, head, 1, digest="production"), first)


@pytest.mark.parametrize(("before", "now"), [(None, "a"), ("a", None)], ids=["older shoal", "resumed"])
def test_a_job_whose_function_is_not_known_is_taken_over(store, head, spec, before, now):
    first = submit(spec, head, 1, digest=before)
    runs(first)
    assert same(submit(spec, head, 2, digest=now), first)
    assert row(first).task_digest == "a"


def flow_task(spec, head, flow_try: str, run: str, *, holder: str = "prefect:run", job_id=None, **task) -> JobHandle:
    """What a task run of a flow run submits."""
    config = spec.run_config.model_copy(update={"pool_name": POOL, "job_id": job_id})
    return jobs.submit(
        spec.model_copy(update={"run_config": config}),
        holder=holder,
        task=FlowTask("root", holder, flow_try, run, {}, **task),
        endpoint_of=lambda name: head.endpoint,
    )


def test_equal_task_runs_have_a_job_each_in_every_try_of_the_flow_run(either_store, store, head, spec):
    def together(flow_try: str) -> set[str]:
        with ThreadPoolExecutor(3) as threads:
            found = threads.map(lambda number: flow_task(spec, head, flow_try, f"{flow_try}-{number}"), range(3))
        return {handle.job_id for handle in found}

    first = together("one")
    assert len(first) == 3
    assert together("two") == first
    assert together("two") == first  # retries of the task runs
    assert len(jobs.list_jobs()) == 3


def test_a_repeated_flow_run_attaches_to_a_running_job_and_tries_a_failed_one_again(store, head, spec):
    first = flow_task(spec, head, "one", "a")
    runs(first)
    second = flow_task(spec, head, "two", "b", holder="prefect:new run of the subflow")
    assert same(second, first) and row(second).holder == "prefect:new run of the subflow"
    assert not first.cancel("ended late", unless_resubmitted=True)

    attempts.end(Store(), Key(first.job_id, 1), JobState.FAILED, 2.0, error="why")
    other = flow_task(spec, head, "two", "c")
    again = flow_task(spec, head, "two", "b")
    assert (again.job_id, again.attempt) == (first.job_id, 2)
    assert other.job_id != first.job_id


@pytest.mark.parametrize("ends", [runs, succeeds])
@pytest.mark.parametrize("changed", [{"anew": True}, {"digest": "corrected"}], ids=["refresh", "corrected"])
def test_a_repeated_flow_run_trains_anew_if_it_is_told_to_or_has_another_function(store, head, spec, ends, changed):
    first = flow_task(spec, head, "one", "a", digest="wrong")
    ends(first)
    task = {"digest": "wrong", **changed}
    again = flow_task(spec, head, "two", "b", **task)
    assert not same(again, first)
    assert same(flow_task(spec, head, "two", "b", **task), again)


def test_equal_task_runs_share_the_job_whose_id_the_user_has_chosen(store, head, spec):
    first = flow_task(spec, head, "one", "a", job_id="mine")
    succeeds(first)
    assert first.wait(on_log=None)
    assert same(flow_task(spec, head, "one", "b", job_id="mine"), first)
    assert flow_task(spec.model_copy(update={"label_col": "z"}), head, "two", "c", job_id="mine").attempt == 2
