"""Load a model from MLflow, and predict tables with it: XGBoost and LightGBM directly, other models through pyfunc."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shoal.errors import DataError, JobError
from shoal.jobs.mlflow import model_loading, pyfunc

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from shoal.data.parquet.source import ParquetSource

_ALIAS = re.compile(r"models:/(?P<name>[^/@]+)@(?P<alias>[^/@]+)")


class Predictor(Protocol):
    """Interface of an object that predicts tables with one model."""

    @property
    def columns(self) -> Sequence[str]:
        """Return the names of the columns that :meth:`predict_table` needs."""

    def check(self, source: ParquetSource) -> None:
        """Check, with the footers of the Parquet files only, that the model can predict a dataset; else raise a
        DataError."""

    def predict_table(self, table: pa.Table) -> np.ndarray:
        """Return the predictions for a table's rows, as an array of shape ``[rows]`` or ``[rows, outputs]``."""


class _PyfuncPredictor:
    def __init__(self, model: Any, input_cols: Sequence[str]) -> None:
        self._model = model
        self.columns = pyfunc.features_of(model, input_cols)

    def check(self, source: ParquetSource) -> None:
        if missing := sorted(set(self.columns) - set(source.schema().names)):
            raise DataError(
                f"the dataset lacks columns that the model needs: {', '.join(missing)}. Name a dataset with these "
                "columns"
            )

    def predict_table(self, table: pa.Table) -> np.ndarray:
        return pyfunc.predict_table(self._model, table, self.columns)


def load(uri: str, input_cols: Sequence[str] = ()) -> Predictor:
    """Load a model from MLflow, and return an object that predicts tables with it.

    Args:
        uri: MLflow URI of the model.
        input_cols: Names of the input columns; used only if the model's signature is a tensor, which names no columns.

    Raises:
        JobError: The model does not exist, or MLflow cannot load the model.
        DataError: The names of the model's input columns are not known.
    """
    model = model_loading.load(uri)
    module = model_loading.prediction_module(model)
    if module is None:
        return _PyfuncPredictor(model, input_cols)
    predictor: Predictor = module.predictor(model, module.features_of(model))
    return predictor


def identity(uri: str) -> str:
    """Return a text that identifies a model: the URI of a version or run, or the path and the id of a model folder.

    Raises:
        JobError: There is no model at this URI.
    """
    if uri.startswith(("models:/", "runs:/")):
        return uri
    import mlflow

    try:
        return f"{uri} {mlflow.models.get_model_info(uri).model_uuid}"
    except (mlflow.MlflowException, OSError) as error:
        raise JobError(
            f"there is no MLflow model at {uri} ({error}): name the folder or URI of a model that MLflow has saved"
        ) from error


def pinned(uri: str) -> str:
    """Replace the alias in a model's URI with the version number, so that all workers load the same model.

    Any other URI is returned unchanged.

    Raises:
        JobError: There is no such model or alias.
    """
    named = _ALIAS.fullmatch(uri)
    if named is None:
        return uri
    import mlflow

    try:
        version = mlflow.MlflowClient().get_model_version_by_alias(named["name"], named["alias"]).version
    except mlflow.MlflowException as error:
        raise JobError(
            f"the model {uri} does not exist in the registry ({error.message}): `shoal models list` shows the models "
            "that shoal has registered"
        ) from error
    return f"models:/{named['name']}/{version}"
