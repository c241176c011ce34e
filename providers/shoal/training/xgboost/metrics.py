"""The user's own metrics, as XGBoost's training loop takes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.user_code import Metric


def joined(metrics: Sequence[Metric]) -> Metric | None:
    """One metric for several: XGBoost takes one, which may give several values.

    Args:
        metrics: Functions ``(predictions, matrix) -> (name, value)``, or a list of such.

    Returns:
        A function that gives the values of all; None if there are none.
    """
    if not metrics:
        return None

    def evaluate(predictions: Any, matrix: Any) -> list[tuple[str, float]]:
        given = [metric(predictions, matrix) for metric in metrics]
        return [_checked(one) for each in given for one in (each if isinstance(each, list) else [each])]

    return evaluate


def _checked(one: Any) -> tuple[str, float]:
    """A metric's name and value.

    Raises:
        InvalidArgumentError: If it is no such pair, or XGBoost, which writes both into one text, could not read the
            name back.
    """
    try:
        name, value = one
        value = float(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"a custom_metric of XGBoost's returns (name, value), not {one!r}") from None
    if not isinstance(name, str) or not name or re.search(r"[\s:]", name):
        raise InvalidArgumentError(f'a metric\'s name holds neither spaces nor ":", unlike {name!r}')
    return name, value
