"""The files that a job leaves: its model, and what the training reported; complete or absent."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import TYPE_CHECKING

from shoal.errors import InvalidArgumentError
from shoal.jobs import files
from shoal.jobs.attempts import Key

if TYPE_CHECKING:
    from shoal.jobs.spec import JobResult
    from shoal.training.pytorch.request import FunctionResult
    from shoal.training.request import TrainResult

_MODELS = {"xgboost": "model.ubj", "lightgbm": "model.txt"}
"""What the model is called; either library goes by the ending."""
_REPORT = "training.json"
_RESULTS = "results.pkl"


def folder(key: Key, artifact_location: str | None) -> str:
    """Where an attempt's files go: a local path or a URI."""
    return f"{files.root(artifact_location)}/{key.job_id}/{key.attempt}"


def save(folder: str, trained: TrainResult) -> str:
    """Write what a training returned; returns the model's path.

    The model comes last: where it is, the rest is too.
    """
    files.write(f"{folder}/{_REPORT}", trained.model_dump_json(exclude={"model"}).encode())
    path = f"{folder}/{_MODELS[trained.framework]}"
    files.write(path, trained.model)
    return path


def load_training(result: JobResult, artifact_location: str | None = None) -> TrainResult:
    """What the training of a finished job returned: its model, evaluation results and what each worker did.

    Args:
        result: Of the job.
        artifact_location: As the job was given it, where that has credentials in it; the result does not have them.

    Raises:
        FileNotFoundError: Its files are gone, or out of reach from here.
    """
    from shoal.training.request import TrainResult

    path = files.as_given(result.model_path, artifact_location)
    report = json.loads(files.read(f"{path.rpartition('/')[0]}/{_REPORT}"))
    report["model"] = b64encode(files.read(path)).decode()
    return TrainResult.model_validate_json(json.dumps(report))


def save_results(folder: str, answer: FunctionResult) -> str:
    """Write what each rank of a function returned; returns the path."""
    import cloudpickle

    path = f"{folder}/{_RESULTS}"
    files.write(path, cloudpickle.dumps(answer))
    return path


def load_results(result: JobResult, artifact_location: str | None = None) -> FunctionResult:
    """What a finished job's function returned on each rank, and what its run took.

    Args:
        result: Of the job.
        artifact_location: As the job was given it, where that has credentials in it; the result does not have them.

    Raises:
        InvalidArgumentError: It is the result of a job that ran no function.
        FileNotFoundError: Its files are gone, or out of reach from here.
    """
    import cloudpickle

    if result.results_path is None:
        raise InvalidArgumentError(f"job {result.job_id} ran no function: load_training has what it returned")
    answer: FunctionResult = cloudpickle.loads(files.read(files.as_given(result.results_path, artifact_location)))
    return answer
