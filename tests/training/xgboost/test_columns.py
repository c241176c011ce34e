"""Wide tables, whose columns the workers divide: the trees are those of plain XGBoost in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xgboost

from shoal.training.boosting.engine import train
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.gang.gang import end_gangs
from shoal.training.xgboost.library import XGBoost
from tests.support.boosting_trainings import Losses
from tests.support.two_node_cluster import assert_ended
from tests.support.without_ray import nodes_without_ray

pytestmark = [
    pytest.mark.usefixtures("without_ray"),
    pytest.mark.skipif(not hasattr(xgboost.core, "DataSplitMode"), reason="this XGBoost has no split by columns"),
]

FEATURES = [f"f{i}" for i in range(100)]
TYPES = ["c" if name == "f4" else "float" for name in FEATURES]
ROUNDS, ROWS, TRAINED = 12, 1_300, 1_000
PARAMS = {"max_depth": 4, "seed": 3, "nthread": 1}


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    """Features with gaps and zeros, a category that decides much, weights, and labels of several kinds."""
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({name: rng.standard_normal(ROWS).astype(np.float32) for name in FEATURES})
    rows["f4"] = rng.choice(list("abcdefg"), ROWS)
    rows["f99"] = rows["f99"].where(rng.random(ROWS) > 0.3)
    rows["f50"] = rows["f50"].where(rng.random(ROWS) > 0.5, 0)
    rows["y"] = rows["f0"] + 2 * (rows["f4"] > "d") + rows["f99"].fillna(3) + rng.normal(0, 0.2, ROWS)
    rows["kind"] = np.digitize(rows["y"], [0, 2])
    rows["weight"] = rng.random(ROWS) + 0.1
    return rows.astype({"y": np.float32, "weight": np.float32})


@pytest.fixture
def files(table: pd.DataFrame, tmp_path: Path) -> tuple[str, str]:
    paths = str(tmp_path / "rows.parquet"), str(tmp_path / "others.parquet")
    for path, rows in zip(paths, (table[:TRAINED], table[TRAINED:]), strict=True):
        rows.to_parquet(path, index=False, row_group_size=300)
    return paths


def request(files: tuple[str, str], params: dict[str, Any], workers: int = 2, **fields: Any) -> TrainRequest:
    return TrainRequest.parse(
        {
            "dataset": {"paths": files[:1]},
            "eval_set": {"eval": {"paths": files[1:]}},
            "input_cols": FEATURES,
            "categorical_cols": ["f4"],
            "label_col": "y",
            "weight_col": "weight",
            "params": {**PARAMS, **params},
            "n_estimators": ROUNDS,
            "scaling_config": {"num_workers": workers, "num_cpu_per_worker": 1},
            **fields,
        }
    )


def plain(table: pd.DataFrame, params: dict[str, Any], label: str = "y", **how: Any) -> tuple[xgboost.Booster, Any]:
    coded = table.assign(f4=table["f4"].astype("category").cat.codes)

    def matrix(rows: pd.DataFrame) -> xgboost.DMatrix:
        given = {"label": rows[label], "weight": rows["weight"], "feature_names": FEATURES, "feature_types": TYPES}
        return xgboost.DMatrix(rows[FEATURES].to_numpy(np.float32), enable_categorical=True, nthread=1, **given)

    history: dict[str, Any] = {}
    evals = [(matrix(coded[TRAINED:]), "eval")]
    booster = xgboost.train(
        {**PARAMS, **params},
        matrix(coded[:TRAINED]),
        ROUNDS,
        evals=evals,
        evals_result=history,
        verbose_eval=False,
        **how,
    )
    return booster, history["eval"]


def trees(booster: xgboost.Booster) -> list[str]:
    return booster.get_dump(with_stats=True, dump_format="json")


def assert_divided(result: TrainResult) -> None:
    """Each worker has read all rows."""
    assert [worker.rows for worker in result.workers] == [TRAINED] * result.num_workers
    assert result.rows == TRAINED


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        pytest.param({}, {"early_stopping_rounds": 2}, id="stopped"),
        pytest.param({"booster": "dart", "rate_drop": 0.3, "subsample": 0.7, "colsample_bynode": 0.5}, {}, id="dart"),
        pytest.param({"objective": "reg:quantileerror", "quantile_alpha": 0.8}, {}, id="quantile"),
        pytest.param({"objective": "multi:softprob", "num_class": 3}, {"label_col": "kind"}, id="classes"),
        pytest.param({"grow_policy": "lossguide", "max_leaves": 9, "max_bin": 40}, {}, id="lossguide"),
    ],
)
def test_the_trees_are_those_of_one_process(
    table: pd.DataFrame, files: tuple[str, str], params: dict[str, Any], fields: dict[str, Any]
) -> None:
    how = {name: fields[name] for name in ("early_stopping_rounds",) if name in fields}
    expected, history = plain(table, params, fields.get("label_col", "y"), **how)
    result = train(request(files, params, **fields))
    assert_divided(result)
    mine = result.booster()
    assert trees(mine) == trees(expected)
    assert (mine.feature_names, mine.feature_types) == (FEATURES, TYPES)
    assert result.eval_results["eval"] == history
    if how:
        assert result.best_iteration == expected.best_iteration


def test_three_workers_on_two_nodes_and_one_train_the_same_bytes(files: tuple[str, str]) -> None:
    sampled = {"subsample": 0.6, "colsample_bylevel": 0.5}
    with nodes_without_ray(2, 1):
        three, one = (train(request(files, sampled, workers)) for workers in (3, 1))
        end_gangs()
    assert {worker.node for worker in three.workers} == {"here", "here-1"}
    assert_divided(three)
    assert three.model == one.model


def test_a_lost_worker_changes_nothing(
    table: pd.DataFrame, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = plain(table, {})
    losses = Losses(monkeypatch, 1)
    config = {"checkpoint_every": 4, "max_restarts": 1}
    resumed = train(request(files, {}, run_config=config))
    assert_ended(losses.lost)
    assert resumed.restarts == 1
    assert_divided(resumed)
    assert trees(resumed.booster()) == trees(expected)


def test_only_where_it_pays_and_the_model_is_the_same(files: tuple[str, str]) -> None:
    def divided(params: dict[str, Any], rows: int = 50_000, user_code: UserCode | None = None, **fields: Any) -> bool:
        asked = request(files, params, **fields)
        return XGBoost().splits_columns(asked, {**asked.params, "device": "cpu"}, user_code or UserCode(), rows)

    assert divided({})
    assert divided({"tree_method": "hist", "booster": "dart"})
    for params in (
        {"tree_method": "exact"},
        {"tree_method": "approx"},
        {"booster": "gblinear"},
        {"objective": "survival:cox"},
        {"process_type": "update"},
        {"updater": "grow_quantile_histmaker"},
    ):
        assert not divided(params), params
    assert not divided({}, rows=100_001)
    assert not divided({}, input_cols=FEATURES[:99])
    assert not divided({}, input_cols=[f"g{i}" for i in range(2_000)], categorical_cols=[])
    assert not divided({}, external_memory=True)
    assert not divided({}, group_col="kind")
    assert not divided({}, init_model="models:/delays/1")
    assert not divided({}, user_code=UserCode(metrics=(lambda scores, rows: ("one", 1.0),)))
    assert not XGBoost().splits_columns(request(files, {}), {"device": "cuda"}, UserCode(), 50_000)


def test_quantiles_are_announced_as_inexact_only_if_the_rows_are_divided(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    quantile = {"objective": "reg:quantileerror", "quantile_alpha": 0.8}
    train(request(files, quantile, input_cols=FEATURES[:9]))
    assert "the value of a leaf is the mean" in capsys.readouterr().out
    train(request(files, quantile))
    assert "the value of a leaf" not in capsys.readouterr().out
