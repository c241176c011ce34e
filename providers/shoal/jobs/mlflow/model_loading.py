"""Load a model from MLflow: XGBoost and LightGBM models directly, any other model through MLflow's pyfunc."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, get_args

from shoal.errors import JobError
from shoal.training.boosting.request import Framework


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
    """Return shoal's prediction module for XGBoost or LightGBM, whichever the model uses; None for any other model.

    Args:
        model: Model that :func:`load` returned; the model's class shows the library.
    """
    library = type(model).__module__.partition(".")[0]
    return importlib.import_module(f"shoal.training.{library}.prediction") if library in get_args(Framework) else None
