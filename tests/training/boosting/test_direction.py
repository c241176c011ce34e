"""Whether a lower or a higher value of a metric is better: for every metric of both libraries, and those of users."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightgbm
import numpy as np
import pytest
from xgboost.callback import EarlyStopping

from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import InvalidArgumentError
from shoal.models.metrics import NAMES, best_mode
from shoal.training.boosting.library import library_of
from shoal.training.boosting.params import UserCode, agreed, told
from shoal.training.boosting.request import TrainRequest
from shoal.training.boosting.trials import TrialPlan
from shoal.training.gang.placement import GangShape
from shoal.training.lightgbm import params as lightgbm_params
from shoal.training.xgboost import params as xgboost_params
from tests.support.boosting_metrics import BOUNDS, CASES, COLUMNS, MetricCase, table
from tests.support.without_ray import nodes_without_ray

ALONE = GangShape(1, 1)


def request(case: MetricCase, **changes: Any) -> TrainRequest:
    label = BOUNDS if case.label == "low" else {"label_col": case.label}
    fields = {
        "framework": case.framework,
        "dataset": DatasetSpec(paths=("/rows.parquet",)),
        "eval_set": {"holdout": DatasetSpec(paths=("/holdout.parquet",))},
        "input_cols": COLUMNS,
        "params": case.all_params,
        **label,
        **({"group_col": "query"} if case.group else {}),
        **changes,
    }
    return TrainRequest(**fields)


def metrics_of(asked: TrainRequest) -> dict[str, Any]:
    library = library_of(asked.framework)
    params, _ = library.params(asked, ALONE, UserCode())
    return dict(library.metrics(asked, params, UserCode()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_that_learns_its_training_rows_moves_each_metric_in_its_direction(case):
    rows = table(600, 1)
    values = case.values(rows, rows, 8, learning_rate=0.5)

    *_, last = metrics_of(request(case)).items()

    assert last == (case.evaluated, "maximize" if values[-1] > values[0] else "minimize")
    assert values[0] != values[-1]


def test_the_directions_are_those_of_the_libraries_except_for_their_faults():
    """XGBoost guesses by the beginning of a name, and LightGBM forgets one of its metrics."""
    known = {"xgboost": xgboost_params, "lightgbm": lightgbm_params}
    theirs: dict[str, dict[str, bool]] = {"xgboost": {}, "lightgbm": {}}
    for case in CASES:
        if case.framework == "xgboost":
            stopping = EarlyStopping(rounds=1)
            stopping.after_iteration(_NoModel(), 0, {"holdout": {case.evaluated: [0.0]}})
            theirs["xgboost"][case.evaluated] = stopping.maximize
        else:
            group = [2] if case.group else None
            rows = lightgbm.Dataset(np.ones((2, 1)), np.ones(2), group=group, params={"verbosity": -1})
            booster = lightgbm.Booster({**case.all_params, "verbosity": -1}, rows).add_valid(rows, "eval")
            theirs["lightgbm"] |= {each[1]: bool(each[3]) for each in booster.eval_valid()}
    other = {
        name
        for framework, found in theirs.items()
        for name, higher in found.items()
        if known[framework].direction_of(name) != ("maximize" if higher else "minimize")
    }
    assert other == {"ams@0.4", "interval-regression-accuracy", "r2"}


class _NoModel:
    def set_attr(self, **attributes: Any) -> None:
        pass


@pytest.mark.parametrize("module", [xgboost_params, lightgbm_params])
def test_metrics_that_the_library_and_the_promotion_share_have_one_direction(module):
    """The promotion computes metrics by scikit-learn's names."""
    shared = {name: module.direction_of(name) for name in NAMES if "@" not in name}
    shared |= {"ndcg@10": module.direction_of("ndcg@10")}
    shared = {name: found for name, found in shared.items() if found is not None}

    assert len(shared) > 3
    assert {name: f"{best_mode(name)}imize" for name in shared} == shared


