"""The events about models and jobs, from real task runs; the server's automations react to them in `test_served.py`."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest
from prefect import flow

from shoal.errors import InvalidArgumentError, JobCancelledError, JobFailedError
from shoal.jobs import StaleModel, WaitingJob
from shoal.prefect import adistributed_train, distributed_train, emit_alerts, events
from tests.support.job_results import result_of

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
    emit = events.emit_event
    monkeypatch.setattr(events, "emit_event", lambda *args, **kwargs: sent.append(emit(*args, **kwargs)))
    return sent


class Job:
    """A job that ends as a test wants."""

    job_id, attempt = "job", 1

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
        monkeypatch.setattr("shoal.prefect._training.submit", lambda *_, **__: Job(outcome))

    return as_


def result(promoted: bool):
    return result_of(
        promoted=promoted,
        model_version="7",
        metrics={"holdout-rmse": 17.5, "eval-auc": float("nan")},
        decision={"reason": "better" if promoted else "champion_not_beaten", "sentence": "decided"},
    )


@flow
def train(spec=SPEC, **options):
    return distributed_train.with_options(**options)(spec, return_state=True).name


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


def test_a_failure_is_sent_once_after_the_last_try(sent, ends):
    ends(JobFailedError("job failed: a worker was lost"))
    assert train(retries=1, retry_delay_seconds=0) == "Failed" == asyncio.run(atrain())
    assert [event.event for event in sent] == ["shoal.model.failed"] * 2
    assert sent[0].payload["text"] == "failed    delays: job failed: a worker was lost"


def test_a_cancelled_async_training_cancels_its_job_and_sends_nothing(sent, monkeypatch):
    runs, cancelled, reasons = threading.Event(), threading.Event(), []

    class Endless(Job):
        def wait(self, **_):
            runs.set()
            assert cancelled.wait(60)
            raise JobCancelledError("job was cancelled")

        def cancel(self, reason):
            reasons.append(reason)
            cancelled.set()

    monkeypatch.setattr("shoal.prefect._training.submit", lambda *_, **__: Endless(None))

    @flow
    async def cancels():
        training = asyncio.ensure_future(adistributed_train(SPEC))
        assert await asyncio.to_thread(runs.wait, 60)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training

    asyncio.run(cancels())
    assert (reasons, sent) == (["its Prefect run was cancelled"], [])


def test_a_wrong_spec_is_a_failure_of_its_model(sent):
    assert train({**SPEC, "label_col": ""}) == "Failed"
    assert [(event.event, event.resource.id) for event in sent] == [("shoal.model.failed", "shoal.model.delays")]


def test_an_event_that_cannot_be_sent_fails_no_task(server, fresh_home, ends, monkeypatch, logged):
    def refuse(*_, **__):
        raise OSError("no route to the server")

    monkeypatch.setattr(events, "emit_event", refuse)
    ends(result(True))
    assert train() == "Completed"
    logged("the Prefect event about the training could not be sent: no route to the server")


def test_stale_models_and_waiting_jobs_are_events(sent, monkeypatch):
    stale, waits = StaleModel("delays", "champion", 71.0, "7"), WaitingJob("job", "retrain", "cli:me", 2, 1.5)
    monkeypatch.setattr(events, "stale_models", lambda bound, models: [stale])
    monkeypatch.setattr(events, "waiting_jobs", lambda bound: [waits])
    said = emit_alerts(promoted_within=timedelta(days=70), started_within=timedelta(hours=1))
    assert said == [str(stale), str(waits)] == [event.payload["text"] for event in sent]
    assert [(event.event, event.resource.id) for event in sent] == [
        ("shoal.model.stale", "shoal.model.delays"),
        ("shoal.job.waiting", "shoal.job.job"),
    ]
    with pytest.raises(InvalidArgumentError, match="has nothing to check"):
        emit_alerts()
