"""Compute the metrics by which a new model is compared with the champion, with scikit-learn for every framework, and
the constant predictions that a useful model must beat."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shoal.errors import DataError, InvalidArgumentError
from shoal.lazy_imports import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.floating]
    Codes: TypeAlias = NDArray[np.intp]

Mode = Literal["min", "max"]


class Takes(StrEnum):
    """Form in which a metric's function in scikit-learn expects the predictions, such as classes or probabilities."""

    VALUES = "values"
    CLASSES = "classes"
    SCORES = "scores of class 1"
    PROBABILITIES = "one probability per class"
    RANKS = "scores within groups"


@dataclass(frozen=True, slots=True)
class Metric:
    """Description of a metric: how to compute it with scikit-learn, and whether a low or a high value is better.

    Args:
        best: "min" if a lower value is better, "max" if a higher one is.
        takes: Form of the predictions that the function takes.
        function: Name of the function in ``sklearn.metrics``.
        options: Further arguments of the function.
    """

    best: Mode
    takes: Takes
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)


def _averaged(function: str, **options: Any) -> dict[str, Metric]:
    """Return the four variants of a classifier's metric, by scikit-learn's names, such as "f1" and "f1_macro".

    The variants are the metric of two classes, and its "micro", "macro" and "weighted" averages over many classes.
    """
    name = function.removesuffix("_score")
    averages = {name: "binary", **{f"{name}_{average}": average for average in ("micro", "macro", "weighted")}}
    return {
        name: Metric("max", Takes.CLASSES, function, {"average": average, "zero_division": 0, **options})
        for name, average in averages.items()
    }


_METRICS: dict[str, Metric] = {
    "rmse": Metric("min", Takes.VALUES, "root_mean_squared_error"),
    "mae": Metric("min", Takes.VALUES, "mean_absolute_error"),
    "logloss": Metric("min", Takes.PROBABILITIES, "log_loss"),
    "error": Metric("min", Takes.CLASSES, "zero_one_loss"),
    "auc": Metric("max", Takes.SCORES, "roc_auc_score"),
    "accuracy": Metric("max", Takes.CLASSES, "accuracy_score"),
    # All metrics below have the names of scikit-learn's scorers, without the prefix "neg_".
    **{
        name: Metric("min", Takes.VALUES, name)
        for name in (
            "max_error",
            "mean_absolute_error",
            "mean_absolute_percentage_error",
            "mean_gamma_deviance",
            "mean_poisson_deviance",
            "mean_squared_error",
            "mean_squared_log_error",
            "median_absolute_error",
            "root_mean_squared_error",
            "root_mean_squared_log_error",
        )
    },
    "r2": Metric("max", Takes.VALUES, "r2_score"),
    "explained_variance": Metric("max", Takes.VALUES, "explained_variance_score"),
    "d2_absolute_error_score": Metric("max", Takes.VALUES, "d2_absolute_error_score"),
    "balanced_accuracy": Metric("max", Takes.CLASSES, "balanced_accuracy_score"),
    "matthews_corrcoef": Metric("max", Takes.CLASSES, "matthews_corrcoef"),
    **_averaged("precision_score"),
    **_averaged("recall_score"),
    **_averaged("f1_score"),
    **_averaged("jaccard_score"),
    "average_precision": Metric("max", Takes.SCORES, "average_precision_score"),
    "roc_auc": Metric("max", Takes.SCORES, "roc_auc_score"),
    "brier_score": Metric("min", Takes.SCORES, "brier_score_loss"),
    "log_loss": Metric("min", Takes.PROBABILITIES, "log_loss"),
    "roc_auc_ovr": Metric("max", Takes.PROBABILITIES, "roc_auc_score", {"multi_class": "ovr"}),
    "roc_auc_ovo": Metric("max", Takes.PROBABILITIES, "roc_auc_score", {"multi_class": "ovo"}),
    "ndcg": Metric("max", Takes.RANKS, "ndcg_score"),
}

_NDCG_AT = re.compile(r"ndcg@([1-9]\d{0,5})")
_PINBALL_AT = re.compile(r"mean_pinball_loss@(0?\.\d{1,6})")

_MOST_CLASSES = 100_000
"""Largest number of classes. A column of ids as the label would fill the memory with a column per id."""

_NAMED_LABELS = 5
"""Number of labels that an error message lists."""

