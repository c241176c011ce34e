"""What a model is worth on held-out data, whatever trained it: a booster, or any model that MLflow serves."""

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
    """A registered model: its library's own booster, or what MLflow serves.

    Raises:
        JobError: Its files are gone, or it is a model of another kind.
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
            f"the model {model_uri} cannot be loaded, so nothing can be compared with it: {error}. "
            "If it is the champion, give the alias to another version, or remove it"
        ) from error


def score(model: Any, holdout: DataConnector, label_col: str, metric: str, *, input_cols: Sequence[str] = ()) -> float:
    """The metric of a model on held-out data.

    Args:
        model: As :func:`load` has it.
        holdout: The rows.
        label_col: Their label column.
        metric: One of :data:`metrics.METRICS`.
        input_cols: Columns for a model that takes a tensor, and does not name them.

    Raises:
        DataError: The holdout lacks a column that the model needs, or has a null label.
    """
    import numpy as np

    from shoal.data.matrix import to_vector

    # The challenger and the champion need not be of one library.
    library = type(model).__module__.partition(".")[0]
    own = importlib.import_module(f"shoal.training.{library}.prediction") if library in get_args(Framework) else None
    columns = own.features_of(model) if own else pyfunc.features_of(model, input_cols)
    if missing := sorted({*columns, label_col} - set(holdout.schema().names)):
        raise DataError(f"the holdout lacks what the model needs: {', '.join(missing)}")
    labels = np.concatenate([to_vector(table, label_col) for table in holdout.iter_batches([label_col])])
    if np.isnan(labels).any():
        raise DataError(f'the holdout has null labels in column "{label_col}"')
    predicted = own.predict_booster(model, holdout, columns) if own else pyfunc.predict(model, holdout, columns)
    return metrics.evaluate(metric, labels, predicted)
