"""Metrics of eval sets: those of all rows, whatever the number of workers, and numbers if they stop the training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xgboost

from shoal.errors import DataError, TrainingError
from shoal.training.boosting import engine
from shoal.training.boosting.engine import train
from shoal.training.boosting.messages import Checkpoint, Segment
from shoal.training.boosting.params import UserCode
from shoal.training.xgboost.params import approximate
from tests.support.boosting_trainings import request, spec
from tests.support.two_node_cluster import COLUMNS, TwoNodes
from tests.training.lightgbm.test_segments import trainer
from tests.training.xgboost.test_worker import session

BINARY = {"objective": "binary:logistic", "max_depth": 3}
CLASSES = {"objective": "multi:softprob", "num_class": 3}


def median_error(predictions: np.ndarray, matrix: Any) -> tuple[str, float]:
    return "median-error", float(np.median(np.abs(predictions - matrix.get_label())))


def never_a_number(*_: Any) -> tuple[str, float]:
    return "mine", float("nan")


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with the labels 0 and 1, all negatives first, in a file of two row groups."""
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=1_201).astype(np.float32) for name in COLUMNS}
    table = pa.table({
        **values,
        "y": (values["a"] + rng.normal(size=1_201) > 1).astype(np.float32),
        "w": rng.uniform(0.5, 2, size=1_201).astype(np.float32),
    })  # fmt: skip
    folder = tmp_path_factory.mktemp("binary")
    pq.write_table(table.sort_by("y"), folder / "rows.parquet", row_group_size=601)
    return folder


@pytest.mark.ray
def test_metrics_of_two_workers_are_those_of_plain_xgboost(driver: TwoNodes, binary: Path) -> None:
    asked = request(
        binary,
        params=BINARY | {"eval_metric": ["auc", "aucpr", "ndcg@50", "logloss"]},
        eval_set={"train": spec(binary), "eval": spec(binary) | {"filters": [["a", ">", 0]]}},
    )
    result = train(asked, user_code=UserCode(metrics=(median_error,)))
    weighted = train(asked.model_copy(update={"weight_col": "w", "params": BINARY | {"eval_metric": ["auc", "aucpr"]}}))
    table = pq.read_table(binary).to_pandas()
    for history, booster, weight in (
        (result.eval_results, result.booster(), None),
        (weighted.eval_results, weighted.booster(), "w"),
    ):
        for name, frame in (("train", table), ("eval", table[table.a > 0])):
            rows = xgboost.DMatrix(frame[COLUMNS], frame.y, weight=None if weight is None else frame[weight])
            booster.set_param([("eval_metric", metric) for metric in history[name] if metric != "median-error"])
            for done in range(3):
                plain = dict(each.split(":") for each in booster[: done + 1].eval_set([(rows, name)]).split()[1:])
                for metric, values in history[name].items():
                    value = plain.get(f"{name}-{metric}")
                    if value is None:
                        value = median_error(booster[: done + 1].predict(rows), rows)[1]
                    assert values[done] == pytest.approx(float(value), abs=1e-6), (name, metric, done)


def test_which_metrics_need_the_whole_eval_set() -> None:
    assert approximate(None, False, ()) == []
    assert approximate("logloss", False, ()) == []
    assert approximate(["auc", "rmse", "ndcg@5", "map-", "pre@3", "aucpr"], False, ()) == [
        "auc", "ndcg@5", "map-", "pre@3", "aucpr",
    ]  # fmt: skip
    assert approximate(["auc", "ndcg@5"], True, ()) == []
    assert approximate(None, True, (median_error,)) == ["custom_metric median_error"]


@pytest.mark.ray
def test_an_eval_set_that_is_too_long_for_every_worker_is_refused(
    driver: TwoNodes, binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.training.boosting.rows.MAX_EVAL_ROWS", 1_200)
    monkeypatch.setattr(engine, "shared_gang", None)
    asked = request(binary, params=BINARY | {"eval_metric": "auc"}, eval_set={"late": spec(binary)})
    with pytest.raises(DataError, match=r'eval_set "late" has 1,201 rows.* for auc, so at most 1,200 rows.*logloss'):
        train(asked)
    accepted = asked.model_copy(update={"params": BINARY})
    with pytest.raises(TypeError, match="NoneType"):  # it would start the workers
        train(accepted)


ONE_CLASS = r'metric {} of eval_set "eval", which needs rows of all {} classes.*only the labels 1: '


@pytest.fixture(scope="module")
def one_class(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-class")
    table = pq.read_table(binary)
    pq.write_table(table.filter(pa.compute.equal(table["y"], 1.0)), folder / "rows.parquet")
    return folder


@pytest.mark.parametrize(
    ("params", "metrics", "error", "match"),
    [
        (BINARY | {"eval_metric": "aucpr"}, (), DataError, ONE_CLASS.format("aucpr", 2)),
        (CLASSES | {"eval_metric": "auc"}, (), DataError, ONE_CLASS.format("auc", 3)),
        (BINARY, (never_a_number,), TrainingError, r'metric mine of eval_set "eval", but its value is NaN'),
    ],
)  # fmt: skip
def test_xgboost_is_not_stopped_by_a_metric_that_is_no_number(
    one_class: Path, params: dict[str, Any], metrics: Any, error: type[Exception], match: str
) -> None:
    worker = session(
        one_class, params={"nthread": 1, **params}, early_stopping_rounds=2, user_code=UserCode(metrics=metrics)
    )
    with pytest.raises(error, match=match):
        worker.boost(Segment(0, 5, True, None))
    worker = session(one_class, params={"nthread": 1, **params}, user_code=UserCode(metrics=metrics))
    checkpoint = worker.boost(Segment(0, 5, True, None)).checkpoint
    assert checkpoint is not None
    assert np.isnan(list(checkpoint.history["eval"].values())[-1]).all()


@pytest.mark.parametrize("metric", ["auc", "average_precision"])
def test_lightgbm_is_not_stopped_by_the_auc_of_one_class(one_class: Path, metric: str) -> None:
    training = trainer(one_class, {"objective": "binary", "metric": metric}, UserCode())
    training._task = replace(training._task, early_stopping_rounds=2)
    with pytest.raises(DataError, match=ONE_CLASS.format(metric, 2)):
        training.boost(Segment(0, 5, True, Checkpoint()))


def test_lightgbm_is_not_stopped_by_a_metric_that_is_no_number_or_always_infinite(rows: Path) -> None:
    for value, match in ((np.nan, "value is NaN"), (np.inf, "best value is inf")):
        metrics = (lambda *_, value=value: ("mine", value, False),)
        training = trainer(rows, {}, UserCode(metrics=metrics))
        training._task = replace(training._task, early_stopping_rounds=2)
        with pytest.raises(TrainingError, match=f'metric mine of eval_set "eval", but its {match}'):
            training.boost(Segment(0, 5, True, Checkpoint()))
