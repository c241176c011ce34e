"""Tell apart the texts that name a model: the URI of an MLflow model, or the path of a file or folder."""

from __future__ import annotations

import re

from shoal.errors import InvalidArgumentError
from shoal.training.locations import resolved

MODEL_VERSION = re.compile(r"models:/(?P<name>[^/@]+)/(?P<version>\d+)")
"""Pattern of the URIs that name a version of a registered model by its number."""
_REGISTERED = re.compile(r"models:/([^/@]+@[^/@]+|[^/@]+/[0-9]+|m-[0-9a-f]{32})")
"""Pattern of the URIs that name a version or an alias. A stage or "latest" is not accepted, because the version that it
means may change during a run."""
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
"""Start of a model's URI, such as ``runs:/`` or ``s3://``."""


def is_model_path(model: str) -> bool:
    """Return whether the text that names a model is a path, and not a URI."""
    return not _URI.match(model)


def is_mlflow_uri(model: str) -> bool:
    """Return whether the text that names a model is a URI that only MLflow can resolve."""
    return model.startswith(("models:/", "runs:/"))


def absolute_model(model: str) -> str:
    """Return the text that names a model, with an absolute path if it is a path."""
    return resolved(model, "model") if is_model_path(model) else model


def check_model_version(model: str) -> None:
    """Check that the URI of a registered model names a version or an alias.

    Raises:
        InvalidArgumentError: The URI names neither.
    """
    if model.startswith("models:/") and not _REGISTERED.fullmatch(model):
        raise InvalidArgumentError(
            f'model "{model}" names no version: write models:/NAME@ALIAS or models:/NAME/VERSION'
        )
