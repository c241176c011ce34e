"""Compute the metrics that compare champion and challenger, in the same way for models of every framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from shoal.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.floating]

Mode = Literal["min", "max"]

_BEST: dict[str, Mode] = {
    "rmse": "min",
    "mae": "min",
    "logloss": "min",
    "error": "min",
    "auc": "max",
    "accuracy": "max",
}

METRICS = frozenset(_BEST)
"""Legal values of `register.metric`."""


def best_mode(metric: str) -> Mode:
    """Return "min" where a lower value of the metric is better, and "max" where a higher one is.

    Raises:
        InvalidArgumentError: There is no such metric.
    """
    if metric not in _BEST:
        raise InvalidArgumentError(f'register.metric "{metric}" is unknown; use one of: {", ".join(sorted(_BEST))}')
    return _BEST[metric]


def evaluate(metric: str, labels: Numbers, predictions: Numbers) -> float:
    """Compute a metric.

    Args:
        metric: One of :data:`METRICS`.
        labels: True values, ``[rows]``; 0 and 1, or class numbers, for the metrics of classifiers.
        predictions: Predicted values in the order of the labels. For classifiers: probabilities of class 1, ``[rows]``,
            or one column per class, ``[rows, classes]``.

    Raises:
        DataError: The predictions do not suit the metric, or there are no rows.
    """
    import numpy as np

    labels = np.asarray(labels, dtype=np.float64)
    predictions = np.asarray(predictions, dtype=np.float64)
    if labels.shape[0] == 0 or predictions.shape[0] != labels.shape[0]:
        raise DataError(
            f"the holdout has {labels.shape[0]} labels and {predictions.shape[0]} predictions: both numbers must be "
            "equal and above 0"
        )
    return float(_FUNCTIONS[metric](labels, predictions))


def _rmse(labels: Numbers, predictions: Numbers) -> float:
    return float(((_one_column("rmse", predictions) - labels) ** 2).mean() ** 0.5)


def _mae(labels: Numbers, predictions: Numbers) -> float:
    return float(abs(_one_column("mae", predictions) - labels).mean())


def _logloss(labels: Numbers, predictions: Numbers) -> float:
    import numpy as np

    chosen = _probabilities("logloss", predictions)[np.arange(len(labels)), _classes("logloss", labels, predictions)]
    # Clipped like XGBoost's logloss: one wrong prediction of probability 1 must not make the mean infinite.
    return float(-np.log(np.clip(chosen, 1e-16, 1.0)).mean())


def _error(labels: Numbers, predictions: Numbers) -> float:
    guesses = _probabilities("error", predictions).argmax(axis=1)
    return float((guesses != _classes("error", labels, predictions)).mean())


def _accuracy(labels: Numbers, predictions: Numbers) -> float:
    return 1.0 - _error(labels, predictions)


def _auc(labels: Numbers, predictions: Numbers) -> float:
    import numpy as np

    scores = _one_column("auc", predictions)
    positive = labels > 0.5
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_negative:
        raise DataError("auc needs both classes in the holdout, but the holdout has rows of one class only")
    # Mann-Whitney U statistic: based on the mean rank of the positives; equal scores share their mean rank.
    values, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    assert len(ranks) == len(values)
    return float((ranks[inverse][positive].sum() - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative))


def _one_column(metric: str, predictions: Numbers) -> Numbers:
    if predictions.ndim == 2 and predictions.shape[1] == 1:
        predictions = predictions[:, 0]
    if predictions.ndim != 1:
        raise DataError(f"{metric} needs one prediction per row, but the model gives {predictions.shape[1]}")
    return predictions


def _probabilities(metric: str, predictions: Numbers) -> Numbers:
    """Return probabilities with one column per class."""
    import numpy as np

    if predictions.ndim == 2 and predictions.shape[1] == 1:
        predictions = predictions[:, 0]
    if predictions.min() < 0 or predictions.max() > 1:
        raise DataError(
            f"{metric} needs probabilities, but the model predicts {predictions.min():.3g} to {predictions.max():.3g}: "
            "use an objective that gives probabilities, such as binary:logistic or multi:softprob"
        )
    return np.column_stack([1 - predictions, predictions]) if predictions.ndim == 1 else predictions


def _classes(metric: str, labels: Numbers, predictions: Numbers) -> NDArray[np.intp]:
    import numpy as np

    classes = max(2, predictions.shape[1]) if predictions.ndim == 2 else 2
    numbers = labels.astype(np.intp)
    if (numbers != labels).any() or numbers.min() < 0 or numbers.max() >= classes:
        raise DataError(f"{metric} needs class numbers 0 to {classes - 1} as labels, but the holdout has other values")
    return numbers


_FUNCTIONS: dict[str, Callable[[Numbers, Numbers], float]] = {
    "rmse": _rmse,
    "mae": _mae,
    "logloss": _logloss,
    "error": _error,
    "auc": _auc,
    "accuracy": _accuracy,
}
