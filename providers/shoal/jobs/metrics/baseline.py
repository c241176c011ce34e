"""Constant predictions, which are the baseline that a useful model must beat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shoal.jobs.metrics.evaluation import Takes, class_numbers, metric_named, positive_rows, quantile_of

if TYPE_CHECKING:
    from shoal.jobs.metrics.evaluation import Numbers

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
    import numpy as np

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
