"""Parameters of either library, merged with the objective and the number of rounds of the estimator."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.library import library_of
from shoal.training.boosting.params import seed_in


@pytest.mark.parametrize(
    ("framework", "params", "objective", "named"),
    [
        ("xgboost", {"objective": "binary:logistic"}, "reg:squarederror", "binary:logistic"),
        ("xgboost", {"eta": 0.1, "learning_rate": 0.2}, None, "learning_rate"),
        ("xgboost", {"n_estimators": 50}, None, "n_estimators"),
        ("xgboost", {"num_boost_round": 50}, None, "num_boost_round"),
        ("xgboost", {"max_depth": object()}, None, "max_depth"),
        ("xgboost", {"objective": lambda: 0}, None, "is a function: pass it to the estimator"),
        ("xgboost", {1: 2}, None, "name"),
        ("xgboost", {"objective": "reg:linear"}, len, r'objective is a function, but params contain objective="reg:l'),
        ("xgboost", {}, 3, "objective must be a function or the name of an objective"),
        ("lightgbm", {"app": "binary"}, "regression", 'app="binary"'),
        ("lightgbm", {"objective": "binary", "loss": "l1"}, None, "the same parameter"),
        ("lightgbm", {"num_iterations": 50}, None, "num_iterations"),
        ("lightgbm", {"num_leaves": object()}, None, "num_leaves"),
        ("lightgbm", {"app": "none"}, len, r'objective is a function, but params contain app="none"'),
        ("lightgbm", {"metric": len}, None, r"params\['metric'\] is a function: pass it to the estimator"),
    ],
)
def test_contradictions_and_what_cannot_be_written_down(
    framework: str, params: dict[Any, Any], objective: Any, named: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        library_of(framework).merge_params(params, objective, 100)


@pytest.mark.parametrize(
    ("framework", "params", "objective", "merged"),
    [
        ("xgboost", {"max_depth": 3}, len, {"max_depth": 3}),
        ("xgboost", {"n_estimators": 100}, None, {}),
        ("xgboost", {"objective": "reg:squarederror"}, "reg:squarederror", {"objective": "reg:squarederror"}),
        ("xgboost", {"objective": "reg:linear"}, "reg:squarederror", {"objective": "reg:squarederror"}),
        ("lightgbm", {"num_leaves": 3}, len, {"num_leaves": 3}),
        ("lightgbm", {"num_trees": 100}, None, {}),
    ],
)
def test_what_is_given_twice_alike_is_no_contradiction(
    framework: str, params: dict[str, Any], objective: Any, merged: dict[str, Any]
) -> None:
    assert library_of(framework).merge_params(params, objective, 100) == merged


def test_the_seed_is_the_parameters_own_if_they_name_one() -> None:
    names = library_of("xgboost").names
    assert [seed_in(params, 7, names) for params in ({}, {"seed": 1}, {"random_state": 2})] == [7, 1, 2]
    with pytest.raises(InvalidArgumentError, match="a seed must be an integer"):
        seed_in({"seed": "one"}, 7, names)
