from __future__ import annotations

import re

import numpy as np
import pytest
import sklearn.metrics as reference

from shoal.errors import DataError, InvalidArgumentError
from shoal.models.metrics import NAMES, best_constant, best_mode, constant, metric_value
from shoal.models.registry import digest_tag, holdout_metrics, metric_tag

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
        ("r2", CLASSES, SCORES, reference.r2_score(CLASSES, SCORES)),
        (
            "mean_absolute_percentage_error",
            BINARY + 1,
            SCORES,
            reference.mean_absolute_percentage_error(BINARY + 1, SCORES),
        ),
        ("f1", BINARY, SCORES, reference.f1_score(BINARY, SCORES > 0.5)),
        (
            "f1_macro",
            CLASSES,
            ONE_PER_CLASS,
            reference.f1_score(CLASSES, ONE_PER_CLASS.argmax(axis=1), average="macro"),
        ),
        ("average_precision", BINARY, SCORES, reference.average_precision_score(BINARY, SCORES)),
        ("roc_auc_ovr", CLASSES, ONE_PER_CLASS, reference.roc_auc_score(CLASSES, ONE_PER_CLASS, multi_class="ovr")),
        ("brier_score", BINARY, SCORES, reference.brier_score_loss(BINARY, SCORES)),
        ("error", CLASSES, ONE_PER_CLASS, 1 - reference.accuracy_score(CLASSES, ONE_PER_CLASS.argmax(axis=1))),
    ],
)
def test_as_scikit_learn_has_it(metric, labels, predictions, expected):
    assert metric_value(metric, labels, predictions) == pytest.approx(expected)


def test_one_wrong_certainty_is_not_infinite():
    assert np.isfinite(metric_value("logloss", np.array([1.0, 0.0]), np.array([0.0, 0.0])))


@pytest.mark.parametrize(
    ("metric", "labels", "predictions", "said"),
    [
        ("logloss", BINARY, SCORES * 5, "needs probabilities"),
        ("error", BINARY, SCORES - 3, "needs probabilities"),
        ("auc", np.ones(5), np.ones(5), "one class only"),
        ("auc", np.arange(9.0), np.ones(9), r"but the holdout has 0, 1, 2, 3, 4, \.\.\.: convert the labels"),
        ("rmse", CLASSES, ONE_PER_CLASS, "one prediction per row"),
        ("accuracy", CLASSES, SCORES, "class numbers from 0 to 1"),
        ("rmse", np.array([]), np.array([]), "0 labels"),
        ("mean_squared_log_error", -BINARY, SCORES, "mean_squared_log_error cannot be computed"),
        ("f1", CLASSES, ONE_PER_CLASS, "f1 needs class numbers from 0 to 1 as labels"),
        ("ndcg", CLASSES, SCORES, "ndcg needs the group of each row"),
    ],
)
def test_what_does_not_suit_a_metric_is_said(metric, labels, predictions, said):
    with pytest.raises(DataError, match=said):
        metric_value(metric, labels, predictions)


PLAIN = [name for name in NAMES if "@" not in name]


def test_every_metric_has_a_direction():
    assert {best_mode(metric) for metric in PLAIN} == {"min", "max"}
    with pytest.raises(InvalidArgumentError, match="is unknown; use one of"):
        best_mode("nonsense")
    with pytest.raises(InvalidArgumentError, match='did you mean "log_loss"'):
        best_mode("neg_log_loss")
    with pytest.raises(InvalidArgumentError, match="is unknown"):
        best_mode("ndcg@0")
    for wrong in ("quantile", "mean_pinball_loss", "mean_pinball_loss@90", "mean_pinball_loss@0.0"):
        with pytest.raises(InvalidArgumentError, match=r'did you mean "mean_pinball_loss@0\.9"'):
            best_mode(wrong)


@pytest.mark.parametrize("metric", [*PLAIN, "mean_pinball_loss@0.9"])
def test_every_metric_can_be_computed_and_a_constant_is_its_baseline(metric):
    many = {"roc_auc_ovr", "roc_auc_ovo"}
    labels = CLASSES if metric in many else BINARY + (best_constant(metric) != "majority")
    predictions = ONE_PER_CLASS if metric in many else SCORES + (best_constant(metric) != "majority")
    groups = np.arange(200) // 7

    value = metric_value(metric, labels, predictions, groups)
    baseline = metric_value(metric, labels, constant(best_constant(metric), metric, labels), groups)

    assert np.isfinite([value, baseline]).all()


