"""Evaluate a model on the holdout: XGBoost and LightGBM models directly, any other model through MLflow's pyfunc."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

from shoal.errors import DataError, JobError
from shoal.jobs.metrics.evaluation import metric_value
from shoal.jobs.mlflow import pyfunc
from shoal.jobs.mlflow.decision import Evaluation, Slice
from shoal.jobs.mlflow.holdout import Holdout, check_columns
from shoal.jobs.mlflow.training_rows import Overlap
from shoal.training.boosting.request import Framework

if TYPE_CHECKING:
    import numpy as np


def load(model_uri: str) -> Any:
    """Load a model from MLflow: an XGBoost or LightGBM model as that library's booster, any other model as a pyfunc.

    Raises:
        JobError: The model's files do not exist, or MLflow cannot load the model.
    """
    import mlflow

    try:
        flavours = mlflow.models.get_model_info(model_uri).flavors
        framework = next((name for name in get_args(Framework) if name in flavours), None)
        if framework is not None:
            return importlib.import_module(f"mlflow.{framework}").load_model(model_uri)
        return mlflow.pyfunc.load_model(model_uri)
    except (mlflow.MlflowException, OSError, ImportError) as error:
        raise JobError(
            f"the model {model_uri} cannot be loaded for the comparison: {error}. "
            "If the model is the champion, give the alias to another version in MLflow, or remove the alias"
        ) from error


def prediction_module(model: Any) -> ModuleType | None:
    """Return the module of shoal that predicts with the library of a model; None if the model predicts through pyfunc.

    Args:
        model: Model that :func:`load` returned; the model's class shows the library.
    """
    library = type(model).__module__.partition(".")[0]
    return importlib.import_module(f"shoal.training.{library}.prediction") if library in get_args(Framework) else None


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
        model: Model that :func:`load` returned.
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
    own = prediction_module(model)
    columns = own.features_of(model) if own else pyfunc.features_of(model, input_cols)
    check_columns(holdout.connector, columns)
    predicted: np.ndarray = (own.predict_booster if own else pyfunc.predict)(model, holdout.connector, columns)
    return predicted
