"""What a training shows in Prefect: its report, its progress, its log and its name."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from shoal.jobs import parse_spec
from shoal.jobs.journal.metric_points import MetricPoint
from shoal.prefect import (
    abatch_predict,
    adistributed_train,
    batch_predict,
    distributed_train,
    many_models,
    reports,
    tune,
)
from shoal.prefect.reports import LINES_PER_MINUTE, RunLog, TrainingProgress, report, report_key, sparkline
from shoal.training.reporting import Progress
from tests.support.job_results import result_of

FIELDS = {"dataset": {"paths": ["x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


def registering(model: str) -> dict:
    return {**FIELDS, "register": {"model": model, "metric": "rmse", "holdout": {"paths": ["h.parquet"]}}}


def test_models_have_keys_that_are_legal_and_differ():
    names = ["delays", "Delays", "de lays", "de-lays", "ünïcode", "日本", "a--b", "UA 1", "ua-1"]
    keys = [report_key(parse_spec(registering(name))) for name in names]
    assert len(set(keys)) == len(names)
    assert all(set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for key in keys)
    assert (keys[0], keys[3]) == ("shoal-model-delays", "shoal-model-de-lays")
    assert report_key(parse_spec(FIELDS)) == "shoal-training"


def test_a_report_has_metrics_curve_decision_and_links(monkeypatch):
    monkeypatch.setenv("SHOAL_UI_URL", "https://shoal.example")
    result = result_of(
        job_id="job-1", model_version="4", promoted=True, metrics={"holdout-rmse": 1.5}, mlflow_run_id="r1", rows=1200,
        decision={"reason": "better", "sentence": "a_b version 4 replaces <b>3</b> | [x](http://y)"},
    )  # fmt: skip
    points = [MetricPoint(step, 0.0, {"eval-rmse": 4.0 - step}) for step in range(4)]
    text = report(parse_spec(registering("a_b")), result, points, "https://me:password@mlflow.example")
    assert text.splitlines()[:3] == [
        r"# a\_b version 4: promoted", "", r"a\_b version 4 replaces \<b\>3\</b\> \| \[x\](http://y)",
    ]  # fmt: skip
    assert "| holdout-rmse | 1.5 |" in text and "| rows | 1,200 |" in text
    assert "\neval-rmse  4  █▆▃▁  1  rounds 1 to 4\n" in text
    assert text.splitlines()[-1] == (
        "[MLflow run](<https://mlflow.example/#/runs/r1>)"
        " · [Model version](<https://mlflow.example/#/models/a_b/versions/4>)"
        " · [Job in shoal](<https://shoal.example/jobs/job-1>)"
    )


def test_a_report_without_curves_and_links_has_the_rest():
    skipped = report(parse_spec(FIELDS), result_of(skipped="no new rows"), [], None)
    assert skipped.startswith("# xgboost: y: skipped\n\nno new rows\n\n| job |  |")
    assert "```" not in skipped and "](" not in skipped


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([], ""),
        ([1.0], "▄"),
        ([2.0, 2.0], "▄▄"),
        ([0.0, math.nan, 1.0], "▁ █"),
        ([math.inf, 1.0], " ▄"),
        ([-1e308, 1e308], "▄▄"),  # their difference is no number
        ([0.0, *[0.5] * 1000, 1.0], "▁" + "▅" * 30 + "█"),
    ],
)
def test_a_sparkline_has_at_most_32_bars_from_the_first_to_the_last_value(values, drawn):
    assert sparkline(values) == drawn


class Api:
    """Prefect's functions for progress artifacts, which fail while a test wants it."""

    def __init__(self, monkeypatch) -> None:
        self.fails = False
        self.written: list[tuple[str | None, float]] = []
        self.logged: list[str] = []
        self.now = 0.0
        logger = SimpleNamespace(
            info=lambda text, *args: self.logged.append(text % args if args else text),
            warning=lambda text, *args: self.logged.append(text % args),
        )
        monkeypatch.setattr(reports, "get_run_logger", lambda: logger)
        artifacts = SimpleNamespace(
            create_progress_artifact=lambda percent, key, text, _sync: self.write(key, percent) or "id",
            update_progress_artifact=lambda artifact, percent, text, _sync: self.write(artifact, percent),
        )
        monkeypatch.setattr(reports, "_artifacts", artifacts)

    def write(self, name: str | None, percent: float) -> None:
        if self.fails:
            raise OSError("the server is away")
        self.written.append((name, percent))


@pytest.fixture
def api(monkeypatch) -> Api:
    return Api(monkeypatch)


def test_progress_is_written_every_five_seconds_at_most_and_again_after_an_error(api):
    progress = TrainingProgress(lambda: api.now)
    api.fails = True
    for second in range(20):
        api.now, api.fails = float(second), second < 8
        progress(Progress(second, 20, "rounds", {}))
    progress.flush()
    progress.flush()  # writes nothing again
    assert api.written == [(None, 50.0), ("id", 75.0), ("id", 95.0)]
    assert api.logged == ["the Prefect artifact with the progress could not be written: the server is away"]


def test_lines_over_the_limit_of_a_minute_are_replaced_by_one_that_says_where_they_are(api):
    log = RunLog("job-1", lambda: api.now)
    for _ in range(2 * LINES_PER_MINUTE):
        log("100 % of the rows")
    api.now = 60.0
    log("the next minute")
    *lines, notice, last = api.logged
    assert lines == ["100 % of the rows"] * LINES_PER_MINUTE
    assert (notice.endswith("All lines: `shoal jobs logs job-1`"), last) == (True, "the next minute")


def test_task_runs_are_named_after_their_model_or_function():
    def train() -> None: ...

    for given, name in [
        ({"spec": registering("delays UA")}, "train delays UA"),
        ({"spec": parse_spec(registering("delays"))}, "train delays"),
        ({"spec": {"register": {"model": "bad"}}}, "train bad"),
        ({"spec": FIELDS}, "train xgboost: y on x.parquet"),
        ({"train_func": train}, "train train"),
        ({"spec": {"register": {"model": "net"}}, "train_func": train}, "train net"),
        ({"train_func": "/code/train.py", "spec": None}, "train train.py"),
        ({"train_func": 3}, "distributed_train"),
        ({"spec": 3}, "distributed_train"),
        ({}, "train (no name)"),
    ]:
        assert distributed_train.task_run_name(parameters=given) == name, json.dumps(given, default=str)
    paths = [{"dataset": {"paths": [f"/{name}"]}} for name in ("a", "b")]  # of mapped runs
    for task, given, name in [
        (batch_predict, {"model": "models:/m@champion"}, "predict models:/m@champion"),
        (many_models, {"by": ["k", "l"]}, "models by k, l"),
        (tune, {"train": {"label_col": "y"}}, "tune y"),
    ]:
        names = [f"{name} on /a", f"{name} on /b"]
        mapped = [{**given, **({"train": {**given["train"], **each}} if task is tune else each)} for each in paths]
        assert [task.task_run_name(each) for each in mapped] == names
        assert task.task_run_name(given) == name
    assert batch_predict.task_run_name({}) == "batch_predict"
    assert distributed_train.task_run_name is adistributed_train.task_run_name
    assert batch_predict.task_run_name is abatch_predict.task_run_name
