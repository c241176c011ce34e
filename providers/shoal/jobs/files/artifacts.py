"""The files that a job leaves: its model, and what the training reported; complete or absent."""

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
"""What the model is called; either library goes by the ending."""
_REPORT = "training.json"
_RESULTS = "results.pkl"
_LOGS = (LOG_NAME,)
"""In `$SHOAL_HOME`, an attempt's log lies in the same folder."""


def folder(key: Key, artifact_location: str | None) -> str:
    """Where an attempt's files go: a local path or a URI."""
    return f"{storage.root(artifact_location)}/{key.job_id}/{key.attempt}"


def claim_of(store: Store, key: Key) -> Claim:
    """What marks an attempt's folders as its own."""
    return Claim(key.job_id, f"job of {attempts.first_asked(store, key.job_id)!r}", key.attempt)


def check(folder: str, claim: Claim, artifact_location: str | None) -> None:
    """Refuse, before hours of training, a folder that an attempt cannot write or must not replace.

    Args:
        folder: The attempt's.
        claim: Says what it may replace.
        artifact_location: Where it lies.

    Raises:
        InvalidArgumentError: The message says which, and what to do.
    """
    locations.try_out(storage.root(artifact_location))
    claim.check(folder, beside=_LOGS)


def _mark(folder: str, claim: Claim) -> None:
    claim.check(folder, beside=_LOGS)
    claim.mark(folder)


def discard_unfinished(folder: str, claim: Claim) -> None:
    """Remove files that a killed driver was writing, from a folder that its own attempt has marked."""
    if claim.has_marked(folder):
        storage.discard_unfinished(folder)


def save(folder: str, claim: Claim, trained: TrainResult) -> str:
    """Write what a training returned; returns the model's path.

    The model comes last: where it is, the rest is too.
    """
    _mark(folder, claim)
    path = f"{folder}/{_MODELS[trained.framework]}"
    with act(JobStep.PUBLISH):
        storage.write(f"{folder}/{_REPORT}", trained.model_dump_json(exclude={"model"}).encode())
        storage.write(path, trained.model)
    return path


def load_training(result: JobResult, artifact_location: str | None = None) -> TrainResult:
    """What the training of a finished job returned: its model, evaluation results and what each worker did.

    Args:
        result: Of the job.
        artifact_location: As the job was given it, where that has credentials in it; the result does not have them.

    Raises:
        FileNotFoundError: Its files are gone, or out of reach from here.
    """
    from shoal.training.boosting.request import TrainResult

    path = storage.as_given(result.model_path, artifact_location)
    report = json.loads(storage.read(f"{path.rpartition('/')[0]}/{_REPORT}"))
    report["model"] = b64encode(storage.read(path)).decode()
    return TrainResult.model_validate_json(json.dumps(report))


def save_results(folder: str, claim: Claim, answer: FunctionResult) -> tuple[str, str]:
    """Write what each rank of a function returned; returns the path, and the SHA-256 of the content."""
    import cloudpickle

    _mark(folder, claim)
    path = f"{folder}/{_RESULTS}"
    content = cloudpickle.dumps(answer)
    with act(JobStep.PUBLISH):
        storage.write(path, content)
    return path, hashlib.sha256(content).hexdigest()


def load_results(result: JobResult, artifact_location: str | None = None) -> FunctionResult:
    """What a finished job's function returned on each rank, and what its run took.

    Reading a pickle runs code, so the file is read only where the store has its digest; an attempt of shoal 0.1 has
    none, and its file is read as it is.

    Args:
        result: Of the job.
        artifact_location: As the job was given it, where that has credentials in it; the result does not have them.

    Raises:
        InvalidArgumentError: It is the result of a job that ran no function.
        FileNotFoundError: Its files are gone, or out of reach from here.
        JobError: Its file was changed since it was written, or the job is none of this store.
    """
    import cloudpickle

    if result.results_path is None:
        raise InvalidArgumentError(f"job {result.job_id} ran no function: load_training has what it returned")
    known = attempts.load(Store(), Key(result.job_id, result.attempt)).results_digest
    content = storage.read(storage.as_given(result.results_path, artifact_location))
    if known is not None and not hmac.compare_digest(hashlib.sha256(content).hexdigest(), known):
        raise JobError(
            f"{result.results_path} was changed since job {result.job_id} wrote it, and is not read: run the job again"
        )
    answer: FunctionResult = cloudpickle.loads(content)
    return answer
