"""Find the metrics that XGBoost does not combine exactly, and combine the user's custom metrics into one function,
because XGBoost accepts only one metric function."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.user_code import Metric

_WITHIN_GROUPS = frozenset({"auc", "aucpr", "map", "ndcg", "pre"})
"""Metrics that compare rows with each other. If the rows have groups, XGBoost compares only rows of the same group, and
its mean over the groups of all workers is exact. Otherwise each worker compares only its own rows."""


def approximate(eval_metric: Any, grouped: bool, custom: Sequence[Metric]) -> list[str]:
    """Return the names of the metrics for which XGBoost combines the workers' values only approximately."""
    names = [eval_metric] if isinstance(eval_metric, str) else list(eval_metric or [])
    # A name may have a suffix such as "@5" (ndcg@5) or "-" (map-).
    found = [] if grouped else [name for name in names if re.split("[@-]", str(name))[0] in _WITHIN_GROUPS]
    return [*found, *(f"custom_metric {getattr(one, '__name__', type(one).__name__)}" for one in custom)]


def joined(metrics: Sequence[Metric]) -> Metric | None:
    """Combine several metric functions into one function that returns the values of all metrics.

    Returns:
        A function that returns the values of all metrics; None if there are no metrics.
    """
    if not metrics:
        return None

    def evaluate(predictions: Any, matrix: Any) -> list[tuple[str, float]]:
        given = [metric(predictions, matrix) for metric in metrics]
        return [_checked(one) for each in given for one in (each if isinstance(each, list) else [each])]

    return evaluate


def _checked(one: Any) -> tuple[str, float]:
    """Check the result of the user's metric function, and return the metric's name and value."""
    try:
        name, value = one
        value = float(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"a custom_metric for XGBoost must return (name, value), not {one!r}") from None
    if not isinstance(name, str) or not name or re.search(r"[\s:]", name):
        raise InvalidArgumentError(
            f'the name of a custom_metric must be a non-empty str without spaces or ":", not {name!r}'
        )
    return name, value
