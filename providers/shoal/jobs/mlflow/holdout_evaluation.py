"""Evaluate a model on the holdout, or try with some of its rows whether a model can be evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.connector import DataConnector
from shoal.errors import DataError
from shoal.jobs.metrics.evaluation import check_predictions, metric_value, takes_classes
from shoal.jobs.mlflow.holdout import Holdout, check_columns
from shoal.jobs.mlflow.model_loading import Predictor
from shoal.jobs.mlflow.promotion_decision import Evaluation, Slice
from shoal.jobs.mlflow.training_rows import Overlap

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_TRIED_ROWS = 1_000
"""Number of rows that a trial predicts at most. With one row, it would not be clear whether a model that predicts 1.0
predicts classes or probabilities."""

_NAMED_CLASSES = 5
"""Number of classes that an error message lists."""

_LARGEST_CLASS = 10_000
"""Largest number of a class of a model whose classes are not 0, 1 and so on. The predictions get one column per class
number up to the largest."""


def try_out(model: Predictor, holdout: DataConnector, metric: str) -> None:
    """Check, with the first rows of the holdout, that a model can predict them and that the metric can be computed.

    Args:
        model: The model.
        holdout: The holdout.
        metric: Name of the metric that decides.

    Raises:
        DataError: The holdout lacks a column that the model needs, or the predictions do not suit the metric.
    """
    _check(model, holdout)
    for table in holdout.iter_batches(list(model.columns)):
        if table.num_rows:
            predicted = _predicted(model, table.slice(0, _TRIED_ROWS))
            check_predictions(metric, predicted, gives_classes=model.gives_classes)
            return


def evaluate(
    model: Predictor,
    holdout: Holdout,
    names: Sequence[str],
    *,
    overlap: Overlap | None = None,
) -> Evaluation:
    """Compute the metrics of a model on the holdout.

    Args:
        model: The model, which :func:`model_loading.load` returned.
        holdout: The rows to evaluate the model on, with their labels.
        names: Names of the metrics. The first metric decides, and is also computed for each slice. Any other metric
            that cannot be computed is NaN, and the log has the reason.
        overlap: The holdout's rows that the model was trained on; None if these rows are not known.

    Raises:
        DataError: The holdout lacks a column that the model needs, or the predictions do not suit the metric
            that decides.
    """
    predicted = _predict(model, holdout.connector)
    values = {}
    for name in names:
        try:
            values[name] = metric_value(
                name, holdout.labels, predicted, holdout.groups, gives_classes=model.gives_classes
            )
        except DataError as error:
            if name == names[0]:
                raise
            print(f"{name} is NaN: {error}", flush=True)
            values[name] = float("nan")
    slices = {}
    gives_classes = takes_classes(names[0], predicted, model.gives_classes)
    for name, rows in holdout.slices.items():
        groups = None if holdout.groups is None else holdout.groups[rows]
        try:
            value = metric_value(names[0], holdout.labels[rows], predicted[rows], groups, gives_classes=gives_classes)
        except DataError:  # the metric is not defined on this slice; the AUC, for example, needs rows of both classes
            value = float("nan")
        slices[name] = Slice(len(rows), value)
    if overlap is None:
        return Evaluation(values[names[0]], values, slices)
    period = None if overlap.training is None else str(overlap.training)
    return Evaluation(values[names[0]], values, slices, overlap.rows, period)


def _predict(model: Predictor, holdout: DataConnector) -> np.ndarray:
    """Return a model's predictions for all rows of the holdout, in the order of the rows."""
    import numpy as np

    _check(model, holdout)
    parts = [_predicted(model, table) for table in holdout.iter_batches(list(model.columns)) if table.num_rows]
    return np.concatenate(parts) if parts else np.empty(0)


def _check(model: Predictor, holdout: DataConnector) -> None:
    check_columns(holdout, model.columns)
    model.check(holdout.source)


def _predicted(model: Predictor, table: pa.Table) -> np.ndarray:
    """Return the predictions for the rows of a table, with one column per class number if they are probabilities of
    classes that are not 0, 1 and so on."""
    import numpy as np

    predicted = model.predict_table(table)
    classes = model.classes
    if classes is None or list(classes) == list(range(len(classes))):
        return predicted
    if not all(_is_class_number(each) for each in classes):
        named = ", ".join(repr(each) for each in classes[:_NAMED_CLASSES])
        raise DataError(
            f"the model's classes are {named}{', ...' if len(classes) > _NAMED_CLASSES else ''}, but the holdout's "
            "labels are class numbers 0, 1 and so on: use a model that was trained on class numbers"
        )
    if predicted.ndim == 1:
        predicted = np.column_stack([1 - predicted, predicted])
    columns = np.zeros((len(predicted), int(max(classes)) + 1))
    columns[:, [int(each) for each in classes]] = predicted
    return columns


def _is_class_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == int(value) and 0 <= value <= _LARGEST_CLASS
