"""Compute the metric of a model on held-out data, for boosters and for any other model that MLflow can load."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from shoal.errors import DataError, JobError
from shoal.jobs import metrics
from shoal.jobs.mlflow import pyfunc
from shoal.training.boosting.request import Framework

if TYPE_CHECKING:
    from shoal.data.connector import DataConnector


def load(model_uri: str) -> Any:
    """Load a model: as a booster of XGBoost or LightGBM if it is one, else as an MLflow pyfunc model.

    Raises:
        JobError: The model's files are gone, or MLflow cannot load the model.
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
            "If the model is the champion, give the alias to another version, or remove the alias"
        ) from error


def score(model: Any, holdout: DataConnector, label_col: str, metric: str, *, input_cols: Sequence[str] = ()) -> float:
    """Compute the metric of a model on held-out data.

    Args:
        model: Model that :func:`load` returned.
        holdout: The held-out rows.
        label_col: Label column of the holdout.
        metric: One of :data:`metrics.METRICS`.
        input_cols: Input columns of a model that takes a tensor and does not name its columns.

    Raises:
        DataError: The holdout lacks a column that the model needs, or has a null label.
    """
    import numpy as np

    from shoal.data.matrix import to_vector

    # Decided for each model, because challenger and champion may come from different libraries.
    library = type(model).__module__.partition(".")[0]
    own = importlib.import_module(f"shoal.training.{library}.prediction") if library in get_args(Framework) else None
    columns = own.features_of(model) if own else pyfunc.features_of(model, input_cols)
    if missing := sorted({*columns, label_col} - set(holdout.schema().names)):
        raise DataError(f"the holdout lacks columns that the model needs: {', '.join(missing)}")
    labels = np.concatenate([to_vector(table, label_col) for table in holdout.iter_batches([label_col])])
    if np.isnan(labels).any():
        raise DataError(f'the holdout has null labels in column "{label_col}": remove those rows')
    predicted = own.predict_booster(model, holdout, columns) if own else pyfunc.predict(model, holdout, columns)
    return metrics.evaluate(metric, labels, predicted)