def test_the_last_metric_is_the_last_that_the_library_evaluates():
    """A metric that is named twice counts where it stands first, and an alias is its metric."""
    xgb = request(MetricCase("xgboost", "", {"objective": "binary:logistic"}), label_col="binary")
    lgb = request(MetricCase("lightgbm", "", {"objective": "binary"}), label_col="binary")

    def found(asked: TrainRequest, **params: Any) -> list[str]:
        return list(metrics_of(asked.model_copy(update={"params": {**asked.params, **params}})))

    assert found(xgb, eval_metric=["auc", "logloss", "auc"]) == ["auc", "logloss"]
    assert found(xgb, disable_default_eval_metric=True) == []
    assert found(lgb, metric="auc,binary_logloss,auc") == ["auc", "binary_logloss"]
    assert found(lgb, metric=["l2", "mse", "l2_root"]) == ["l2", "rmse"]
    assert found(lgb, metric="None") == []


@pytest.mark.parametrize(
    ("value", "direction"),
    [(True, "maximize"), (np.bool_(False), "minimize"), (1, "maximize"), (np.int64(0), "minimize"), (None, None)],
)
def test_a_function_tells_the_direction_of_its_metric(value, direction):
    assert told("hits", value) == direction


@pytest.mark.parametrize("value", ["max", "False", 2, 0.5, [True]])
def test_a_direction_that_is_no_truth_value_is_refused(value):
    with pytest.raises(InvalidArgumentError, match="custom_metric hits must return"):
        told("hits", value)


def test_an_unknown_direction_must_be_given_and_must_not_contradict_the_metric():
    assert agreed("x", None, "maximize") == agreed("x", "maximize", None) == agreed("x", "maximize", "maximize")
    with pytest.raises(InvalidArgumentError, match='of x is better: set direction="minimize"'):
        agreed("x", None, None)
    with pytest.raises(InvalidArgumentError, match='direction="minimize" contradicts x, whose best value is the max'):
        agreed("x", "maximize", "minimize")


def hits(predictions: np.ndarray, data: Any) -> tuple[str, float, bool]:
    return "hits", float(((predictions > 0.5) == data.get_label()).mean()), True


def error(predictions: np.ndarray, data: Any) -> tuple[str, float]:
    return "error-of-mine", float(np.abs(predictions - data.get_label()).mean())


@pytest.mark.parametrize(
    ("framework", "params", "metrics", "given", "direction"),
    [
        ("xgboost", {"eval_metric": ["rmse", "auc"]}, (), None, "maximize"),
        ("xgboost", {"eval_metric": ["auc", "rmse", "auc"]}, (), None, "minimize"),
        ("xgboost", {"eval_metric": "auc"}, (error,), "minimize", "minimize"),
        ("xgboost", {"eval_metric": "auc"}, (error,), None, "custom_metric error"),
        ("xgboost", {}, (), "maximize", "contradicts"),
        ("lightgbm", {"metric": "l2,r2"}, (), None, "maximize"),
        ("lightgbm", {"metric": "auc"}, (hits,), None, None),
        ("lightgbm", {"metric": "auc"}, (), "minimize", "contradicts"),
    ],
)
def test_early_stopping_asks_for_the_direction_of_the_last_metric(framework, params, metrics, given, direction):
    case = MetricCase(framework, "", params, "binary")
    asked = request(case, early_stopping_rounds=3, direction=given)
    library, code = library_of(framework), UserCode(metrics=metrics)
    checked, _ = library.params(asked, ALONE, code)
    if direction in (None, "minimize", "maximize"):
        assert library.stopping_direction(asked, checked, code) == direction
    else:
        with pytest.raises(InvalidArgumentError, match=direction):
            library.stopping_direction(asked, checked, code)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetSpec]:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    table(200, 1).to_parquet(path)
    with nodes_without_ray(1):
        yield DatasetSpec(paths=(str(path),))


