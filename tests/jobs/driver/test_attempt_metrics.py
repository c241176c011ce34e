"""The series of metrics of a job: what the driver writes, what readers see, what MLflow gets."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from shoal.jobs.driver.attempt_metrics import MetricSeries, MlflowFeed
from shoal.jobs.driver.heartbeats import HeartbeatThread
from shoal.jobs.journal import attempts, metric_points
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.journal.metric_points import MetricPoint, encoded
from shoal.state import Store
from shoal.state.schema import Job, JobMetrics, JobState
from shoal.training.run_config import RunConfig

KEY = Key("job", 1)


@pytest.fixture
def store(either_store: Path) -> Store:
    return Store()


@pytest.fixture(autouse=True)
def job(store: Store) -> None:
    attempts.ask(store, Order("job", "retrain", "airflow:d/r", {"fingerprint": "q"}, {}, None), 1.0)
    attempts.start(store, KEY, {}, 2.0)


def write(store: Store, series: MetricSeries) -> None:
    batch = series.prepare()
    with store.transaction() as session:
        series.write(batch, session, session.get_one(Job, (KEY.job_id, KEY.attempt)))
    series.written(batch)


def seen(store: Store, key: Key = KEY) -> list[tuple[int, dict[str, float]]]:
    return [(point.step, dict(point.values)) for point in metric_points.read(store, key)]


def number_of_parts(store: Store) -> int:
    with store.reading() as session:
        return session.scalar(sa.select(sa.func.count()).select_from(JobMetrics)) or 0


def test_a_series_is_read_as_it_was_logged(store: Store) -> None:
    series = MetricSeries(KEY)
    logged = []
    for step in range(600):
        values = {"eval-rmse": 1 / (step + 1)} | ({"eval-auc": math.inf} if step % 100 == 0 else {})
        series.log(0, values, step)
        logged.append((step, values))
        if step % 90 == 0:
            write(store, series)
    write(store, series)

    assert seen(store) == logged
    assert number_of_parts(store) == 3  # 256 points at most
    with store.reading() as session:
        assert session.scalar(sa.select(sa.func.max(sa.func.length(JobMetrics.points)))) < 17_000


def test_a_write_that_failed_is_repeated(store: Store) -> None:
    series = MetricSeries(KEY)
    series.log(0, {"loss": 3.0}, 0)
    batch = series.prepare()
    with store.transaction() as session:
        series.write(batch, session, session.get_one(Job, (KEY.job_id, KEY.attempt)))
        session.rollback()
    assert seen(store) == []
    write(store, series)
    write(store, series)
    assert seen(store) == [(0, {"loss": 3.0})]


def test_a_heartbeat_writes_the_series(store: Store) -> None:
    series = MetricSeries(KEY)
    series.log(1, {"loss": 3.0}, 7)
    HeartbeatThread(store, KEY, series, RunConfig()).look()
    assert seen(store) == [(7, {"rank-1/loss": 3.0})]


def test_a_heartbeat_that_writes_nothing_keeps_the_metrics_for_the_end(store: Store) -> None:
    series = MetricSeries(KEY)
    series.log(0, {"loss": 3.0}, 7)
    attempts.end(store, KEY, JobState.CANCELLED, 3.0)
    HeartbeatThread(store, KEY, series, RunConfig()).look()
    assert seen(store) == []
    write(store, series)
    assert seen(store) == [(7, {"loss": 3.0})]


def test_steps_that_are_repeated_after_a_restart_replace_the_first_ones(store: Store) -> None:
    series = MetricSeries(KEY)
    for step in range(4):
        series.log(0, {"loss": float(step)}, step)
    series.log(0, {"accuracy": 0.5}, 1)
    series.continued()
    series.continued()
    series.log(0, {"loss": -2.0}, 2)
    series.log(0, {"accuracy": 0.6}, 2)
    write(store, series)

    expected = [(0, {"loss": 0.0}), (1, {"loss": 1.0}), (1, {"accuracy": 0.5}), (2, {"loss": -2.0})]
    assert seen(store) == [*expected, (2, {"accuracy": 0.6})]


def test_a_later_attempt_replaces_the_steps_that_it_repeats(store: Store) -> None:
    attempts.end(store, KEY, JobState.FAILED, 3.0)
    attempts.ask(store, Order("job", "retrain", "airflow:d/r", {"fingerprint": "q"}, {}, None), 4.0)
    with store.transaction() as session:
        for attempt, steps in ((1, (0, 1, 2)), (2, (1, 2, 3))):
            points = encoded([MetricPoint(step, float(step), {"loss": attempt * 10.0 + step}) for step in steps])
            session.add(JobMetrics(job_id="job", attempt=attempt, seq=0, generation=0, points=points))

    assert seen(store) == [(step, {"loss": 10.0 + step}) for step in range(3)]
    assert seen(store, Key("job", 2)) == [(0, {"loss": 10.0}), *[(step, {"loss": 20.0 + step}) for step in (1, 2, 3)]]
    with store.transaction() as session:
        metric_points.remove(session, Key("job", 2))
    assert number_of_parts(store) == 1


def test_names_and_points_are_bounded_in_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.jobs.driver.attempt_metrics._MOST_IN_SERIES", 3)
    series = MetricSeries(KEY)
    series.log(0, {f"{number}-\udc80{'m' * 1000}": 1.0 for number in range(300)}, 0)
    for step in range(1, 9):
        series.log(0, {"0-\udc80" + "m" * 1000: 1.0}, step)
    write(store, series)

    points = metric_points.read(store, KEY)
    assert [point.step for point in points] == [0, 1, 2]
    assert len(points[0].values) == 200
    assert max(map(len, points[0].values)) == 100
    assert capsys.readouterr().out.count("further metrics are only sent to MLflow") == 1


class RecordingRun:
    """MLflow run that keeps what it gets."""

    def __init__(self) -> None:
        self.metrics: list[tuple[str, float, int, float]] = []

    def log_metrics(self, metrics: list[tuple[str, float, int, float]]) -> None:
        self.metrics += metrics


def test_mlflow_gets_each_value_once_although_a_training_repeats_rounds(store: Store) -> None:
    series, run = MetricSeries(KEY), RecordingRun()
    series.feed = MlflowFeed(run)  # type: ignore[arg-type]
    began = time.time()
    for step, value in ((0, 3.0), (1, 2.0)):
        series.log(0, {"eval-rmse": value}, step)
    series.continued()
    for step, value in ((1, 2.0), (2, 1.0)):
        series.log(0, {"eval-rmse": value}, step)
    series.flush()
    series.feed.close()
    write(store, series)

    assert [(value, step) for _, value, step, _ in run.metrics] == [(3.0, 0), (2.0, 1), (1.0, 2)]
    times = [at for *_, at in run.metrics]
    assert times == sorted(set(times))
    assert times[0] >= began
    assert attempts.load(store, KEY).metrics_in_mlflow == 4
    assert len(metric_points.of_attempt(store, KEY)) == 4
