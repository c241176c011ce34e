"""Record in the MLflow run which rows a model is trained on, so that a later holdout can be checked for these rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shoal.data.parquet.overlap import RecordedFile, record
from shoal.jobs.mlflow.tracking import Run

if TYPE_CHECKING:
    from shoal.data.connector import DataConnector

TAG = "shoal.training_rows"
"""Name of a registered version's tag whose value is the URI of the record of the version's training rows."""

_FOLDER = "shoal/training_rows"
_EVALUATION_NAMES = ("eval", "holdout", "test", "val")


def of_connectors(connectors: Iterable[DataConnector]) -> list[RecordedFile]:
    """Return a record of the files and rows that datasets consist of; only the Parquet files' footers are read."""
    return [file for connector in connectors for file in record(connector.source)]


def is_training_data(name: str) -> bool:
    """Return False if the name of a function's dataset marks it as evaluation data; else it counts as training data.

    What a function does with its datasets is not known. A dataset counts as training data unless its name begins with
    "eval", "holdout", "test" or "val".
    """
    return not name.lower().startswith(_EVALUATION_NAMES)


def store(run: Run, rows: Sequence[RecordedFile]) -> dict[str, str]:
    """Store a record of training rows in the MLflow run.

    Returns:
        Tags for the registered version that refer to the record; empty if no rows are known.
    """
    if not rows:
        return {}
    text = json.dumps({"files": [file.to_json() for file in rows]}, separators=(",", ":"))
    path = f"{_FOLDER}/{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    run.client.log_text(run.run_id, text, path)
    return {TAG: f"runs:/{run.run_id}/{path}"}


def load(run: Run, model: str, version: str) -> list[RecordedFile] | None:
    """Load the record of the rows on which a registered version of a model was trained.

    Args:
        run: MLflow run whose client is used to read the registry.
        model: Name of the registered model.
        version: Version number of the model.

    Returns:
        The record; None if shoal did not train the version, the training data was not known, or the record is gone.
    """
    import mlflow

    uri = run.client.get_model_version(model, version).tags.get(TAG)
    if uri is None:
        return None
    try:
        document = json.loads(mlflow.artifacts.load_text(uri))
    except (mlflow.MlflowException, OSError) as error:
        print(
            f"the training rows of {model} version {version} are not known: {uri} cannot be read: {error}", flush=True
        )
        return None
    return [RecordedFile.from_json(file) for file in document["files"]]
