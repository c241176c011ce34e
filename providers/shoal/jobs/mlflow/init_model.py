"""Load the model from which a training continues, and the record of its training rows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shoal.errors import InvalidArgumentError
from shoal.jobs import shipped_code
from shoal.jobs.files import storage
from shoal.jobs.mlflow import model_loading, training_rows
from shoal.jobs.mlflow.training_rows import TrainingRows
from shoal.jobs.specs.training import is_stored
from shoal.secrets.redaction import redact_value
from shoal.training.tracking import MODEL_VERSION, is_mlflow_uri

if TYPE_CHECKING:
    from shoal.boosting_libraries import Framework
    from shoal.jobs.mlflow.job_run import Run


def load(model: str, framework: Framework) -> bytes:
    """Load a model from which a training continues, in a format of its library.

    Raises:
        InvalidArgumentError: There is no such file, or the MLflow model is one of another library.
        JobError: MLflow cannot load the model, or a stored file was changed.
        RegistryError: MLflow, or its storage of models, cannot be reached.
    """
    if is_stored(model):
        return shipped_code.read(model)
    if is_mlflow_uri(model) or os.path.isdir(model):
        return model_loading.load_booster(model, framework)
    try:
        # The user may have named a link. Unlike shoal's own files in shared folders, it is followed.
        return storage.read(model if "://" in model else os.path.realpath(model))
    except OSError as error:
        raise InvalidArgumentError(
            f"init_model {redact_value(model)} cannot be read: {error}. Name a file that {framework} has written, or "
            "an MLflow URI (models:/NAME@ALIAS, models:/NAME/VERSION, runs:/...)"
        ) from error


def rows_of(run: Run, model: str) -> TrainingRows | None:
    """Load the record of the rows on which a model was trained."""
    named = MODEL_VERSION.fullmatch(model)
    return training_rows.load(run, named["name"], named["version"]) if named else None
