"""Evaluate a model on the holdout, or try with some of its rows whether a model can be evaluated."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.data.connector import DataConnector
from shoal.errors import DataError
from shoal.jobs.metrics.evaluation import check_predictions, metric_value, takes_classes
from shoal.jobs.mlflow.holdout import Holdout, check_columns
from shoal.jobs.mlflow.model_loading import Predictor
from shoal.jobs.mlflow.promotion_decision import CommonKeys, Evaluation, Predictions, Slice, UnseenRows
from shoal.jobs.mlflow.training_rows import Overlap
from shoal.kinds.partitions.pyfunc_loader import PartitionedModel

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
            tried = table.slice(0, _TRIED_ROWS)
            predicted = _predicted(model, tried)
            if isinstance(model, PartitionedModel):
                predicted = predicted[~model.unknown(tried)[0]]
            if len(predicted):
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
    predictions = _predict(model, holdout.connector)
    if predictions.unknown is None:
        evaluation = replace(_measure(predictions, holdout, names), predictions=predictions)
    else:
        evaluation = on_rows(predictions, holdout, names, ~predictions.unknown)
    if overlap is None:
        return evaluation
    period = None if overlap.training is None else str(overlap.training)
    return replace(evaluation, overlap=overlap.rows, period=period)


def on_rows(predictions: Predictions, holdout: Holdout, names: Sequence[str], rows: NDArray[np.bool_]) -> Evaluation:
    """Compute the metrics of predictions on some rows of the holdout. They are NaN if they are not defined there."""
    try:
        if not rows.any():
            raise DataError("there are no rows")
        return replace(_measure(predictions, holdout.part(rows), names, rows), predictions=predictions)
    except DataError:
        return Evaluation(float("nan"), dict.fromkeys(names, float("nan")), predictions=predictions)


def on_unseen_rows(
    challenger: Predictions,
    champion: Predictions,
    holdout: Holdout,
    names: Sequence[str],
    seen: NDArray[np.bool_],
    known: NDArray[np.bool_] | None,
) -> UnseenRows:
    """Compute the metrics of challenger and champion on the rows of the holdout that neither was trained on, and whose
    keys both know (None: all)."""
    import numpy as np

    if holdout.groups is not None:
        seen = np.bincount(holdout.groups, weights=seen)[holdout.groups] > 0
    rows = ~seen if known is None else ~seen & known
    both = (on_rows(each, holdout, names, rows) for each in (challenger, champion))
    return UnseenRows(int(rows.sum()), len(seen) if known is None else int(known.sum()), *both)


def on_common_keys(
    challenger: Predictions, champion: Predictions, holdout: Holdout, names: Sequence[str]
) -> tuple[NDArray[np.bool_], CommonKeys] | None:
    """Return the rows of the holdout whose keys both models know, with the challenger's metrics on them; None if both
    know the keys of all rows."""
    unknown = [each.unknown for each in (challenger, champion) if each.unknown is not None]
    if not unknown:
        return None
    rows = ~functools.reduce(operator.or_, unknown)
    others = {**challenger.unknown_keys, **champion.unknown_keys}
    return rows, CommonKeys(int(rows.sum()), len(rows), on_rows(challenger, holdout, names, rows), others)


def _measure(
    predictions: Predictions, holdout: Holdout, names: Sequence[str], rows: NDArray[np.bool_] | None = None
) -> Evaluation:
    """Compute the metrics of predictions; see :func:`evaluate`."""
    predicted = predictions.values if rows is None else predictions.values[rows]
    every = predictions.values if predictions.unknown is None else predictions.values[~predictions.unknown]

    def value(name: str, part: Any = slice(None)) -> float:
        # All predictions show whether they are classes or probabilities; a few of them may not.
        is_class = takes_classes(name, every, predictions.gives_classes)
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


def _predict(model: Predictor, holdout: DataConnector) -> Predictions:
    """Return a model's predictions for all rows of the holdout, in the order of the rows."""
    import numpy as np

    _check(model, holdout)
    parts, unknown, keys = [], [], Counter[str]()
    for table in holdout.iter_batches(list(model.columns)):
        if table.num_rows:
            parts.append(_predicted(model, table))
            if isinstance(model, PartitionedModel):
                lacks, named = model.unknown(table)
                unknown.append(lacks)
                keys.update(named)
    values = np.concatenate(parts) if parts else np.empty(0)
    return Predictions(values, model.gives_classes, np.concatenate(unknown) if keys else None, keys)


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
