"""The model that a training returns is like the one of the plain library's `train`, on one worker."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost

from shoal.distributors.lightgbm import LightGBMEstimator, LightGBMScalingConfig
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
from shoal.training.boosting.engine import train
from shoal.training.boosting.request import TrainRequest, TrainResult

pytestmark = pytest.mark.usefixtures("without_ray")

FEATURES = ["a", "n", "yes"]


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"a": rng.integers(-99, 99, 400) / 64, "n": rng.integers(0, 9, 400)})
    rows["yes"] = rng.normal(size=400) > 0
    rows["y"] = rows["a"] - rows["n"] / 5
    rows["k"] = pd.qcut(rows["y"], 3, labels=False)
    rows["noise"] = rng.normal(size=400)
    return rows


@pytest.fixture(scope="module")
def file(table: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    table.to_parquet(path, index=False)
    return path


@pytest.fixture(scope="module")
def noise(table: pd.DataFrame, file: Path) -> Path:
    """The same rows with labels that cannot be predicted."""
    path = file.with_name("noise.parquet")
    table.assign(y=table["noise"]).to_parquet(path, index=False)
    return path


def trained(file: Path, framework: str, **changes: Any) -> TrainResult:
    """The result as it is read back from a job's files."""
    values = {
        "framework": framework,
        "dataset": {"paths": (str(file),)},
        "input_cols": FEATURES,
        "label_col": "y",
        "n_estimators": 5,
        "scaling_config": {"num_workers": 1, "num_cpu_per_worker": 1},
    }
    result = train(TrainRequest(**{**values, **changes}))
    return TrainResult.model_validate_json(result.model_dump_json())


def config(booster: xgboost.Booster) -> dict[str, Any]:
    """The whole configuration, without the number of threads of the worker."""
    found: dict[str, Any] = json.loads(booster.save_config())["learner"]
    for name in ("nthread", "n_jobs"):
        found["generic_param"].pop(name, None)
    return found


@pytest.mark.parametrize(
    ("label", "params"),
    [
        ("y", {"eta": 0.05, "max_depth": 2, "eval_metric": ["rmse", "mae"], "base_score": 0.3, "max_bin": 32}),
        ("y", {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9], "monotone_constraints": (1, 0, -1)}),
        ("k", {"objective": "multi:softprob", "num_class": 3, "lambda": 2, "monotone_constraints": {"a": 1}}),
        ("y", {"disable_default_eval_metric": True, "num_parallel_tree": 2, "seed": 3}),
    ],
)
def test_xgboost_has_the_parameters_and_the_file_of_plain_xgboost(
    file: Path, table: pd.DataFrame, label: str, params: dict[str, Any]
) -> None:
    ours = trained(file, "xgboost", label_col=label, params=params).booster()
    matrix = xgboost.QuantileDMatrix(table[FEATURES], table[label], nthread=1, max_bin=params.get("max_bin", 256))
    plain = xgboost.train({**params, "nthread": 1}, matrix, 5)
    assert config(ours) == config(plain)
    assert (ours.feature_names, ours.feature_types) == (FEATURES, ["float", "int", "i"])
    assert ours.attributes() == plain.attributes()
    assert ours.save_raw("json") == plain.save_raw("json")
    assert config(pickle.loads(pickle.dumps(ours))) == config(ours.copy()) == config(plain)
    assert ours.eval(matrix) == plain.eval(matrix)
    continued = [xgboost.train(params, matrix, 2, xgb_model=booster) for booster in (ours, plain)]
    assert continued[0].save_raw("json") == continued[1].save_raw("json")
    for booster in (ours, plain):
        booster.update(matrix, 5)
    assert ours.save_raw("json") == plain.save_raw("json")


def test_xgboost_after_early_stopping(file: Path, noise: Path, table: pd.DataFrame) -> None:
    changes = {"n_estimators": 50, "early_stopping_rounds": 3, "eval_set": {"eval": {"paths": (str(noise),)}}}
    ours = trained(file, "xgboost", params={"eta": 0.5}, **changes).booster()
    matrix = xgboost.QuantileDMatrix(table[FEATURES], table["y"], nthread=1)
    evals = [(xgboost.QuantileDMatrix(table[FEATURES], table["noise"], ref=matrix, nthread=1), "eval")]
    plain = xgboost.train(
        {"eta": 0.5, "nthread": 1}, matrix, 50, evals=evals, early_stopping_rounds=3, verbose_eval=False
    )
    assert ours.best_iteration == plain.best_iteration < plain.num_boosted_rounds() - 1
    assert ours.best_score == plain.best_score
    assert ours.save_raw("json") == plain.save_raw("json")


