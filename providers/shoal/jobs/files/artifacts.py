"""Write and read the result files of a job: the model, the training report, and a function's return values."""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import b64encode
from typing import TYPE_CHECKING

from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs.files import storage
from shoal.jobs.files.logs import LOG_NAME
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import JobStep, act
from shoal.state import Store
from shoal.training import locations
from shoal.training.claims import Claim

if TYPE_CHECKING:
    from shoal.jobs.spec import JobResult
    from shoal.training.boosting.request import TrainResult
    from shoal.training.pytorch.request import FunctionResult

_MODELS = {"xgboost": "model.ubj", "lightgbm": "model.txt"}
"""File name of the model by framework; both libraries choose the format by the ending."""
_REPORT = "training.json"
_RESULTS = "results.pkl"
_LOGS = (LOG_NAME,)
"""Files that may already be in an attempt's folder: under `$SHOAL_HOME`, its log is there."""


def folder(key: Key, artifact_location: str | None) -> str:
    """Return the folder of an attempt's files, as a local path or a URI."""
    return f"{storage.root(artifact_location)}/{key.job_id}/{key.attempt}"


def claim_of(store: Store, key: Key) -> Claim:
    """Return the claim that marks folders as belonging to an attempt."""
    return Claim(key.job_id, f"job of {attempts.first_asked(store, key.job_id)!r}", key.attempt)


def check(folder: str, claim: Claim, artifact_location: str | None) -> None:
    """Check, before hours of training, that an attempt can write its folder and may replace the folder's content.

    Args:
        folder: The attempt's folder.
        claim: The attempt's claim, which decides what the attempt may replace.
        artifact_location: Directory or URI that contains the folder.

    Raises:
        InvalidArgumentError: The folder cannot be written or must not be replaced; the message says what to do.
    """
    locations.try_out(storage.root(artifact_location))
    claim.check(folder, beside=_LOGS)


def _mark(folder: str, claim: Claim) -> None:
    claim.check(folder, beside=_LOGS)
    claim.mark(folder)


def discard_unfinished(folder: str, claim: Claim) -> None:
    """Remove files that a killed driver left half written, if the folder has the mark of the driver's attempt."""
    if claim.has_marked(folder):
        storage.discard_unfinished(folder)


def save(folder: str, claim: Claim, trained: TrainResult) -> str:
    """Write the report and the model of a training, and return the model's path.

    The model is written last, so that a folder with a model is complete.
    """
    _mark(folder, claim)
    path = f"{folder}/{_MODELS[trained.framework]}"
    with act(JobStep.PUBLISH):
        storage.write(f"{folder}/{_REPORT}", trained.model_dump_json(exclude={"model"}).encode())
        storage.write(path, trained.model)
    return path


def load_training(result: JobResult, artifact_location: str | None = None) -> TrainResult:
    """Read the training result of a finished job: the model, evaluation results and statistics of each worker.

    Args:
        result: Result of the job.
        artifact_location: The job's `artifact_location`, if that contains credentials, which the result does not keep.

    Raises:
        FileNotFoundError: The files are gone, or cannot be reached from this machine.
    """
    from shoal.training.boosting.request import TrainResult

    path = storage.as_given(result.model_path, artifact_location)
    report = json.loads(storage.read(f"{path.rpartition('/')[0]}/{_REPORT}"))
    report["model"] = b64encode(storage.read(path)).decode()
    return TrainResult.model_validate_json(json.dumps(report))


def save_results(folder: str, claim: Claim, answer: FunctionResult) -> tuple[str, str]:
    """Write the return values of a function's ranks; return the file's path and the SHA-256 of its content."""
    import cloudpickle

    _mark(folder, claim)
    path = f"{folder}/{_RESULTS}"
    content = cloudpickle.dumps(answer)
    with act(JobStep.PUBLISH):
        storage.write(path, content)
    return path, hashlib.sha256(content).hexdigest()


def load_results(result: JobResult, artifact_location: str | None = None) -> FunctionResult:
    """Read the return values of a finished job's function on each rank, and the statistics of the run.

    Unpickling runs code, so the file's digest is compared with the one in the store. Attempts of shoal 0.1 have no
    digest in the store, and their files are read without the check.

    Args:
        result: Result of the job.
        artifact_location: The job's `artifact_location`, if that contains credentials, which the result does not keep.

    Raises:
        InvalidArgumentError: The job ran no function.
        FileNotFoundError: The file is gone, or cannot be reached from this machine.
        JobError: The file was changed after the job wrote it, or the job is not in this store.
    """
    import cloudpickle

    if result.results_path is None:
        raise InvalidArgumentError(f"job {result.job_id} ran no function: use load_training to read its result")
    known = attempts.load(Store(), Key(result.job_id, result.attempt)).results_digest
    content = storage.read(storage.as_given(result.results_path, artifact_location))
    if known is not None and not hmac.compare_digest(hashlib.sha256(content).hexdigest(), known):
        raise JobError(
            f"{result.results_path} was changed after job {result.job_id} wrote it, and is not read: run the job again"
        )
    answer: FunctionResult = cloudpickle.loads(content)
    return answer