NAMES = tuple(sorted((*_METRICS, "ndcg@K", "mean_pinball_loss@Q")))
"""Legal values of `register.metric`, with K for a number of ranks, and Q for a quantile between 0 and 1."""


def metric_named(name: str) -> Metric:
    """Return the metric with a given name: how it is computed, and whether a lower or a higher value is better.

    Raises:
        InvalidArgumentError: There is no such metric; the message names a similar metric.
    """
    if at := _NDCG_AT.fullmatch(name):
        return Metric("max", Takes.RANKS, "ndcg_score", {"k": int(at[1])})
    if (quantile := quantile_of(name)) is not None:
        return Metric("min", Takes.VALUES, "mean_pinball_loss", {"alpha": quantile})
    if name not in _METRICS:
        near = difflib.get_close_matches(name.removeprefix("neg_"), _METRICS, n=1)
        if "quantile" in name or "pinball" in name:
            near = ["mean_pinball_loss@0.9"]
        hint = f'did you mean "{near[0]}"? All metrics' if near else "use one of"
        raise InvalidArgumentError(f'register.metric "{name}" is unknown; {hint}: {", ".join(NAMES)}')
    return _METRICS[name]


def quantile_of(metric: str) -> float | None:
    """Return the quantile of a pinball loss, which is 0.9 for "mean_pinball_loss@0.9"; None for any other metric."""
    at = _PINBALL_AT.fullmatch(metric)
    return float(at[1]) if at and 0 < float(at[1]) < 1 else None


def best_mode(metric: str) -> Mode:
    """Return "min" if a lower value of the metric is better, and "max" if a higher value is better.

    Raises:
        InvalidArgumentError: There is no such metric.
    """
    return metric_named(metric).best


def metric_value(
    metric: str,
    labels: Numbers,
    predictions: Numbers,
    groups: Codes | None = None,
    *,
    gives_classes: bool | None = False,
) -> float:
    """Compute the value of a metric from labels and predictions.

    Raises:
        DataError: The predictions or labels do not suit the metric, or there are no rows.
    """
    import sklearn.metrics

    labels = np.asarray(labels, dtype=np.float64)
    predictions = _as_numbers(metric, predictions)
    if labels.shape[0] == 0 or predictions.shape[0] != labels.shape[0]:
        raise DataError(
            f"the holdout has {labels.shape[0]} labels, but the model returned {predictions.shape[0]} predictions: "
            "name a holdout that is not empty, and a model that returns one prediction per row"
        )
    if not np.isfinite(predictions).all():
        return float("nan")
    how = metric_named(metric)
    function = getattr(sklearn.metrics, how.function)
    with warnings.catch_warnings():
        # scikit-learn warns if a metric is not defined for the rows (the result is NaN), and if float32 probabilities
        # do not add up to exactly 1. These warnings of scikit-learn are expected, so they are not shown.
        warnings.simplefilter("ignore")
        try:
            if how.takes is Takes.RANKS:
                return _over_groups(metric, labels, _one_column(metric, predictions), groups, function, how.options)
            if takes_classes(metric, predictions, gives_classes):
                numbers = class_numbers(metric, labels, None)
                return float(function(numbers, _one_column(metric, predictions).astype(np.intp), **how.options))
            true, predicted, options = _suited(metric, how.takes, labels, predictions)
            return float(function(true, predicted, **how.options, **options))
        except ValueError as error:
            raise DataError(
                f"{metric} cannot be computed on the holdout: {str(error).rstrip('.')}. Choose another metric"
            ) from error


def check_predictions(metric: str, predictions: Numbers, *, gives_classes: bool | None = False) -> None:
    """Check, with the predictions of some rows, that a metric can be computed from a model's predictions.

    Raises:
        DataError: The predictions do not suit the metric.
    """
    predictions = _as_numbers(metric, predictions)
    if not np.isfinite(predictions).all() or takes_classes(metric, predictions, gives_classes):
        return
    takes = metric_named(metric).takes
    (_one_column if takes in (Takes.VALUES, Takes.SCORES, Takes.RANKS) else _probabilities)(metric, predictions)