@pytest.mark.parametrize(("evaluated", "patience"), [(False, None), (True, None), (True, 3)])
def test_lightgbm_has_the_parameters_and_the_file_of_plain_lightgbm(
    file: Path, noise: Path, table: pd.DataFrame, evaluated: bool, patience: int | None
) -> None:
    params = {"verbosity": -1, "learning_rate": 0.3, "metric": ["l2", "l1"], "monotone_constraints": [1, 0, 0]}
    eval_set = {"eval": {"paths": (str(noise),)}} if evaluated else {}
    changes = {"params": params, "n_estimators": 20, "early_stopping_rounds": patience, "eval_set": eval_set}
    ours = trained(file, "lightgbm", **changes).booster()
    features = table[FEATURES].to_numpy(float)
    rows = lightgbm.Dataset(features, table["y"], feature_name=FEATURES, free_raw_data=False)
    # shoal sets these parameters, so that a training is reproducible and does not depend on the sample of the rows.
    set_by_shoal = {"deterministic": True, "force_col_wise": True, "feature_pre_filter": False}
    set_by_shoal |= {"num_threads": 1, "seed": 0, "bin_construct_sample_cnt": len(table)}
    plain = lightgbm.train(
        {**params, **set_by_shoal},
        rows,
        20,
        valid_sets=[rows.create_valid(features, table["noise"])] if evaluated else None,
        valid_names=["eval"],
        callbacks=[lightgbm.early_stopping(patience, verbose=False)] if patience else None,
    )
    assert (ours.best_iteration > 0) == bool(patience)
    assert (ours.best_iteration, ours.best_score) == (plain.best_iteration, plain.best_score)
    assert {**ours.params, **set_by_shoal} == plain.params
    assert ours.model_to_string() == plain.model_to_string()
    assert (ours.current_iteration(), ours.eval_valid()) == (plain.current_iteration(), plain.eval_valid())
    again = pickle.loads(pickle.dumps(ours))
    assert (again.params, again.best_iteration, again.best_score) == (ours.params, ours.best_iteration, ours.best_score)
    again, theirs = (lightgbm.train(params, rows, 2, init_model=each).model_to_string() for each in (ours, plain))
    assert again == theirs
    refitted = [each.refit(features, table["y"] + 1).predict(features) for each in (ours, plain)]
    np.testing.assert_array_equal(*refitted)


def test_xgboosts_estimator_is_as_after_its_own_fit(file: Path, table: pd.DataFrame) -> None:
    scaling = XGBScalingConfig(num_workers=1, num_cpu_per_worker=1)
    params = {"num_class": 3, "eta": 0.2, "max_depth": 2, "eval_metric": "mlogloss", "monotone_constraints": (1, 0, 0)}
    estimator = XGBEstimator(4, "multi:softprob", params, scaling)
    estimator.fit(table, FEATURES, "k", {"validation_0": table})
    ours = pickle.loads(pickle.dumps(estimator)).to_sklearn()
    plain = xgboost.XGBClassifier(n_estimators=4, objective="multi:softprob", n_jobs=1, **params)
    plain.fit(table[FEATURES], table["k"], eval_set=[(table[FEATURES], table["k"])], verbose=False)
    assert {**ours.get_params(), "n_jobs": 1} == plain.get_params()
    assert config(ours.get_booster()) == config(plain.get_booster())
    assert ours.evals_result() == plain.evals_result()
    assert list(ours.classes_) == list(plain.classes_)
    assert (ours.n_classes_, ours.n_features_in_) == (plain.n_classes_, plain.n_features_in_)
    assert list(ours.feature_names_in_) == list(plain.feature_names_in_)
    np.testing.assert_array_equal(ours.predict_proba(table[FEATURES]), plain.predict_proba(table[FEATURES]))
    ours.set_params(eta=0.9)
    assert config(estimator.get_booster()) == config(plain.get_booster())


def test_lightgbms_estimator_is_as_after_its_own_fit(file: Path, table: pd.DataFrame) -> None:
    scaling = LightGBMScalingConfig(num_workers=1, num_cpu_per_worker=1)
    params = {"num_class": 3, "learning_rate": 0.2, "max_depth": 2, "verbosity": -1}
    estimator = LightGBMEstimator(4, "multiclass", params, scaling)
    estimator.fit(table, FEATURES, "k", {"valid_0": table})
    ours = pickle.loads(pickle.dumps(estimator)).to_sklearn()
    plain = lightgbm.LGBMClassifier(n_estimators=4, objective="multiclass", n_jobs=1, deterministic=True, **params)
    features = table[FEATURES].astype(float)
    plain.fit(features, table["k"], eval_X=features + 0, eval_y=table["k"])
    theirs = {name: value for name, value in plain.get_params().items() if name != "deterministic"}
    assert {**ours.get_params(), "n_jobs": 1} == theirs
    assert (ours.best_iteration_, ours.n_iter_) == (plain.best_iteration_, plain.n_iter_)
    ours_scores, scores = ours.best_score_["valid_0"], plain.best_score_["valid_0"]
    assert dict(ours_scores) == pytest.approx(dict(scores))
    assert ours.evals_result_["valid_0"]["multi_logloss"] == pytest.approx(
        plain.evals_result_["valid_0"]["multi_logloss"]
    )
    assert (ours.n_features_in_, list(ours.feature_names_in_)) == (3, list(plain.feature_names_in_))
    assert (list(ours.classes_), ours.n_classes_, ours.objective_) == ([0, 1, 2], 3, plain.objective_)
    np.testing.assert_allclose(ours.predict_proba(features), plain.predict_proba(features))


@pytest.mark.parametrize("framework", ["xgboost", "lightgbm"])
def test_mlflow_keeps_of_the_model_what_it_keeps_of_the_plain_librarys(
    file: Path, table: pd.DataFrame, tmp_path: Path, framework: str
) -> None:
    import mlflow.lightgbm
    import mlflow.xgboost

    params = {"learning_rate": 0.2, "max_depth": 2}
    ours = trained(file, framework, params=params).booster()
    if framework == "xgboost":
        matrix = xgboost.QuantileDMatrix(table[FEATURES], table["y"], nthread=1)
        plain = xgboost.train({**params, "nthread": 1}, matrix, 5)
        for name, booster in (("ours", ours), ("plain", plain)):
            mlflow.xgboost.save_model(booster, tmp_path / name, model_format="ubj", pip_requirements=[])
        loaded = [mlflow.xgboost.load_model(tmp_path / name) for name in ("ours", "plain")]
        assert config(loaded[0]) == config(loaded[1])
    else:
        mlflow.lightgbm.save_model(ours, tmp_path / "ours", pip_requirements=[])
        assert mlflow.lightgbm.load_model(tmp_path / "ours").model_to_string() == ours.model_to_string()
