"""The events about models and jobs, from real task runs; the server's automations react to them in `test_served.py`."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from prefect import flow
from prefect.logging import get_run_logger

from shoal import models
from shoal.errors import InvalidArgumentError, JobCancelledError, JobFailedError
from shoal.jobs import StaleModel, WaitingJob
from shoal.prefect import (
    adistributed_train,
    apromote_model,
    batch_predict,
    distributed_train,
    emit_alerts,
    job_task,
    many_models,
    promote_model,
    reports,
    retry_unless_permanent,
    tune,
)
from tests.support.job_results import decided, result_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server

SPEC = {
    "dataset": {"paths": ["x.parquet"]},
    "input_cols": ["x"],
    "label_col": "y",
    "register": {"model": "delays", "metric": "rmse", "holdout": {"paths": ["h.parquet"]}},
}


@pytest.fixture
def sent(server, fresh_home, monkeypatch):
    """The events that were sent, as Prefect has made them."""
    sent = []
    emit = reports.emit_event
    monkeypatch.setattr(reports, "emit_event", lambda *args, **kwargs: sent.append(emit(*args, **kwargs)))
    return sent


class Job:
    """A job that ends as a test wants."""

    job_id, attempt, was_collected = "job", 1, False

    def __init__(self, outcome) -> None:
        self.outcome = outcome

    def wait(self, **_):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def ends(monkeypatch):
    """Sets how the next job ends."""

    def as_(outcome) -> None:
        monkeypatch.setattr("shoal.prefect.job_task.submit", lambda *_, **__: Job(outcome))

    return as_


def result(promoted: bool):
    return result_of(
        promoted=promoted,
        model_version="7",
        metrics={"holdout-rmse": 17.5, "eval-auc": float("nan")},
        decision={"reason": "better" if promoted else "champion_not_beaten", "sentence": "decided"},
        champion={"version": "6", "value": 18.0},
    )


@flow
def train(spec=SPEC):
    return distributed_train(spec, return_state=True).name


@flow
async def atrain(spec=SPEC):
    return (await adistributed_train(spec, return_state=True)).name


@pytest.mark.parametrize("promoted", [True, False])
def test_a_training_sends_what_became_of_its_model(sent, ends, promoted):
    ends(result(promoted))
    assert train() == "Completed" == asyncio.run(atrain())
    event, twins = sent
    outcome = "promoted" if promoted else "kept"
    assert event.event == twins.event == f"shoal.model.{outcome}"
    assert event.resource.id == "shoal.model.delays"
    assert event.payload == twins.payload
    assert (event.payload["version"], event.payload["promoted"], event.payload["sentence"]) == (
        "7",
        promoted,
        "decided",
    )
    assert event.payload["metrics"] == {"holdout-rmse": 17.5, "eval-auc": "NaN"}
    assert event.payload["subject"] == f"{outcome}: delays version 7, rmse 17.5"
    assert event.payload["champion"] == {"version": "6", "value": 18.0, "unseen_rows": None}


DATA = {"paths": ["/x.parquet"]}
FIELDS = {"dataset": DATA, "input_cols": ["x"], "label_col": "y"}
SEARCH = {
    "best_params": {"eta": 0.1}, "best_value": 0.25, "best_trial": 3, "metric": "logloss", "direction": "minimize",
    "trials": {"complete": 3, "failed": 1}, "study": 1,
}  # fmt: skip
PARTS = {"partitions": {"succeeded": 4, "failed": 1}, "failed_partitions": [{"key": "3", "cause": "no sales"}]}
KINDS = [
    # call of the task, fields of the result, outcome, key of the report, name of the model, end of the text
    (lambda: batch_predict("models:/delays@champion", DATA, "/out"),
     {"rows": 12, "output_path": "/out", "model_uri": "models:/delays/7"}, "predicted", "shoal-predictions-delays",
     "delays", "delays: 12 rows with models:/delays/7, written to /out"),
    (lambda: tune({"eta": [0.1, 0.3]}, FIELDS), {"search": SEARCH}, "trained", "shoal-training",
     "search for xgboost: y", "with eta=0.1 in trial 3 (3 complete, 1 failed); the model is not registered"),
    (lambda: many_models(DATA, "k", estimator={"input_cols": ["x"], "label_col": "y"}), PARTS, "trained",
     "shoal-training", "xgboost by k", "1 of 5 partitions have failed: 3: no sales; the model is not registered"),
]  # fmt: skip


def test_every_kind_of_job_sends_its_outcome_and_stores_its_report_also_of_a_failure(sent, ends, monkeypatch):
    stored = []
    monkeypatch.setattr(
        reports._artifacts,
        "create_markdown_artifact",
        lambda text, key, description, **_: stored.append((text, key, description)),
    )

    @flow
    def run():
        for call, fields, *_ in KINDS:
            ends(result_of(**fields))
            call()
            ends(JobFailedError("no column x", permanent=True))
            with pytest.raises(JobFailedError):
                call()

    run()
    for (_, _, outcome, key, model, end), events, said in zip(KINDS, batched(sent), batched(stored), strict=True):
        assert [event.event for event in events] == [f"shoal.model.{outcome}", "shoal.model.failed"]
        assert {event.resource.id for event in events} == {f"shoal.model.{model}"}
        assert events[0].payload["text"].endswith(end)
        assert events[1].payload["text"] == f"failed    {model}: no column x"
        assert [key for _, key, _ in said] == [key, key]
        assert [line for _, _, line in said] == [event.payload["text"] for event in events]
        assert f": {outcome}\n\n" in said[0][0] and said[1][0].endswith(": failed\n\nno column x")


def batched(found: list) -> list:
    return [found[place : place + 2] for place in range(0, len(found), 2)]


@pytest.fixture
def warned(monkeypatch):
    """The warnings about retries that are refused, which the log of the run gets, too."""
    warned = []

    def logger():
        real = get_run_logger()  # raises an error outside of a run
        warning = lambda text, *args: (warned.append(text % args), real.warning(text, *args))  # noqa: E731
        return SimpleNamespace(info=real.info, warning=warning)

    monkeypatch.setattr(job_task, "get_run_logger", logger)
    return warned


async def only_workers(task, task_run, state):
    """A condition of a user's own."""
    return retry_unless_permanent(task, task_run, state) and "worker" in str(state.data)


