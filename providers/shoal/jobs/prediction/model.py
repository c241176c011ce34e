"""Identify the MLflow model of a batch prediction, and replace its alias by a version."""

from __future__ import annotations

import re

from shoal.errors import JobError

_ALIAS = re.compile(r"models:/(?P<name>[^/@]+)@(?P<alias>[^/@]+)")


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
