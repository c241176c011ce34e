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

from shoal.data import DataConnector
from shoal.distributors.lightgbm import LightGBMEstimator, LightGBMScalingConfig
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
from shoal.training.boosting.engine import train
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.boosting.user_code import UserCode
from tests.support.two_node_cluster import TwoNodes
from tests.training.custom import squared_error

pytestmark = pytest.mark.ray

FEATURES = ["a", "n", "yes"]


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(
        {"a": rng.integers(-99, 99, 400) / 64, "n": rng.integers(0, 9, 400), "yes": rng.normal(size=400) > 0}
    )
    rows["y"] = rows["a"] - rows["n"] / 5
    rows["k"] = pd.qcut(rows["y"], 3, labels=False)
    rows["noise"] = rng.normal(size=400)
    return rows


@pytest.fixture(scope="module")
def file(table: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    table.to_parquet(path, index=False)
    return path


def trained(file: Path, framework: str, user_code: UserCode | None = None, **changes: Any) -> TrainResult:
    """The result as it is read back from a job's files."""
    values = {
        "framework": framework,
        "dataset": {"paths": (str(file),)},
        "input_cols": FEATURES,
        "label_col": "y",
        "n_estimators": 5,
        "scaling_config": {"num_workers": 1},
    }
    result = train(TrainRequest(**{**values, **changes}), user_code=user_code)
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
    driver: TwoNodes, file: Path, table: pd.DataFrame, label: str, params: dict[str, Any]
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


def test_xgboost_after_early_stopping(driver: TwoNodes, file: Path, table: pd.DataFrame) -> None:
    changes = {"n_estimators": 50, "early_stopping_rounds": 3, "eval_set": {"eval": {"paths": (str(file),)}}}
    ours = trained(file, "xgboost", UserCode((Worse(),)), params={"eta": 0.5, "device": "cpu"}, **changes).booster()
    matrix = xgboost.QuantileDMatrix(table[FEATURES], table["y"], nthread=1)
    plain = xgboost.train(
        {"eta": 0.5, "nthread": 1}, matrix, 50, evals=[(matrix, "eval")], early_stopping_rounds=3, verbose_eval=False,
        callbacks=[Worse()],
    )  # fmt: skip
    assert ours.best_iteration == plain.best_iteration < plain.num_boosted_rounds() - 1
    assert ours.best_score == plain.best_score
    assert ours.save_raw("json") == plain.save_raw("json")


class Worse(xgboost.callback.TrainingCallback):
    """Makes the model worse from the fourth round."""

    def before_iteration(self, model: xgboost.Booster, epoch: int, evals_log: Any) -> bool:
        if epoch >= 4:
            model.set_param("eta", 5)
        return False


@pytest.mark.parametrize(("evaluated", "patience"), [(False, None), (True, None), (True, 3)])
def test_lightgbm_has_the_parameters_and_the_file_of_plain_lightgbm(
    driver: TwoNodes, file: Path, table: pd.DataFrame, evaluated: bool, patience: int | None
) -> None:
    params = {"verbosity": -1, "learning_rate": 0.3, "metric": ["l2", "l1"], "monotone_constraints": [1, 0, 0]}
    noise = file.with_name("noise.parquet")
    table.assign(y=table["noise"]).to_parquet(noise, index=False)
    eval_set = {"eval": {"paths": (str(noise),)}} if evaluated else {}
    changes = {"params": params, "n_estimators": 20, "early_stopping_rounds": patience, "eval_set": eval_set}
    ours = trained(file, "lightgbm", **changes).booster()
    features = table[FEATURES].to_numpy(float)
    rows = lightgbm.Dataset(features, table["y"], feature_name=FEATURES, free_raw_data=False)
    # shoal sets these parameters, so that a training is reproducible and does not depend on the sample of the rows.
    set_by_shoal = {"deterministic": True, "force_col_wise": True, "feature_pre_filter": False, "num_threads": 1}
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