WOULD_FAIL, BY_USER = "a retry would fail in the same way", "a user has cancelled the job"
FAILURES = [
    # error, condition (None: that of the task), tries, reason why there is no further one
    (JobFailedError("job failed: a disk is full"), None, 2, None),
    (JobFailedError("job failed: no column", permanent=True), None, 1, WOULD_FAIL),
    (JobCancelledError("job was cancelled: no process has polled it"), None, 2, None),
    (JobCancelledError("job was cancelled: on request", permanent=True), None, 1, BY_USER),
    (JobFailedError("job failed: a worker was lost"), only_workers, 2, None),
    (JobFailedError("job failed: a disk is full"), only_workers, 1, None),
    (JobFailedError("job failed: no column", permanent=True), only_workers, 1, WOULD_FAIL),
]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failure_is_sent_once_and_a_refused_retry_is_logged(sent, warned, monkeypatch, is_async):
    tries = []

    def next_job_ends_with(error) -> None:
        monkeypatch.setattr("shoal.prefect.job_task.submit", lambda *_, **__: tries.append(str(error)) or Job(error))

    @flow
    def train():
        for error, condition, *_ in FAILURES:
            next_job_ends_with(error)
            retried = distributed_train.with_options(retries=1, retry_condition_fn=condition)
            assert retried(SPEC, return_state=True).is_failed()

    @flow
    async def atrain():
        for error, condition, *_ in FAILURES:
            next_job_ends_with(error)
            retried = adistributed_train.with_options(retries=1, retry_condition_fn=condition)
            assert (await retried(SPEC, return_state=True)).is_failed()

    asyncio.run(atrain()) if is_async else train()
    assert tries == [str(error) for error, _, number, _ in FAILURES for _ in range(number)]
    assert [event.event for event in sent] == ["shoal.model.failed"] * len(FAILURES)
    assert [event.payload["text"] for event in sent] == [f"failed    delays: {error}" for error, *_ in FAILURES]
    assert warned == [f"the task is not retried, because {why}: {error}" for error, *_, why in FAILURES if why]


class Endless(Job):
    """A job that runs until it is cancelled."""

    def __init__(self) -> None:
        super().__init__(None)
        self.runs, self.cancelled, self.reasons = threading.Event(), threading.Event(), []

    def wait(self, **_):
        self.runs.set()
        wait_until(self.cancelled.is_set, "the job to be cancelled", 60)  # Prefect interrupts no single long wait
        raise JobCancelledError("job was cancelled")

    def cancel(self, reason, *, unless_resubmitted):
        self.reasons.append(reason)
        self.cancelled.set()


@pytest.fixture
def endless(monkeypatch):
    """The job that each training submits."""
    job = Endless()
    monkeypatch.setattr("shoal.prefect.job_task.submit", lambda *_, **__: job)
    return job


