"""What a job's work asks the store, hours after it began."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import JobError
from shoal.jobs.driver.attempt_context import AttemptContext, Stopwatch, before_work, saved_before
from shoal.jobs.driver.attempt_metrics import MetricSeries, MlflowFeed
from shoal.jobs.files import artifacts
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.state import Store
from shoal.state.schema import Job, JobState
from tests.support.waiting import wait_until

KEY = Key("job", 1)
WATCH = Stopwatch(Job(created_at=0.0), 0.0)


class AwayServer:
    """MLflow run whose server is away at first."""

    def __init__(self) -> None:
        self.is_away = True
        self.refused = 0
        self.metrics: list[tuple[str, float, int, float]] = []

    def log_metrics(self, metrics: list[tuple[str, float, int, float]]) -> None:
        if self.is_away:
            self.refused += 1
            raise ConnectionError("connection refused")
        self.metrics += metrics


def test_metrics_are_kept_while_mlflow_is_away_and_sent_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.jobs.driver.attempt_metrics.METRICS_PERIOD_S", 0.001)
    run, metrics = AwayServer(), MetricSeries(KEY)
    metrics.feed = MlflowFeed(run)  # type: ignore[arg-type]
    metrics.log(0, {"loss": 3.0}, 1)
    metrics.log(0, {"loss": 2.0}, 2)
    wait_until(lambda: run.refused > 2, "some batches to be refused")
    metrics.feed.close()
    assert capsys.readouterr().out.count("will be sent later: connection refused") == 1
    told = r"its model is saved in /models/x, but MLflow cannot be reached: ConnectionError"
    with pytest.raises(JobError, match=told), saved_before("/models/x"):
        metrics.flush()
    run.is_away = False
    metrics.flush()
    assert [(name, value, step) for name, value, step, _ in run.metrics] == [("loss", 3.0, 1), ("loss", 2.0, 2)]
    assert metrics.feed.sent == 2


def test_mlflow_that_is_away_before_the_work_fails_the_job_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    for name in ("MAX_RETRIES", "BACKOFF_FACTOR", "BACKOFF_JITTER"):
        monkeypatch.delenv(f"MLFLOW_HTTP_REQUEST_{name}", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with closing(socket.socket()) as listener:  # a port where no process listens
        listener.bind(("127.0.0.1", 0))
        uri = f"http://me:canary@127.0.0.1:{listener.getsockname()[1]}"

        def ask() -> None:
            with before_work(uri, {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}):
                assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "1"
                mlflow.MlflowClient(uri).search_experiments()

        told = r"no worker was started, because MLflow at http://\S+ cannot be reached: MlflowException: "
        with pytest.raises(JobError, match=told) as error:
            ask()
    assert "canary" not in str(error.value)
    assert "Check that its server runs and that the tracking URI is right" in str(error.value)
    # Workers inherit variables, and user code in them keeps MLflow's own number of retries.
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


class Administrator(io.StringIO):
    """Brings a database back as soon as something printed misses it."""

    def __init__(self, database: Path, backup: Path) -> None:
        super().__init__()
        self.database = database
        self.backup = backup

    def write(self, text: str) -> int:
        if "trying again" in text:
            self.backup.replace(self.database)
        return super().write(text)


def test_a_store_that_is_away_when_a_model_is_published_is_waited_for(
    store: Store, fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.jobs.journal.steps.STORE_PERIOD", 0.05)
    attempts.ask(store, Order("job", "retrain", "airflow:d/r", {"fingerprint": "q"}, {}, None), 1.0)
    attempts.start(store, KEY, {}, 2.0)
    database, backup = fresh_home / "state.db", fresh_home / "backup.db"
    database.rename(backup)
    database.write_text("no database")

    with contextlib.redirect_stdout(Administrator(database, backup)) as said:
        assert AttemptContext(store, KEY, None, {}, {}, print, MetricSeries(KEY), print, WATCH).is_current()

    assert "trying again" in said.getvalue()


def test_only_a_known_attempt_that_has_ended_has_ended(store: Store) -> None:
    attempts.ask(store, Order("job", "retrain", "airflow:d/r", {"fingerprint": "q"}, {}, None), 1.0)
    attempts.start(store, KEY, {}, 2.0)
    place = AttemptContext(store, Key("next", 1), None, {}, {}, print, MetricSeries(KEY), print, WATCH)
    claim = artifacts.claim_of(store, KEY)

    assert not place.has_ended(claim)
    attempts.end(store, KEY, JobState.FAILED, 3.0, error="lost")
    assert place.has_ended(claim)
    assert not place.has_ended(replace(claim, owner="a job of another store"))
    assert not place.has_ended(replace(claim, attempt=2))
