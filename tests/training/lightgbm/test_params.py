from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.boosting.params import seed_in
from shoal.training.boosting.request import TrainRequest
from shoal.training.gang.placement import GangShape
from shoal.training.lightgbm.library import LightGBM
from shoal.training.lightgbm.params import (
    NAMES,
    begins_anew,
    check_params,
    has_metric,
    segment_params,
    worker_params,
)


def request(*input_cols: str, **fields: Any) -> TrainRequest:
    fields = {"framework": "lightgbm", "dataset": {"paths": ("rows/",)}, "label_col": "y", **fields}
    return TrainRequest(input_cols=input_cols or ("a", "b"), **fields)


def made(params: dict[str, Any], workers: int = 2, gpus: int = 0) -> dict[str, Any]:
    return worker_params(LightGBM().merge_params(params, None, 10), request(), GangShape(workers, 2, gpus))


def test_names_that_matter_early_are_lightgbms_own() -> None:
    merged = LightGBM().merge_params(
        {"loss": "mse", "random_state": np.int64(3), "device": "cuda", "eta": 0.1}, "l2", 10
    )
    assert merged == {"objective": "l2", "seed": 3, "device_type": "cuda", "eta": 0.1}
    assert LightGBM().device_of(merged) == "cuda"
    assert (seed_in(merged, 7, NAMES), seed_in({}, 7, NAMES)) == (3, 7)


def test_whether_there_is_a_metric_to_watch() -> None:
    assert all(has_metric(given) for given in ({}, {"metric": ""}, {"metric": "l1,l2"}, {"metric": ["auc"]}))
    assert not any(has_metric(given) for given in ({"metric": "None"}, {"metric": ["na"]}, {"objective": "none"}))
    assert has_metric({"objective": "none", "metric": "l2"})


def test_columns_of_categories_and_columns_of_codes_are_not_mixed() -> None:
    asked = request(categorical_cols=("b",))
    given = worker_params({}, asked, GangShape(1, 1))
    assert given["categorical_feature"] == ["b"]
    check_params(given, asked)
    with pytest.raises(InvalidArgumentError, match=r"give all of them in fit\(categorical_cols=\)"):
        worker_params({"cat_feature": "name:a"}, asked, GangShape(1, 1))


def test_what_workers_get() -> None:
    custom = worker_params({}, request(), GangShape(2, 2), custom_objective=True)
    assert custom["objective"] == "none"
    given = made({"eta": 0.1, "n_jobs": 2, "sub_row": 0.5, "seed": 4})
    assert {"learning_rate": 0.1, "bagging_fraction": 0.5, "num_threads": 2}.items() <= given.items()
    assert {"deterministic": True, "force_col_wise": True, "tree_learner": "data", "num_machines": 2}.items() <= (
        given.items()
    )
    assert "seed" not in given
    alone = made({"force_row_wise": True, "tree_learner": "serial"}, workers=1)
    assert alone["tree_learner"] == "serial"
    assert "force_col_wise" not in alone
    assert made({}, workers=1, gpus=1)["device_type"] == "cuda"
    with pytest.raises(InvalidArgumentError, match="CUDA only in a single worker, but there are 2 workers"):
        made({}, gpus=1)
    assert made({"device": "gpu"}, gpus=1)["device_type"] == "gpu"
    assert made({"categorical_feature": "name:b,0"})["categorical_feature"] == ["b", 0]


def test_each_segment_draws_lots_of_its_own() -> None:
    given = made({"bagging_seed": 5, "bagging_fraction": 0.5})
    assert [(segment_params(given, 7, i)["seed"], segment_params(given, 7, i)["bagging_seed"]) for i in (0, 2)] == [
        (7, 5),
        (9, 7),
    ]


def test_when_more_is_kept_than_a_model_holds() -> None:
    assert not begins_anew(made({"objective": "binary", "bagging_fraction": 1.0, "num_leaves": 3}))
    assert segment_params(made({}), 7, 3)["seed"] == 7
    for params in (
        {"subsample": 0.5},
        {"colsample_bytree": 0.9},
        {"boost": "dart"},
        {"boosting": "goss"},
        {"extra_trees": True},
        {"cegb_penalty_split": 0.1},
        {"boosting_type": "random_forest"},
        {"objective": "xendcg"},
    ):
        assert begins_anew(made(params))


