"""Evaluate a model on the holdout: XGBoost and LightGBM models directly, any other model through MLflow's pyfunc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.errors import DataError
from shoal.jobs.metrics.evaluation import metric_value
from shoal.jobs.mlflow import model_loading, pyfunc
from shoal.jobs.mlflow.holdout import Holdout, check_columns
from shoal.jobs.mlflow.promotion_decision import Evaluation, Slice, UnseenRows
from shoal.jobs.mlflow.training_rows import Overlap

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
    evaluation = replace(_measure(predicted, holdout, names), predictions=predicted)
    if overlap is None:
        return evaluation
    period = None if overlap.training is None else str(overlap.training)
    return replace(evaluation, overlap=overlap.rows, period=period)


def on_unseen_rows(
    challenger: Evaluation, champion: Evaluation, holdout: Holdout, names: Sequence[str], seen: NDArray[np.bool_]
) -> UnseenRows:
    """Compute the metrics of challenger and champion on the rows of the holdout that neither was trained on.

    Args:
        challenger: Result of :func:`evaluate` for the challenger.
        champion: Result of :func:`evaluate` for the champion.
        holdout: The holdout on which both were evaluated.
        names: Names of the metrics; see :func:`evaluate`.
        seen: Whether champion or challenger was trained on the row, ``[rows]``. For a ranking metric, all rows of the
            row's group are left out.
    """
    import numpy as np

    if holdout.groups is not None:
        seen = np.bincount(holdout.groups, weights=seen)[holdout.groups] > 0
    part = holdout.part(~seen)

    def measured(evaluation: Evaluation) -> Evaluation:
        assert evaluation.predictions is not None
        try:
            return _measure(evaluation.predictions[~seen], part, names)
        except DataError:  # the metric is not defined on these rows
            return Evaluation(float("nan"))

    return UnseenRows(len(part.labels), len(seen), measured(challenger), measured(champion))


def _measure(predicted: np.ndarray, holdout: Holdout, names: Sequence[str]) -> Evaluation:
    """Compute the metrics of predictions; see :func:`evaluate`."""
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
    return Evaluation(values[names[0]], values, slices)


def _predict(model: Any, holdout: Holdout, input_cols: Sequence[str]) -> np.ndarray:
    """Return a model's predictions for all rows of the holdout, in the order of the rows."""
    own = model_loading.prediction_module(model)
    columns = own.features_of(model) if own else pyfunc.features_of(model, input_cols)
    check_columns(holdout.connector, columns)
    predicted: np.ndarray = (own.predict_booster if own else pyfunc.predict)(model, holdout.connector, columns)
    return predicted
