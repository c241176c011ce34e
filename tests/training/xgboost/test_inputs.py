"""Inputs that only XGBoost has: the models of two workers are those of plain XGBoost in one process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import xgboost

from shoal.data import DataConnector
from shoal.data.checks import check_bounds
from shoal.data.planning import RowRange
from shoal.errors import DataError, InvalidArgumentError, TrainingError
from shoal.kinds.training.spec import JobSpec
from shoal.models.loading import predictor_of
from shoal.training.boosting.engine import train
from shoal.training.boosting.library import library_of
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.gang.placement import GangShape
from shoal.training.xgboost.library import XGBoost
from shoal.training.xgboost.params import ignored_weights
from tests.support.predictions import predict_booster

pytestmark = pytest.mark.usefixtures("without_ray")

FEATURES = ["a", "b", "c"]
PARAMS = {"max_depth": 3, "learning_rate": 0.3, "base_score": 0.5}
ROUNDS = 8


def request(path: Path | str, params: dict[str, Any] | None = None, **fields: Any) -> TrainRequest:
    values = {
        "dataset": {"paths": (str(path),)},
        "input_cols": FEATURES,
        "label_col": "y",
        "params": {**PARAMS, **(params or {})},
        "n_estimators": ROUNDS,
        "scaling_config": {"num_workers": 2, "num_cpu_per_worker": 1},
        **fields,
    }
    return TrainRequest.parse(values)


def trained(path: Path, params: dict[str, Any] | None = None, **fields: Any) -> TrainResult:
    return train(request(path, params, **fields))


def written(table: pd.DataFrame, folder: Path) -> Path:
    path = folder / "rows.parquet"
    table.to_parquet(path, index=False, row_group_size=250)
    return path


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({name: rng.integers(0, 20, 1_000) for name in FEATURES})
    rows["y"] = rows.a / 10 - (rows.b > 12) + rng.normal(0, 0.2, 1_000)
    return rows


def test_a_value_counts_as_missing_in_training_and_predictions(table: pd.DataFrame, tmp_path: Path) -> None:
    coded = table.assign(a=table["a"].where(np.random.default_rng(1).random(len(table)) > 0.3, -999))
    path = written(coded, tmp_path)
    matrix = xgboost.QuantileDMatrix(coded[FEATURES], coded["y"], missing=-999)
    history: dict[str, Any] = {}
    booster = xgboost.train(PARAMS, matrix, ROUNDS, evals=[(matrix, "eval")], evals_result=history, verbose_eval=False)
    expected = booster.predict(xgboost.DMatrix(coded[FEATURES], missing=-999))

    result = trained(path, missing=-999, eval_set={"eval": {"paths": (str(path),)}})
    mine = result.booster()
    np.testing.assert_allclose(result.eval_results["eval"]["rmse"], history["eval"]["rmse"], rtol=1e-5)
    assert "missing" in " ".join(mine.get_dump())
    connector = DataConnector.from_parquet(path)
    np.testing.assert_allclose(predict_booster(mine, connector, FEATURES), expected, rtol=1e-4)
    # Prediction jobs, and the comparison of a model with the champion, predict with this object.
    loaded = predictor_of(xgboost.Booster(model_file=mine.save_raw("ubj")))
    np.testing.assert_allclose(loaded.predict_table(pa.Table.from_pandas(coded)), expected, rtol=1e-4)
    estimator = library_of("xgboost").as_sklearn(mine, PARAMS, ROUNDS, {})
    assert estimator.missing == -999
    np.testing.assert_allclose(estimator.predict(coded[FEATURES]), expected, rtol=1e-4)


def test_missing_is_checked_and_stored_in_specs() -> None:
    assert request("rows", missing=float("nan")).missing is None
    spec = JobSpec.parse(request("rows", missing=-1).model_dump(mode="json"))
    assert JobSpec.parse(json.loads(json.dumps(spec.document()))).missing == -1.0
    with pytest.raises(InvalidArgumentError, match="float32: write such values as nulls"):
        request("rows", missing=float("inf"))
    with pytest.raises(InvalidArgumentError, match=r"LightGBM does not support missing=0.0.*zero_as_missing"):
        request("rows", framework="lightgbm", missing=0)
    with pytest.raises(InvalidArgumentError, match="missing=3 is not possible with categorical_cols"):
        request("rows", missing=3, categorical_cols=["a"])
    assert request("rows", missing=-1, categorical_cols=["a"]).missing == -1


def test_bounds_of_labels(table: pd.DataFrame, tmp_path: Path) -> None:
    censored = table[FEATURES].assign(lower=np.exp(table["y"] / 2))
    censored["upper"] = censored["lower"].where(np.random.default_rng(1).random(len(table)) > 0.3, np.inf)
    path = written(censored, tmp_path)
    # One worker has no row of the second eval set.
    one = tmp_path / "one.parquet"
    censored[:1].to_parquet(one)
    params = PARAMS | {"objective": "survival:aft", "eval_metric": ["aft-nloglik", "interval-regression-accuracy"]}
    matrix, first = xgboost.QuantileDMatrix(censored[FEATURES]), xgboost.DMatrix(censored[FEATURES][:1])
    for each, rows in ((matrix, censored), (first, censored[:1])):
        each.set_info(label_lower_bound=rows["lower"], label_upper_bound=rows["upper"])
    history: dict[str, Any] = {}
    evals = [(matrix, "train"), (first, "one")]
    booster = xgboost.train(params, matrix, ROUNDS, evals=evals, evals_result=history, verbose_eval=False)

    bounds = {"label_lower_bound_col": "lower", "label_upper_bound_col": "upper", "label_col": None}
    sets = {"train": {"paths": (str(path),)}, "one": {"paths": (str(one),)}}
    result = trained(path, params, **bounds, eval_set=sets)
    for name, metrics in history.items():
        for metric, values in metrics.items():
            np.testing.assert_allclose(result.eval_results[name][metric], values, rtol=1e-5)
    predicted = predict_booster(result.booster(), DataConnector.from_parquet(path), FEATURES)
    np.testing.assert_allclose(predicted, booster.predict(matrix), rtol=1e-4)

    censored.loc[7, "upper"] = censored.loc[7, "lower"] / 2
    with pytest.raises(DataError, match=r'bounds in "lower" and "upper" are wrong in 1 of \d+ rows.*at row 7: a lower'):
        trained(written(censored, tmp_path), params, **bounds)


BOUNDS = {"label_lower_bound_col": "lo", "label_upper_bound_col": "hi"}


@pytest.mark.parametrize(("lower", "upper"), [(-1, 1), (np.inf, np.inf), (0, 0), (2, 1), (np.nan, 1), (1, np.nan)])
def test_impossible_bounds(lower: float, upper: float) -> None:
    part = RowRange("file", 0, 0, 3)
    known = np.array([0, 1, 1], np.float32), np.array([2, 1, np.inf], np.float32)
    check_bounds(*known, ("lo", "hi"), part)
    known[0][1], known[1][1] = lower, upper
    with pytest.raises(DataError, match="in 1 of 3 rows"):
        check_bounds(*known, ("lo", "hi"), part)


def test_bounds_are_for_one_objective_and_one_library() -> None:
    size = GangShape(1, 1)
    aft = {"objective": "survival:aft"}
    assert request("rows", aft, **BOUNDS, label_col=None).label_col == "lo"
    with pytest.raises(InvalidArgumentError, match='survival:aft" needs the bounds'):
        XGBoost().params(request("rows", aft), size, UserCode())
    with pytest.raises(InvalidArgumentError, match='only for objective="survival:aft"'):
        XGBoost().params(request("rows", **BOUNDS), size, UserCode())
    with pytest.raises(InvalidArgumentError, match="LightGBM does not support label_lower_bound_col='lo'"):
        request("rows", aft, **BOUNDS, framework="lightgbm")
    with pytest.raises(InvalidArgumentError, match="need each other"):
        request("rows", aft, label_upper_bound_col="hi")
    with pytest.raises(InvalidArgumentError, match=r"only one role.*hi"):
        request("rows", aft, **BOUNDS, weight_col="hi")
    register = {"model": "m", "metric": "rmse", "holdout": {"paths": ("rows",)}}
    fields = request("rows", aft, **BOUNDS, label_col="lo").model_dump(mode="json")
    with pytest.raises(InvalidArgumentError, match="no metric takes the bounds"):
        JobSpec.parse(fields | {"register": register})
    JobSpec.parse(fields | {"register": register, "label_col": "known"})


def test_features_are_sampled_by_weight(table: pd.DataFrame, tmp_path: Path) -> None:
    params = PARAMS | {"colsample_bynode": 0.7, "seed": 7}
    matrix = xgboost.QuantileDMatrix(table[FEATURES], table["y"])
    matrix.set_info(feature_weights=[0, 1, 3])
    booster = xgboost.train(params, matrix, ROUNDS)
    result = trained(written(table, tmp_path), params, feature_weights={"a": 0, "c": 3})
    mine = result.booster()
    assert set(mine.get_score()) == {"b", "c"}
    assert mine.get_score(importance_type="weight") == booster.get_score(importance_type="weight")
    predicted = predict_booster(mine, DataConnector.from_parquet(tmp_path), FEATURES)
    np.testing.assert_allclose(predicted, booster.predict(matrix), rtol=1e-4, atol=1e-5)


def test_feature_weights_are_checked() -> None:
    given = request("rows", feature_weights={"a": 0, "c": 3})
    assert given.weights_of_features == (0, 1, 3)
    spec = JobSpec.parse(given.model_dump(mode="json"))
    assert JobSpec.parse(json.loads(json.dumps(spec.document()))).weights_of_features == (0, 1, 3)
    assert request("rows", feature_weights=np.array([0, 1, 3])).weights_of_features == (0, 1, 3)
    for wrong, message in (
        ({"z": 1}, 'names "z", which is not among input_cols'),
        ([1, 1], "has 2 weights, but input_cols has 3 columns"),
        ([1, -1, 1], 'feature_weights of "b" is -1.0'),
        ({"c": float("nan")}, 'feature_weights of "c" is nan'),
        ([0, 0, 0], "are 0 for all features"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            request("rows", feature_weights=wrong)
    with pytest.raises(InvalidArgumentError, match=r"LightGBM does not support feature_weights.*feature_contri"):
        request("rows", feature_weights=[1, 2, 3], framework="lightgbm")


@pytest.mark.parametrize(
    ("params", "weights", "line"),
    [
        ({}, (0, 1, 1, 1), "no effect"),
        ({"colsample_bytree": 0.5}, (0, 1, 1, 1), None),
        ({"colsample_bytree": 0.5}, (0, 0, 0, 1), "also use features of weight 0, .* select 2 features, and only 1 "),
        ({"colsample_bytree": 0.5, "colsample_bynode": 0.5}, (0, 0, 0, 1), None),
    ],
)
def test_the_log_says_which_feature_weights_xgboost_ignores(
    params: dict[str, float], weights: tuple[float, ...], line: str | None
) -> None:
    said = ignored_weights(params, weights)
    assert said is None if line is None else re.search(line, str(said))


LABELS = ["y", "z"]
SEVERAL = [
    ({"objective": "reg:squarederror"}, False),
    ({"objective": "reg:squarederror", "multi_strategy": "multi_output_tree"}, False),
    ({"objective": "binary:logistic", "eval_metric": ["logloss", "error"]}, True),
]


@pytest.mark.parametrize(("params", "binary"), SEVERAL)
def test_a_model_has_an_output_per_label_column(tmp_path: Path, params: dict[str, Any], binary: bool) -> None:
    rng = np.random.default_rng(5)
    frame = pd.DataFrame({name: rng.integers(0, 40, 1000).astype(float) for name in FEATURES})
    frame = frame.assign(y=frame.a * frame.b / 40 + rng.normal(size=1000), z=frame.c - frame.a)
    if binary:
        frame = frame.assign(y=(frame.y > 10).astype(float), z=(frame.z > 0).astype(float))
    held_out = frame.sample(200, random_state=1)
    # The eval set has one row group, so that one of the workers has no rows of it.
    held_out.to_parquet(tmp_path / "held_out.parquet", index=False)
    path = written(frame, tmp_path)
    found = trained(
        path,
        params,
        label_col=None,
        label_cols=LABELS,
        eval_set={"eval": {"paths": [str(tmp_path / "held_out.parquet")]}},
    )

    matrix = xgboost.QuantileDMatrix(frame[FEATURES], frame[LABELS])
    held = xgboost.QuantileDMatrix(held_out[FEATURES], held_out[LABELS], ref=matrix)
    metrics: dict[str, Any] = {}
    given = {**PARAMS, **params}
    right = xgboost.train(given, matrix, ROUNDS, evals=[(held, "eval")], evals_result=metrics, verbose_eval=False)
    expected = right.predict(xgboost.DMatrix(frame[FEATURES]))
    assert expected.shape == (1000, 2)
    mine = found.booster()
    np.testing.assert_allclose(predict_booster(mine, DataConnector.from_parquet(path), FEATURES), expected, atol=1e-4)
    assert found.eval_results["eval"].keys() == metrics["eval"].keys()
    for name, values in metrics["eval"].items():
        np.testing.assert_allclose(found.eval_results["eval"][name], values, rtol=1e-4)
    model = library_of("xgboost").as_sklearn(mine, given, ROUNDS, {})
    plain = xgboost.XGBClassifier if binary else xgboost.XGBRegressor
    np.testing.assert_allclose(
        model.predict(frame[FEATURES]),
        plain(**given, n_estimators=ROUNDS).fit(frame[FEATURES], frame[LABELS]).predict(frame[FEATURES]),
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label_col": "z", "label_cols": ["y", "z"]}, "label_cols names all label columns .* remove label_col='z'"),
        ({"label_cols": ["y", "a"]}, "more than one: a"),
        ({"label_cols": ["y", "y"]}, "more than one: y"),
        ({"label_cols": ["y", "z"], "label_lower_bound_col": "l", "label_upper_bound_col": "u"}, "remove the bounds"),
        ({"label_cols": ["y", "z"], "framework": "lightgbm"}, "LightGBM does not support label_cols"),
    ],
)
def test_label_columns_that_cannot_be_trained_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        request("rows.parquet", **{"label_col": "y", **fields})
    size = GangShape(1, 1)
    several = request("rows.parquet", {"objective": "multi:softprob", "num_class": 3}, label_cols=LABELS)
    with pytest.raises(InvalidArgumentError, match="label_cols names 2 columns, and the parameters ask for 3 outputs"):
        XGBoost().params(several, size, UserCode())
    refused = [{"objective": "rank:pairwise"}]
    if tuple(map(int, xgboost.__version__.split(".")[:2])) < (3, 4):  # which has an AUC of several outputs
        refused.append({"objective": "binary:logistic", "eval_metric": "auc"})
    for params in refused:
        with pytest.raises((InvalidArgumentError, TrainingError), match=r"cannot compute eval_metric|group_col"):
            XGBoost().params(
                request("rows.parquet", params, label_cols=LABELS, eval_set={"eval": {"paths": ("e",)}}),
                size,
                UserCode(),
            )
    with pytest.raises(InvalidArgumentError, match="register compares the predictions of one label column"):
        JobSpec.parse(
            {**several.model_dump(), "register": {"model": "m", "metric": "rmse", "holdout": {"paths": ["h"]}}}
        )


def test_labels_are_checked_in_every_column(tmp_path: Path) -> None:
    frame = pd.DataFrame({name: np.arange(500.0) for name in FEATURES}).assign(y=1.0, z=0.0)
    frame.loc[3, "y"], frame.loc[400, "z"] = 0.0, 7.0
    path = written(frame, tmp_path)
    with pytest.raises(DataError, match=r'the label "z" is 7.0 at row 150, but binary:logistic'):
        trained(path, {"objective": "binary:logistic"}, label_cols=LABELS)
    written(frame.assign(z=np.nan), tmp_path)
    with pytest.raises(DataError, match='"z"'):
        trained(path, label_cols=LABELS)
