"""Check that the metric which stops a training early can decide: it is a number, and it compares what it needs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shoal.errors import DataError, TrainingError

if TYPE_CHECKING:
    import numpy as np

_NEEDS_CLASSES = frozenset({"auc", "aucpr", "average_precision", "auc_mu"})
_SHOWN_LABELS = 5


def check_stopping_metric(
    eval_set: str, metric: str, value: float, label: np.ndarray | None, *, grouped: bool, classes: int = 2
) -> None:
    """Raise an error if a metric cannot decide when to stop a training early.

    XGBoost's AUC of an eval set with only one class is NaN, and LightGBM's is 1. With either value no round improves on
    the first, so the training would end with the model of round 0.

    Raises:
        DataError: The eval set has no rows of a class, and the metric needs rows of all classes.
        TrainingError: The value is NaN.
    """
    import numpy as np

    begin = f'early stopping uses the metric {metric} of eval_set "{eval_set}"'
    if metric.split("@")[0] in _NEEDS_CLASSES and not grouped and label is not None:
        found = np.unique(label)
        if len(found) < classes:
            shown = ", ".join(f"{each:g}" for each in found[:_SHOWN_LABELS])
            raise DataError(
                f"{begin}, which needs rows of all {classes} classes, but this eval set contains only the labels "
                f"{shown}: use an eval set with rows of all classes, or another metric as the last one"
            )
    if math.isnan(value):
        raise TrainingError(
            f"{begin}, but its value is NaN, so it cannot show which round is best. A custom_metric is NaN if its "
            "function returns NaN; a metric of the library, if the model's predictions are not finite or lie outside "
            "of the metric's range, or if all weights are 0: change the metric, or lower the learning rate"
        )


def check_best_score(eval_set: str, metric: str, best: float) -> None:
    """Raise TrainingError if the best value of the metric that stopped a training is infinite.

    A round with an infinite value is allowed, because later rounds can be better or worse. An infinite best value shows
    that no round could be compared.
    """
    if math.isinf(best):
        raise TrainingError(
            f'early stopping uses the metric {metric} of eval_set "{eval_set}", but its best value is {best}, so it '
            "cannot show which round is best: use a metric that is finite for the eval set's labels"
        )
