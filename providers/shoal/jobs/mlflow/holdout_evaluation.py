"""Evaluate a model on the holdout: XGBoost and LightGBM models directly, any other model through MLflow's pyfunc."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import DataError
from shoal.jobs.metrics.evaluation import metric_value
from shoal.jobs.mlflow import model_loading, pyfunc
from shoal.jobs.mlflow.holdout import Holdout, check_columns
from shoal.jobs.mlflow.promotion_decision import Evaluation, Slice
from shoal.jobs.mlflow.training_rows import Overlap

if TYPE_CHECKING:
    import numpy as np


def evaluate(
    model: Any,
    holdout: Holdout,
    names: Sequence[str],
    *,
    input_cols: Sequence[str] = (),
    overlap: Overlap | None = None,
) -> Evaluation:
    """Compute the metrics of a model on the holdout.

    Args:
        model: Model that :func:`model_loading.load` returned.
        holdout: The rows to evaluate the model on, with their labels.
        names: Names of the metrics. The first metric decides, and is also computed for each slice. Any other metric
            that cannot be computed is NaN, and the log has the reason.
        input_cols: Names of the input columns; used only if the model takes a tensor and so does not name its columns.
        overlap: The holdout's rows that the model was trained on; None if these rows are not known.

    Raises:
        DataError: The holdout lacks a column that the model needs, or the predictions do not suit the metric
            that decides.
    """
    predicted = _predict(model, holdout, input_cols)
    values = {}
    for name in names:
        try:
            values[name] = metric_value(name, holdout.labels, predicted, holdout.groups)
        except DataError as error:
            if name == names[0]:
                raise
            print(f"{name} is NaN: {error}", flush=True)
            values[name] = float("nan")
    slices = {}
    for name, rows in holdout.slices.items():
        groups = None if holdout.groups is None else holdout.groups[rows]
        try:
            value = metric_value(names[0], holdout.labels[rows], predicted[rows], groups)
        except DataError:  # the metric is not defined on this slice; the AUC, for example, needs rows of both classes
            value = float("nan")
        slices[name] = Slice(len(rows), value)
    if overlap is None:
        return Evaluation(values[names[0]], values, slices)
    period = None if overlap.training is None else str(overlap.training)
    return Evaluation(values[names[0]], values, slices, overlap.rows, period)


def _predict(model: Any, holdout: Holdout, input_cols: Sequence[str]) -> np.ndarray:
    """Return a model's predictions for all rows of the holdout, in the order of the rows."""
    own = model_loading.prediction_module(model)
    columns = own.features_of(model) if own else pyfunc.features_of(model, input_cols)
    check_columns(holdout.connector, columns)
    predicted: np.ndarray = (own.predict_booster if own else pyfunc.predict)(model, holdout.connector, columns)
    return predicted