OF_SCORES = {
    "auc": reference.roc_auc_score,
    "roc_auc": reference.roc_auc_score,
    "average_precision": reference.average_precision_score,
    "brier_score": reference.brier_score_loss,
}


@pytest.mark.parametrize("metric", OF_SCORES)
def test_a_metric_of_scores_takes_labels_of_two_classes_and_refuses_others_as_scikit_learn_does(metric):
    for labels in (BINARY, 2 * BINARY - 1):
        assert metric_value(metric, labels, SCORES) == OF_SCORES[metric](labels, SCORES)
        assert constant("majority", metric, labels).tolist() == [BINARY.mean()] * 200
    refused = "needs the labels 0 and 1 .or -1 and 1., but the holdout has"
    for labels in (CLASSES, BINARY / 2 + 0.25, BINARY - 0.5 + SCORES):
        with pytest.raises(ValueError, match=r"\w"):
            OF_SCORES[metric](labels, SCORES)
        with pytest.raises(DataError, match=refused):
            metric_value(metric, labels, SCORES)
        with pytest.raises(DataError, match=refused):
            constant("majority", metric, labels)


@pytest.mark.parametrize("metric", ["ndcg", "ndcg@3"])
def test_ndcg_is_the_mean_of_scikit_learns_over_groups_with_different_labels(metric):
    groups = RANDOM.permutation(np.repeat(np.arange(20), np.arange(1, 21)))[:200]
    labels = RANDOM.integers(0, 4, len(groups)).astype(float)
    labels[groups == 9] = 2.0
    scores = np.round(RANDOM.random(len(groups)), 1)
    k = 3 if metric == "ndcg@3" else None
    each = [
        reference.ndcg_score([labels[groups == group]], [scores[groups == group]], k=k)
        for group in np.unique(groups)
        if len(set(labels[groups == group])) > 1
    ]

    assert metric_value(metric, labels, scores, groups) == pytest.approx(np.mean(each))
    with pytest.raises(DataError, match="in each group all labels are equal"):
        metric_value(metric, np.ones(3), np.ones(3), np.array([0, 0, 1]))


def test_the_loss_of_a_quantile_is_scikit_learns_and_its_baseline_is_this_quantile():
    labels = RANDOM.exponential(size=200)
    value = metric_value("mean_pinball_loss@0.9", labels, SCORES)
    assert value == reference.mean_pinball_loss(labels, SCORES, alpha=0.9)
    best = constant(best_constant("mean_pinball_loss@.9"), "mean_pinball_loss@.9", labels)
    assert best.tolist() == [np.quantile(labels, 0.9)] * 200


def test_constants_are_the_best_of_their_kind():
    skewed = np.array([0.0, 0.0, 0.0, 10.0])
    assert constant("mean", "rmse", skewed).tolist() == [2.5] * 4
    assert constant("median", "mae", skewed).tolist() == [0.0] * 4
    assert constant("majority", "rmse", skewed).tolist() == [0.0] * 4
    assert constant("majority", "logloss", skewed / 10).tolist() == [0.25] * 4
    assert constant("majority", "accuracy", np.array([0.0, 1, 2, 2])).tolist() == [[0.25, 0.25, 0.5]] * 4
    assert [best_constant(metric) for metric in ("rmse", "mae", "auc", "f1_macro", "ndcg@5")] == [
        "mean", "median", "majority", "majority", "mean",
    ]  # fmt: skip


def test_a_prediction_that_is_not_finite_makes_the_metric_nan():
    assert np.isnan(metric_value("rmse", BINARY, np.where(SCORES > 0.5, np.nan, SCORES)))
    assert np.isnan(metric_value("accuracy", BINARY, np.where(SCORES > 0.5, np.inf, SCORES)))


@pytest.mark.parametrize("metric", [name.replace("@K", "@10").replace("@Q", "@0.9") for name in NAMES])
def test_tags_of_a_version_name_each_metric_as_its_options_do(metric: str) -> None:
    tags = {metric_tag(metric): "0.5", digest_tag(metric): "d"}

    assert holdout_metrics(tags) == (metric, {metric: 0.5})
    assert re.fullmatch(r"[\w. -]+", next(iter(tags)))