def check_output(
    metric: str, values: int, classes: int, *, gives_classes: bool = False, is_unbounded: bool = False
) -> None:
    """Check, before a model is trained, that a metric can be computed from the form of the model's predictions.

    Raises:
        DataError: The predictions do not suit the metric.
    """
    takes = metric_named(metric).takes
    labels = np.arange(classes, dtype=np.float64)
    if takes in (Takes.VALUES, Takes.RANKS):
        # Which labels these metrics accept depends on the metric, so only the number of values is checked.
        _one_column(metric, np.zeros(classes) if values == 1 else np.zeros((classes, values)))
    elif is_unbounded and (takes is not Takes.SCORES or metric == "brier_score"):
        raise DataError(
            f"{metric} needs probabilities{' or classes' if takes is Takes.CLASSES else ''}, but the model predicts "
            "raw scores, counts or times: choose another metric, or an objective that gives probabilities, such as "
            "binary:logistic or multi:softprob (XGBoost), or binary or multiclass (LightGBM)"
        )
    else:
        # A perfect prediction of each class.
        certain = labels if gives_classes or values == 1 else np.eye(classes, values)
        metric_value(metric, labels, certain, gives_classes=gives_classes)


def takes_classes(metric: str, predictions: Numbers, gives_classes: bool | None) -> bool:
    """Return whether a metric is computed from predicted class numbers and not from probabilities.

    Raises:
        DataError: The predictions are class numbers, but the metric needs probabilities.
    """
    takes = metric_named(metric).takes
    if takes in (Takes.VALUES, Takes.RANKS):
        return False
    if gives_classes is None:
        # Scores may be integers other than 0 and 1, such as points.
        exact = predictions.ndim == 1 or predictions.shape[1] == 1
        legal = (predictions == np.floor(predictions)) if takes is Takes.CLASSES else np.isin(predictions, (0, 1))
        gives_classes = bool(exact and legal.all())
    if gives_classes and takes is not Takes.CLASSES:
        raise DataError(
            f"{metric} needs probabilities, but the model predicts classes: choose a metric of classes, such as "
            "accuracy, or a model that predicts probabilities (objective binary:logistic or multi:softprob; a "
            "classifier of scikit-learn; for a partition, an object whose method predict returns them)"
        )
    return gives_classes


def _as_numbers(metric: str, predictions: Any) -> Numbers:
    try:
        numbers = np.asarray(predictions, dtype=np.float64)
    except (ValueError, TypeError) as error:
        first = np.asarray(predictions, dtype=object).ravel()[0]
        raise DataError(
            f"{metric} needs numbers as predictions, but the model predicts {first!r}: use a model that predicts the "
            "same numbers as in the label column"
        ) from error
    return numbers[:, 0] if numbers.ndim == 2 and numbers.shape[1] == 1 else numbers


def _suited(
    metric: str, takes: Takes, labels: Numbers, predictions: Numbers
) -> tuple[Numbers | Codes, Numbers | Codes, dict[str, Any]]:
    """Convert labels and predictions into the form that a metric's function in scikit-learn takes."""
    if takes is Takes.VALUES:
        return labels, _one_column(metric, predictions), {}
    if takes is Takes.SCORES:
        scores, positive = _one_column(metric, predictions), positive_rows(metric, labels)
        if positive.all() or not positive.any():
            raise DataError(
                f"{metric} needs both classes in the holdout, but the holdout has rows of one class only: name a "
                "holdout with rows of both classes"
            )
        return positive.astype(np.intp), scores, {}
    columns = _probabilities(metric, predictions)
    classes = class_numbers(metric, labels, columns)
    if takes is Takes.CLASSES:
        return classes, columns.argmax(axis=1), {}
    return classes, columns, {"labels": np.arange(columns.shape[1])}


def _over_groups(
    metric: str, labels: Numbers, scores: Numbers, groups: Codes | None, function: Any, options: Mapping[str, Any]
) -> float:
    """Return the mean of a ranking metric over all groups.

    Groups whose labels are all equal are left out, because no order of their rows is better than another.
    """
    if groups is None:
        raise DataError(
            f"{metric} needs the group of each row: set group_col to the name of the column with the groups"
        )
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    sizes = np.diff(starts, append=len(order))
    total, counted = 0.0, 0
    # scikit-learn gets all groups of the same size as one matrix with one row per group, so that it is called once per
    # size and not once per group.
    for size in np.unique(sizes[sizes > 1]):
        rows = order[starts[sizes == size][:, None] + np.arange(size)]
        rows = rows[labels[rows].min(axis=1) < labels[rows].max(axis=1)]
        if len(rows):
            total += float(function(labels[rows], scores[rows], **options)) * len(rows)
            counted += len(rows)
    if not counted:
        raise DataError(
            f"{metric} needs a group with two different labels, but in each group all labels are equal: name another "
            "group_col or another holdout"
        )
    return total / counted


