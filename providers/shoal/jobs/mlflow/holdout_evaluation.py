"""Evaluate a model on the holdout, or try with some of its rows whether a model can be evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.data.connector import DataConnector
from shoal.errors import DataError
from shoal.jobs.metrics.evaluation import check_predictions, metric_value, takes_classes
from shoal.jobs.mlflow.holdout import Holdout, check_columns
from shoal.jobs.mlflow.model_loading import Predictor
from shoal.jobs.mlflow.promotion_decision import Evaluation, Predictions, Slice, UnseenRows
from shoal.jobs.mlflow.training_rows import Overlap

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

_TRIED_ROWS = 1_000
"""Rows that a trial predicts. One row would not show whether 1.0 is a class or a probability."""

_NAMED_CLASSES = 5
"""Number of classes that an error message lists."""

_LARGEST_CLASS = 10_000
"""Largest number of a class. The predictions get one column per class number up to the largest."""


def try_out(model: Predictor, holdout: DataConnector, metric: str) -> None:
    """Check, with the first rows of the holdout, that a model can predict them and that the metric can be computed.

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

    Raises:
        DataError: The holdout lacks a column that the model needs, or the predictions do not suit the metric
            that decides.
    """
    predictions = Predictions(_predict(model, holdout.connector), model.gives_classes)
    evaluation = replace(_measure(predictions, holdout, names), predictions=predictions)
    if overlap is None:
        return evaluation
    period = None if overlap.training is None else str(overlap.training)
    return replace(evaluation, overlap=overlap.rows, period=period)


def on_unseen_rows(
    challenger: Evaluation, champion: Evaluation, holdout: Holdout, names: Sequence[str], seen: NDArray[np.bool_]
) -> UnseenRows:
    """Compute the metrics of challenger and champion on the rows of the holdout that neither was trained on."""
    import numpy as np

    if holdout.groups is not None:
        seen = np.bincount(holdout.groups, weights=seen)[holdout.groups] > 0
    part = holdout.part(~seen)

    def measured(evaluation: Evaluation) -> Evaluation:
        assert evaluation.predictions is not None
        try:
            return _measure(evaluation.predictions, part, names, ~seen)
        except DataError:  # the metric is not defined on these rows
            return Evaluation(float("nan"))

    return UnseenRows(len(part.labels), len(seen), measured(challenger), measured(champion))


def _measure(
    predictions: Predictions, holdout: Holdout, names: Sequence[str], rows: NDArray[np.bool_] | None = None
) -> Evaluation:
    """Compute the metrics of predictions; see :func:`evaluate`."""
    predicted = predictions.values if rows is None else predictions.values[rows]

    def value(name: str, part: Any = slice(None)) -> float:
        # All predictions show whether they are classes or probabilities; a few of them may not.
        is_class = takes_classes(name, predictions.values, predictions.gives_classes)
        groups = None if holdout.groups is None else holdout.groups[part]
        return metric_value(name, holdout.labels[part], predicted[part], groups, gives_classes=is_class)

    values = {}
    for name in names:
        try:
            values[name] = value(name)
        except DataError as error:
            if name == names[0]:
                raise
            print(f"{name} is NaN: {error}", flush=True)
            values[name] = float("nan")
    slices = {}
    for name, part in holdout.slices.items():
        try:
            measured = value(names[0], part)
        except DataError:  # the metric is not defined on this slice; the AUC, for example, needs rows of both classes
            measured = float("nan")
        slices[name] = Slice(len(part), measured)
    return Evaluation(values[names[0]], values, slices)


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
