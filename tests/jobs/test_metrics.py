from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics as reference

from shoal.errors import DataError, InvalidArgumentError
from shoal.jobs.metrics import METRICS, best_mode, evaluate

RANDOM = np.random.default_rng(0)
BINARY = RANDOM.integers(0, 2, 200).astype(float)
SCORES = np.round(RANDOM.random(200), 1)  # with ties
CLASSES = RANDOM.integers(0, 3, 200).astype(float)
ONE_PER_CLASS = RANDOM.dirichlet([1.0, 1.0, 1.0], 200)


@pytest.mark.parametrize(
    ("metric", "labels", "predictions", "expected"),
    [
        ("rmse", CLASSES, SCORES, reference.root_mean_squared_error(CLASSES, SCORES)),
        ("mae", CLASSES, SCORES, reference.mean_absolute_error(CLASSES, SCORES)),
        ("auc", BINARY, SCORES, reference.roc_auc_score(BINARY, SCORES)),
        ("logloss", BINARY, SCORES * 0.9 + 0.05, reference.log_loss(BINARY, SCORES * 0.9 + 0.05)),
        ("logloss", CLASSES, ONE_PER_CLASS, reference.log_loss(CLASSES, ONE_PER_CLASS)),
        ("accuracy", BINARY, SCORES, reference.accuracy_score(BINARY, SCORES > 0.5)),
        ("error", CLASSES, ONE_PER_CLASS, 1 - reference.accuracy_score(CLASSES, ONE_PER_CLASS.argmax(axis=1))),
    ],
)
def test_as_scikit_learn_has_it(metric, labels, predictions, expected):
    assert evaluate(metric, labels, predictions) == pytest.approx(expected)


def test_one_wrong_certainty_is_not_infinite():
    assert np.isfinite(evaluate("logloss", np.array([1.0, 0.0]), np.array([0.0, 0.0])))


@pytest.mark.parametrize(
    ("metric", "labels", "predictions", "said"),
    [
        ("logloss", BINARY, SCORES * 5, "needs probabilities"),
        ("error", BINARY, SCORES - 3, "needs probabilities"),
        ("auc", np.ones(5), np.ones(5), "one class only"),
        ("rmse", CLASSES, ONE_PER_CLASS, "one prediction per row"),
        ("accuracy", CLASSES, SCORES, "class numbers 0 to 1"),
        ("rmse", np.array([]), np.array([]), "0 labels"),
    ],
)
def test_what_does_not_suit_a_metric_is_said(metric, labels, predictions, said):
    with pytest.raises(DataError, match=said):
        evaluate(metric, labels, predictions)


def test_every_metric_has_a_direction():
    assert {best_mode(metric) for metric in METRICS} == {"min", "max"}
    with pytest.raises(InvalidArgumentError, match="is unknown; use one of"):
        best_mode("nonsense")