def _one_column(metric: str, predictions: Numbers) -> Numbers:
    if predictions.ndim != 1:
        raise DataError(
            f"{metric} needs one prediction per row, but the model returns {predictions.shape[1]} values per row: "
            "choose another metric, or a model with one output"
        )
    return predictions


def _probabilities(metric: str, predictions: Numbers) -> Numbers:
    """Return predicted probabilities as a matrix with one column per class."""
    if predictions.min() < 0 or predictions.max() > 1:
        raise DataError(
            f"{metric} needs probabilities, but the model predicts {predictions.min():.3g} to {predictions.max():.3g}: "
            "use an objective that gives probabilities, such as binary:logistic or multi:softprob"
        )
    return np.column_stack([1 - predictions, predictions]) if predictions.ndim == 1 else predictions


def positive_rows(metric: str, labels: Numbers) -> NDArray[np.bool_]:
    """Return for each row whether its label is class 1, from labels that are 0 and 1, or -1 and 1.

    Raises:
        DataError: There are other labels, such as counts, shares or class numbers above 1.
    """
    values = np.unique(labels)
    if not any(np.isin(values, legal).all() for legal in ((0, 1), (-1, 1))):
        some = ", ".join(f"{value:g}" for value in values[:_NAMED_LABELS])
        raise DataError(
            f"{metric} needs the labels 0 and 1 (or -1 and 1), but the holdout has {some}"
            f"{', ...' if len(values) > _NAMED_LABELS else ''}: convert the labels, or choose another metric, such as "
            "rmse"
        )
    positive: NDArray[np.bool_] = labels == 1
    return positive


def class_numbers(metric: str, labels: Numbers, columns: Numbers | None) -> Codes:
    """Convert labels into class numbers, which are the integers 0, 1, 2 and so on.

    Raises:
        DataError: A label is no class number, or is too large.
    """
    numbers = labels.astype(np.intp)
    is_binary = metric_named(metric).options.get("average") == "binary"
    most = 2 if is_binary else _MOST_CLASSES if columns is None else columns.shape[1]
    if (numbers != labels).any() or numbers.min() < 0 or numbers.max() >= most:
        raise DataError(
            f"{metric} needs class numbers from 0 to {most - 1} as labels, but the holdout has other labels: convert "
            "the labels, or choose another metric"
        )
    return numbers


BaselineKind = Literal["mean", "median", "quantile", "majority"]

_ABSOLUTE = frozenset({"mae", "mean_absolute_error", "median_absolute_error", "d2_absolute_error_score"})
"""Metrics for which the median of the labels is the best constant prediction."""


def best_constant(metric: str) -> BaselineKind:
    """Return the kind of constant prediction (mean, median, quantile or majority) that is expected to reach the best
    value of a metric."""
    if metric_named(metric).takes in (Takes.CLASSES, Takes.SCORES, Takes.PROBABILITIES):
        return "majority"
    if quantile_of(metric) is not None:
        return "quantile"
    return "median" if metric in _ABSOLUTE else "mean"


def constant(kind: BaselineKind, metric: str, labels: Numbers) -> Numbers:
    """Return the same prediction for every row, as a baseline that a useful model must beat."""
    if kind == "quantile" and (quantile := quantile_of(metric)) is not None:
        return np.full(len(labels), float(np.quantile(labels, quantile)))
    if kind != "majority":
        return np.full(len(labels), float(np.mean(labels) if kind == "mean" else np.median(labels)))
    if best_constant(metric) != "majority":
        values, counts = np.unique(labels, return_counts=True)
        return np.full(len(labels), float(values[counts.argmax()]))
    if metric_named(metric).takes is Takes.SCORES:
        return np.full(len(labels), float(positive_rows(metric, labels).mean()))
    frequencies = np.bincount(class_numbers(metric, labels, None), minlength=2) / len(labels)
    if len(frequencies) == 2:
        return np.full(len(labels), float(frequencies[1]))
    return np.broadcast_to(frequencies, (len(labels), len(frequencies)))
