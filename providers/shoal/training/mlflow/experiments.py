"""Find or create MLflow experiments, and choose the folder for the artifacts of a new experiment."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

DEFAULT_EXPERIMENT = "shoal"
"""Name of the experiment for a job's MLflow run, if neither the spec of the job nor the caller names an experiment."""

_FOLDER_LENGTH = 80
_FOLDER = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9_. -]{{0,{_FOLDER_LENGTH - 1}}}")
"""Pattern of the experiment names that are used unchanged as folder names. Other characters are not allowed, because
the folder name becomes part of a file URI, in which `%`, `#` and `?` have a special meaning."""


def experiment_id(client: MlflowClient, name: str, artifacts: str | None) -> str:
    """Return the id of the experiment with the given name; create the experiment if it does not exist."""
    from mlflow.exceptions import MlflowException

    if (found := client.get_experiment_by_name(name)) is not None:
        return str(found.experiment_id)
    try:
        location = artifacts and f"{artifacts}/{folder_of(name)}"
        return str(client.create_experiment(name, artifact_location=location))
    except MlflowException:
        # Another process may have created the experiment in the meantime.
        if (found := client.get_experiment_by_name(name)) is None:
            raise
        return str(found.experiment_id)


def folder_of(experiment: str) -> str:
    """Convert the name of an experiment to the name of the folder for the experiment's artifacts.

    If the name of the experiment is too long or contains illegal characters, the name is cut, the illegal characters
    are replaced, and a digest is appended. The folder is therefore always inside its parent folder, and no two
    experiments share a folder.
    """
    if _FOLDER.fullmatch(experiment):
        return experiment
    legal = re.sub(r"[^A-Za-z0-9_-]+", "_", experiment)[:_FOLDER_LENGTH]
    return f"{legal}-{hashlib.sha256(experiment.encode(errors='surrogatepass')).hexdigest()[:12]}"