def plan(rows: DatasetSpec, case: MetricCase, metrics: tuple[Any, ...] = (), **options: Any) -> TrialPlan:
    given = {"metric": None, "direction": None, "samples": (), **options}
    own = {"early_stopping_rounds": given.pop("stopping", None), "direction": given.pop("own", None)}
    asked = request(case, dataset=rows, eval_set={"holdout": rows}, **own)
    return TrialPlan(asked, ALONE, UserCode(metrics=metrics), **given)


BINARY = MetricCase("xgboost", "", {"objective": "binary:logistic"}, "binary")
BINARY_LGB = MetricCase("lightgbm", "", {"objective": "binary"}, "binary")
AUC = MetricCase("xgboost", "auc", BINARY.params, "binary")
RANK = MetricCase("lightgbm", "", {"objective": "lambdarank"}, "grade")


@pytest.mark.parametrize(
    ("case", "metrics", "options", "compared_by", "direction"),
    [
        (BINARY, (), {"metric": "auc"}, "auc", "maximize"),
        (BINARY_LGB, (), {"metric": "mse"}, "l2", "minimize"),
        (RANK, (), {"metric": "ndcg@3"}, "ndcg@3", "maximize"),
        (AUC, (error,), {"direction": "minimize"}, None, "minimize"),
        (AUC, (error,), {"own": "minimize"}, None, "minimize"),
        (AUC, (error,), {"metric": "auc"}, "auc", "maximize"),
        (AUC, (error,), {"metric": "auc", "own": "minimize"}, "auc", "maximize"),
        (AUC, (error,), {"metric": "error-of-mine", "direction": "minimize"}, "error-of-mine", "minimize"),
        (BINARY_LGB, (hits,), {}, None, None),
        (BINARY_LGB, (hits,), {"own": "maximize"}, None, "maximize"),
        (BINARY_LGB, (hits,), {"metric": "hits"}, "hits", None),
        (BINARY_LGB, (hits,), {"metric": "binary_logloss"}, "binary_logloss", "minimize"),
        (BINARY, (), {"samples": [{"eval_metric": "auc"}]}, "auc", "maximize"),
    ],
)  # fmt: skip
def test_a_search_knows_its_metric_and_direction(rows, case, metrics, options, compared_by, direction):
    found = plan(rows, case, metrics, **options)
    assert (found.compared_by, found.direction) == (compared_by, direction)


@pytest.mark.parametrize(
    ("case", "metrics", "options", "message"),
    [
        (AUC, (error,), {}, "custom_metric error is better: set direction="),
        (AUC, (error,), {"metric": "error-of-mine"}, "custom_metric error is better: set direction="),
        (AUC, (error,), {"direction": "maximize", "own": "minimize"}, "contradicts the custom_metric error"),
        (BINARY, (), {"direction": "maximize"}, 'contradicts the metric "logloss"'),
        (AUC, (), {"metric": "rmse"}, r"not among the metrics of the estimator \(auc\)"),
        (RANK, (), {"metric": "ndcg"}, "ndcg@4, ndcg@5: name one of these"),
        (BINARY, (), {"samples": [{"objective": "binary:logistic"}, {"objective": "binary:hinge"}]},
         r'"logloss" with .*logistic.* and "error" with .*hinge.*Name one metric for all'),
        (BINARY, (), {"samples": [{"eval_metric": "auc"}, {"eval_metric": "error"}]}, '"auc" with .* and "error"'),
        (MetricCase("xgboost", "", {"disable_default_eval_metric": True}, "binary"), (), {}, "no metric is evaluated"),
        (MetricCase("lightgbm", "None", {}, "binary"), (), {}, "no metric is evaluated"),
    ],
)  # fmt: skip
def test_a_search_without_one_metric_and_direction_is_refused(rows, case, metrics, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        plan(rows, case, metrics, **options)


def test_a_trial_with_another_metric_fails(rows):
    found = plan(rows, BINARY, samples=[{"max_depth": 3}], stopping=2)

    assert found.checked({"max_depth": 4}).direction == "minimize"
    with pytest.raises(InvalidArgumentError, match=r'"logloss" with .* and "auc" with'):
        found.checked({"eval_metric": "auc"})
