"""A metric that cannot be computed from the challenger's predictions is refused before the training."""

from __future__ import annotations

from typing import Any

import lightgbm
import numpy as np
import pytest
import xgboost

from shoal.errors import DataError, InvalidArgumentError
from shoal.jobs import Register
from shoal.jobs.metrics.evaluation import metric_value
from shoal.jobs.mlflow import promotion
from shoal.training.boosting.library import library_of

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(120, 2))
THREE = RNG.integers(0, 3, 120).astype(float)
TWO = (FEATURES[:, 0] > 0) * 1.0
GROUPS = np.arange(120) // 10
METRICS = (
    *("rmse", "r2", "logloss", "error", "auc", "accuracy", "f1", "f1_macro", "average_precision", "brier_score"),
    *("roc_auc_ovr", "ndcg@3", "balanced_accuracy"),
)


def custom(predictions: np.ndarray, data: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradient of the log loss. The predictions of such a model are raw scores."""
    probability = 1 / (1 + np.exp(-predictions))
    return probability - data.get_label(), probability * (1 - probability)


def predicted(library: str, params: dict[str, Any], labels: np.ndarray, objective: Any) -> np.ndarray:
    if library == "xgboost":
        data = xgboost.DMatrix(FEATURES, labels, qid=GROUPS if "rank" in params.get("objective", "") else None)
        given = {"eta": 1.0, "nthread": 1, **params}
        return xgboost.train(given, data, 20, obj=objective).predict(xgboost.DMatrix(FEATURES))
    ranks = params.get("objective") == "lambdarank"
    rows = lightgbm.Dataset(FEATURES, labels, group=[10] * 12 if ranks else None)
    given = {"learning_rate": 0.5, "verbosity": -1, "num_threads": 1, "min_data_in_leaf": 5, **params}
    return lightgbm.train({**given, **({"objective": objective} if objective else {})}, rows, 20).predict(FEATURES)


@pytest.mark.parametrize(
    ("library", "params", "objective"),
    [
        ("xgboost", {"objective": "binary:logistic"}, None),
        ("xgboost", {"objective": "binary:logitraw"}, None),
        ("xgboost", {"objective": "binary:hinge"}, None),
        ("xgboost", {"objective": "multi:softmax", "num_class": 3}, None),
        ("xgboost", {"objective": "multi:softprob", "num_class": 3}, None),
        ("xgboost", {"objective": "rank:ndcg"}, None),
        ("xgboost", {}, custom),
        ("lightgbm", {"objective": "binary"}, None),
        ("lightgbm", {"application": "softmax", "num_classes": 3}, None),
        ("lightgbm", {"objective": "lambdarank"}, None),
        ("lightgbm", {}, custom),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_metrics_that_fail_on_the_plain_librarys_predictions_are_refused(
    library: str, params: dict[str, Any], objective: Any
) -> None:
    output = library_of(library).output_of(params, custom_objective=objective is not None)
    labels = THREE if "num_class" in str(params) else TWO
    predictions = predicted(library, params, labels, objective)
    fail, refused = set(), set()
    for metric in METRICS:
        try:
            metric_value(metric, labels, predictions, GROUPS, gives_classes=output.gives_classes)
        except DataError:
            fail.add(metric)
        register = Register(model="m", metric=metric, holdout={"paths": ("/none",)})
        try:
            promotion.try_challenger(register, output)
        except InvalidArgumentError:
            refused.add(metric)
    assert refused == fail


def test_values_of_a_regression_may_be_probabilities_and_quantiles_are_several_values() -> None:
    output = library_of("xgboost").output_of({}, custom_objective=False)
    for metric in ("rmse", "logloss", "ndcg", "auc"):
        promotion.try_challenger(Register(model="m", metric=metric, holdout={"paths": ("/none",)}), output)
    quantiles = {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9]}
    output = library_of("xgboost").output_of(quantiles, custom_objective=False)
    with pytest.raises(InvalidArgumentError, match=r"\(reg:quantileerror\): mae needs one prediction per row"):
        promotion.try_challenger(Register(model="m", metric="mae", holdout={"paths": ("/none",)}), output)