def test_a_cancelled_async_training_cancels_its_job_and_sends_nothing(sent, endless):

    @flow
    async def cancels():
        training = asyncio.ensure_future(adistributed_train(SPEC))
        assert await asyncio.to_thread(endless.runs.wait, 60)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training

    asyncio.run(cancels())
    assert (endless.reasons, sent) == (["its Prefect run was cancelled"], [])


@pytest.mark.parametrize("where", ["task", "async task", "flow"])
def test_the_job_of_a_run_that_times_out_says_so(sent, endless, where):
    async def train():
        await adistributed_train.with_options(timeout_seconds=0.2)(SPEC)

    def train_here():
        distributed_train.with_options(timeout_seconds=0.2 if where == "task" else None)(SPEC)

    if where == "async task":
        asyncio.run(flow(train)(return_state=True))
    else:
        assert flow(train_here, timeout_seconds=0.2 if where == "flow" else None)(return_state=True).is_failed()
    assert endless.reasons == [f"its Prefect {where.split()[-1]} has exceeded its timeout of 0.2 s"]


WAITING = result_of(
    model_name="delays",
    model_version="7",
    metrics={"holdout-rmse": 17.5},
    decision={"reason": "waiting", "sentence": "delays version 7 waits for a decision"},
)


@flow
def ask(training, retries=0):
    return promote_model.with_options(retries=retries)(training=training)


@flow
async def aask(training):
    return await apromote_model(training=training)


@pytest.mark.parametrize("promoted", [True, False])
def test_a_version_that_waits_and_its_promotion_are_events(sent, ends, monkeypatch, promoted):
    ends(WAITING)
    assert train() == "Completed"
    asked = []
    monkeypatch.setattr(models, "promote_model", lambda *given, **options: asked.append(options) or decided(promoted))

    assert ask(WAITING.to_dict()) == decided(promoted).to_dict() == asyncio.run(aask("job"))

    outcome = "promoted" if promoted else "kept"
    assert [event.event for event in sent] == ["shoal.model.waiting", *[f"shoal.model.{outcome}"] * 2]
    assert [event.payload["subject"] for event in sent[:2]] == [
        "waiting: delays version 7, rmse 17.5",
        f"{outcome}: delays version 7, rmse 17.5",
    ]
    assert (sent[0].payload["promoted"], sent[1].payload["promoted"]) == (None, promoted)
    assert [options["training"] for options in asked] == [WAITING.to_dict(), "job"]
    assert all(options["holder"].startswith("prefect:") for options in asked)


def test_a_promotion_that_fails_is_a_failure_of_its_model(sent, monkeypatch):
    def refuse(*_, **__):
        raise InvalidArgumentError("delays version 7 does not wait for a decision")

    monkeypatch.setattr(models, "promote_model", refuse)
    with pytest.raises(InvalidArgumentError):
        ask(WAITING.to_dict(), retries=2)
    assert [(event.event, event.resource.id) for event in sent] == [("shoal.model.failed", "shoal.model.delays")]


def test_a_wrong_spec_is_a_failure_of_its_model(sent):
    assert train({**SPEC, "label_col": ""}) == "Failed"
    assert [(event.event, event.resource.id) for event in sent] == [("shoal.model.failed", "shoal.model.delays")]


def test_an_event_that_cannot_be_sent_fails_no_task(server, fresh_home, ends, monkeypatch, logged):
    def refuse(*_, **__):
        raise OSError("no route to the server")

    monkeypatch.setattr(reports, "emit_event", refuse)
    ends(result(True))
    assert train() == "Completed"
    logged("the Prefect event about the job could not be sent: no route to the server")


def test_stale_models_and_waiting_jobs_are_events(sent, monkeypatch):
    stale, waits = StaleModel("delays", "champion", 71.0, "7"), WaitingJob("job", "retrain", "cli:me", 2, 1.5)
    monkeypatch.setattr(reports.jobs, "stale_models", lambda bound, models: [stale])
    monkeypatch.setattr(reports.jobs, "waiting_jobs", lambda bound: [waits])
    said = emit_alerts(promoted_within=timedelta(days=70), started_within=timedelta(hours=1))
    assert said == [str(stale), str(waits)] == [event.payload["text"] for event in sent]
    assert [(event.event, event.resource.id) for event in sent] == [
        ("shoal.model.stale", "shoal.model.delays"),
        ("shoal.job.waiting", "shoal.job.job"),
    ]
    with pytest.raises(InvalidArgumentError, match="has nothing to check"):
        emit_alerts()
