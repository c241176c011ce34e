from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import xgboost

from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.boosting.params import json_params
from shoal.training.boosting.request import TrainRequest
from shoal.training.gang.placement import GangShape
from shoal.training.xgboost.library import XGBoost
from shoal.training.xgboost.params import (
    check_params,
    is_stochastic,
    worker_params,
)

EVAL_SET = {"eval": DatasetSpec(paths=("rows/",))}


def request(*input_cols: str, **fields: Any) -> TrainRequest:
    return TrainRequest(dataset={"paths": ("rows/",)}, input_cols=input_cols or ("a", "b"), label_col="y", **fields)


def test_numpy_scalars_become_plain() -> None:
    merged = XGBoost().merge_params(
        {"max_depth": np.int64(3), "eta": np.float32(0.5), "quantile_alpha": np.array([0.1, 0.9])}, None, 10
    )
    assert merged == {"max_depth": 3, "eta": 0.5, "quantile_alpha": [0.1, 0.9]}
    assert type(merged["max_depth"]) is int


@pytest.mark.parametrize(
    "params",
    [
        {"monotone_constraints": (1, -1)},
        {"monotone_constraints": [1, -1]},
        {"monotone_constraints": (np.int64(1), np.int64(-1))},
        {"monotone_constraints": np.array([1, -1])},
        {"monotone_constraints": "(1,-1)"},
        {"monotone_constraints": {"a": 1, "b": np.int8(-1)}},
        {"interaction_constraints": [("a",), ["b"]], "monotone_constraints": (1, -1)},
        {"interaction_constraints": "[[0],[1]]", "monotone_constraints": (1, -1)},
        {"monotone_constraints": (1, -1), "seed": None, "tree_method": None, "nthread": None, "objective": None},
    ],
)
def test_every_form_of_a_value_reaches_xgboost(params: dict[str, Any]) -> None:
    merged = XGBoost().merge_params(params, None, 10)
    read = TrainRequest.model_validate_json(request(params=merged).model_dump_json())
    given = worker_params(XGBoost().merge_params(read.params, None, 10), GangShape(1, 1))
    check_params(given, request())
    features = np.random.default_rng(0).normal(size=(200, 2))
    matrix = xgboost.DMatrix(features, features @ [1, -1], feature_names=["a", "b"])
    config = json.loads(xgboost.Booster(given, [matrix]).save_config())
    expected = {"a": [0], "b": [1]}.values() if "interaction_constraints" in params else []
    tree = config["learner"]["gradient_booster"]["tree_train_param"]
    assert tree["monotone_constraints"].replace(" ", "") == "(1,-1)"
    assert json.loads(tree["interaction_constraints"] or "[]") == list(expected)


def test_metrics_and_what_is_no_value() -> None:
    assert json_params({"eval_metric": ("rmse", "mae")}) == {"eval_metric": ["rmse", "mae"]}
    assert json_params({"eval_metric": {"rmse", "mae"}}) == {"eval_metric": ["mae", "rmse"]}
    assert XGBoost().merge_params({"monotone_constraints": (1, 0)}, None, 1) == {"monotone_constraints": (1, 0)}
    assert XGBoost().merge_params({"max_depth": None, "objective": None}, "rank:ndcg", 1) == {"objective": "rank:ndcg"}
    with pytest.raises(InvalidArgumentError, match=r"params must be a dict, not \[.*as a list, such as"):
        XGBoost().merge_params([("eval_metric", "rmse"), ("eval_metric", "mae")], None, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"params\['monotone_constraints'\] must have names as keys, not 0"):
        XGBoost().merge_params({"monotone_constraints": {0: 1}}, None, 1)


def test_what_workers_get() -> None:
    assert worker_params({"eta": 0.1, "n_jobs": 2}, GangShape(1, 2)) == {
        "eta": 0.1,
        "nthread": 2,
        "device": "cpu",
    }
    assert worker_params({"random_state": 1}, GangShape(1, 2, 1)) == {"nthread": 2, "device": "cuda"}


def test_when_xgboost_draws_lots() -> None:
    assert not is_stochastic({"objective": "binary:logistic", "subsample": 1.0, "max_depth": 3})
    for params in (
        {"subsample": 0.5},
        {"colsample_bynode": 0.9},
        {"booster": "dart"},
        {"rate_drop": 0.1},
        {"objective": "rank:ndcg"},
    ):
        assert is_stochastic(params)