@pytest.mark.parametrize(
    ("params", "hint"),
    [
        ({"num_threads": 4}, "num_cpu_per_worker=4"),
        ({"tree_learner": "feature"}, "tree_learner"),
        ({"tree_learner": "serial"}, "tree_learner"),
        ({"linear_tree": True}, "linear_tree"),
        ({"objective": "custom"}, "means that the objective is a function"),
        ({"group_column": "q"}, r"group_col to fit\(\)"),
        ({"machines": "10.0.0.1:1"}, "shoal connects the workers itself"),
        ({"workers": "10.0.0.1:1"}, "shoal connects the workers itself"),
        ({"early_stopping_round": 3}, r"fit\(\)"),
        ({"early_stopping_rounds": 3}, r"fit\(\)"),
        ({"verbose_eval": 3}, r"fit\(\)"),
        ({"num_leafs": 3}, "did you mean num_leaf"),
        ({"learning_rate": 0.1, "shrinkage_rate": 0.2}, "the same parameter"),
        ({"categorical_feature": ["z"]}, "'z'"),
    ],
)
def test_params_that_workers_cannot_follow(params: dict, hint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=hint):
        made(params)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"objective": "multiclass", "num_class": 3, "metric": ["multi_error", "multi_logloss"]},
        {"objective": "binary", "is_unbalance": True, "metric": "auc,binary_logloss", "verbosity": 1},
        {"boosting": "dart", "drop_rate": 0.1, "bagging_fraction": 0.5, "bagging_freq": 1},
        {"data_sample_strategy": "goss", "extra_trees": True},
        {"objective": "gamma"},
        {"objective": "tweedie", "metric": "None"},
        {"objective": "huber", "alpha": 0.9, "monotone_constraints": [1, 0]},
        {"objective": "cross_entropy", "categorical_feature": ["b"]},
        {"boosting": "rf", "bagging_fraction": 0.5, "bagging_freq": 1},
    ],
)
def test_good_params_pass(params: dict) -> None:
    check_params(made(params), request())


@pytest.mark.parametrize("objective", ["lambdarank", "rank_xendcg", "regression"])
def test_rows_in_groups(objective: str) -> None:
    params = made({"objective": objective, "metric": "ndcg", "eval_at": [5]})
    check_params(params, request(group_col="q"))
    with pytest.raises(TrainingError, match="query information"):
        check_params(params, request())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_depth", "deep", "max_depth"),
        ("num_leaves", 1, "num_leaves"),
        ("objective", "regresion", "regresion"),
        ("objective", "multiclass", "[Nn]umber of classes"),
    ],
)
def test_lightgbm_refuses_a_value(name: str, value: Any, said: str) -> None:
    with pytest.raises(TrainingError, match=f"LightGBM refuses the parameters: .*{said}") as caught:
        check_params(made({name: value}), request())
    assert caught.value.permanent
    assert ".cpp" not in str(caught.value)
    assert ".hpp" not in str(caught.value)


def test_a_metric_that_it_would_leave_out_without_a_word() -> None:
    with pytest.raises((InvalidArgumentError, TrainingError), match="rsme"):
        check_params(made({"metric": ["l1", "rsme"]}), request())


def test_columns_that_would_be_renamed() -> None:
    with pytest.raises(InvalidArgumentError, match="rename"):
        check_params(made({}), request("a b"))


@pytest.mark.parametrize(
    ("params", "use_gpu", "device"),
    [({}, None, None), ({}, True, None), ({}, False, None), ({"device": "gpu"}, None, "gpu")],
)
def test_the_users_device(params: dict[str, Any], use_gpu: bool | None, device: str | None) -> None:
    asked = TrainRequest(
        framework="lightgbm",
        dataset={"paths": ("a.parquet",)},
        input_cols=("a", "b"),
        label_col="y",
        params=params,
        scaling_config={"use_gpu": use_gpu},
    )
    assert LightGBM().device(asked) == device