@pytest.mark.parametrize("params", [{"nthread": 4}, {"n_jobs": 4}, {"tree_method": "exact"}, {"booster": "gblinear"}])
def test_params_that_workers_cannot_follow(params: dict) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(params))):
        worker_params(params, GangShape(1, 2))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"objective": "multi:softprob", "num_class": 3, "eval_metric": ["merror", "mlogloss"]},
        {"objective": "binary:logistic", "scale_pos_weight": 2, "max_delta_step": 1, "verbosity": 0},
        {"booster": "dart", "rate_drop": 0.1, "subsample": 0.5, "lambda": 2, "alpha": 1, "gamma": 0.1},
        {"monotone_constraints": {"a": 1}, "interaction_constraints": [["a", "b"]], "base_score": 0.5},
        {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9]},
        {"objective": "survival:cox"},
        {"objective": "reg:gamma"},
        {"num_class": 3, "disable_default_eval_metric": True},
    ],
)
def test_good_params_pass(params: dict) -> None:
    check_params(worker_params(params, GangShape(1, 1)), request())


def test_params_of_categories() -> None:
    check_params(
        worker_params({"max_cat_to_onehot": 2, "max_cat_threshold": 8}, GangShape(1, 1)),
        request(categorical_cols=("b",)),
    )
    with pytest.raises(InvalidArgumentError, match=r"name the columns in fit\(categorical_cols=\)"):
        check_params({"enable_categorical": True}, request())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_depth", "deep"),
        ("subsample", 3),
        ("objective", "reg:sqared"),
        ("eval_metric", "rsme"),
        ("monotone_constraints", {"z": 1}),
        ("objective", "multi:softprob"),
    ],
)
def test_xgboost_refuses_a_value(name: str, value: Any) -> None:
    with pytest.raises(TrainingError) as caught:
        check_params({name: value}, request())
    assert caught.value.permanent
    message = str(caught.value)
    assert "XGBoost refuses the parameters" in message
    assert "Stack trace" not in message
    assert "workspace/src" not in message


def test_its_message_names_the_parameter() -> None:
    with pytest.raises(TrainingError, match="max_depth"):
        check_params({"max_depth": "deep"}, request("a"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("maxdepth", "did you mean max_depth"), ("early_stopping_rounds", "fit"), ("huber_slope", "reg:squarederror")],
)
def test_unknown_parameters_are_errors(name: str, hint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=hint) as caught:
        check_params({name: 1, "eta": 0.1}, request("a"))
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"objective": "binary:logistic"},
        {"objective": "multi:softmax", "num_class": 3},
        {"objective": "rank:ndcg"},
        {"objective": "survival:aft"},
        {"objective": "reg:quantileerror", "quantile_alpha": [0.2, 0.8]},
    ],
    ids=lambda params: params.get("objective", "default"),
)
def test_a_metric_is_refused_exactly_if_plain_xgboost_refuses_it(params: dict[str, Any]) -> None:
    features = np.random.default_rng(0).normal(size=(20, 2))
    labels = np.arange(20.0) % (3 if "num_class" in params else 2)
    grouped = params.get("objective") == "rank:ndcg"
    matrix = xgboost.DMatrix(features, labels, qid=np.arange(20) // 10 if grouped else None)
    if params.get("objective") == "survival:aft":
        matrix.set_float_info("label_lower_bound", labels + 1)
        matrix.set_float_info("label_upper_bound", labels + 2)
    asked = request(group_col="q" if grouped else None)
    evaluated = asked.model_copy(update={"eval_set": EVAL_SET})
    metrics = ("rmse", "logloss", "auc", "merror", "mlogloss", "ndcg@3", "aft-nloglik", "interval-regression-accuracy")
    for metric in metrics:
        given = worker_params({**params, "eval_metric": ["mphe", metric]}, GangShape(1, 1))
        try:
            xgboost.train(given, matrix, 1, evals=[(matrix, "eval")], verbose_eval=False)
        except xgboost.core.XGBoostError:
            with pytest.raises(TrainingError, match=f'cannot compute eval_metric="{metric}" with objective=.*: use a'):
                check_params(given, evaluated)
        else:
            check_params(given, evaluated)
        check_params(given, asked)  # without an eval set, no metric is computed
    # The objective is a function, and the parameter is missing.
    check_params(
        worker_params({"num_class": 3, "eval_metric": "mlogloss"}, GangShape(1, 1)), request("a", eval_set=EVAL_SET)
    )


def test_an_unknown_parameter_is_refused_in_every_thread() -> None:
    """XGBoost reports its warnings to Python only in the thread that has imported it."""
    with ThreadPoolExecutor(4) as threads:
        checks = [threads.submit(check_params, {"maxdepth": 3}, request()) for _ in range(8)]
        assert all("did you mean max_depth" in str(check.exception()) for check in checks)
