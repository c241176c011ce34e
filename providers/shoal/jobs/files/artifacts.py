"""Write and read the result files of a job: the model, the training report, and a function's return values."""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs.files import storage
from shoal.jobs.files.logs import LOG_NAME
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import JobStep, act
from shoal.lazy_imports import cloudpickle
from shoal.secrets.redaction import redact_value
from shoal.state import Store
from shoal.training import locations
from shoal.training.boosting.library import library_of
from shoal.training.locations import Claim

if TYPE_CHECKING:
    from shoal.boosting_libraries import Framework
    from shoal.jobs.results import JobResult
    from shoal.training.boosting.request import TrainResult
    from shoal.training.pytorch.request import FunctionResult

_REPORT = "training.json"
_INPUTS = "inputs"
"""Key of the report under which :func:`save` stores the inputs of the training."""
_RESULTS = "results.pkl"
_LOGS = (LOG_NAME,)
"""Files that an attempt's folder contains before it is marked: under `$SHOAL_HOME`, the attempt's log."""


def folder(key: Key, artifact_location: str | None) -> str:
    """Return the local path or URI of the folder that has an attempt's files."""
    return f"{storage.root(artifact_location)}/{key.folder}"


def claim_of(store: Store, key: Key) -> Claim:
    """Return the text that an attempt writes into the marker file of its folder, to show that it owns the folder."""
    return Claim(key.job_id, f"job of {attempts.first_asked(store, key.job_id)!r}", key.attempt)


def check(folder: str, claim: Claim, artifact_location: str | None) -> None:
    """Check, before the training, that an attempt can write to its folder and may replace the folder's content."""
    locations.try_out(storage.root(artifact_location))
    claim.check(folder, shared=storage.root(artifact_location), beside=_LOGS)


def mark(folder: str, claim: Claim) -> None:
    """Create the folder of an attempt, and mark it as the attempt's."""
    shared = folder.rsplit("/", 2)[0]  # see `folder`: the folder of the job and that of its attempt belong to shoal
    claim.check(folder, shared=shared, beside=_LOGS)
    claim.mark(folder, shared=shared)


def discard_unfinished(folder: str, claim: Claim) -> None:
    """Remove half-written files of a killed driver from a folder, if the folder belongs to the driver's attempt."""
    if claim.has_marked(folder):
        storage.discard_unfinished(folder)


def remove(folder: str, claim: Claim) -> None:
    """Remove an attempt's folder if the folder belongs to the attempt; otherwise do nothing."""
    path = Path(folder)
    if claim.has_marked(folder):
        claim.remove(folder)
    elif path.is_dir() and not path.is_symlink() and {each.name for each in path.iterdir()} <= {*_LOGS}:
        shutil.rmtree(path)


def save(folder: str, claim: Claim, trained: TrainResult, inputs: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Write the report and the model of a training into the attempt's folder, and return the model's path and the
    digest of both files.

    The model is written last. So a folder that contains a model is complete.
    """
    mark(folder, claim)
    path = f"{folder}/{library_of(trained.framework).file_name}"
    document = json.loads(trained.model_dump_json(exclude={"model"})) | ({_INPUTS: dict(inputs)} if inputs else {})
    report = json.dumps(document).encode()
    with act(JobStep.PUBLISH):
        storage.write(f"{folder}/{_REPORT}", report)
        storage.write(path, trained.model)
    return path, _digest(report, trained.model)


def load_saved(folder: str, framework: Framework, digest: str) -> tuple[TrainResult, dict[str, str]]:
    """Read a training that :func:`save` has written for an attempt that failed later, and the inputs of the training.

    Raises:
        OSError: The files were removed, or cannot be reached.
        JobError: The files were changed, so their digest is not `digest`, which the store has.
    """
    report, model = storage.read(f"{folder}/{_REPORT}"), storage.read(f"{folder}/{library_of(framework).file_name}")
    if not hmac.compare_digest(_digest(report, model), digest):
        raise JobError(f"the files in {redact_value(folder)} were changed after the attempt had saved them")
    document = json.loads(report)
    inputs = document.pop(_INPUTS, {})
    return _train_result(document, model), inputs


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()


def exist(result: JobResult, artifact_location: str | None) -> bool:
    """Return whether the files of a result still exist: the model, the function's return values, or the predictions.

    They count as existing if this process cannot know it: if the storage does not answer, or if only the nodes have the
    folder. The model of a job that was skipped is only in MLflow, which is not asked. A plan has no files.
    """
    if result.skipped or result.plan:
        return True
    path = storage.as_given(result.results_path or result.output_path or result.model_path, artifact_location)
    if "://" not in path:
        folders = Path(path).parents
        shared = folders[0 if result.output_path else min(2, len(folders) - 1)]  # see `folder`
        return Path(path).exists() or not shared.exists()
    try:
        filesystem, inner = locations.filesystem(path)
        return bool(filesystem.exists(inner))
    except Exception:  # each storage raises other exceptions
        return True


def load_training(result: JobResult, artifact_location: str | None = None) -> TrainResult:
    """Read the training result of a finished job: the model, evaluation results and statistics of each worker.

    Args:
        result: Result of the job.
        artifact_location: The job's `artifact_location`; needed only if the location contains credentials, because the
            result does not keep credentials.

    Raises:
        InvalidArgumentError: The job was skipped, so it has trained no model.
        FileNotFoundError: The files were removed, or cannot be reached from this machine.
        JobError: The model was changed after the job wrote it.
    """
    path, report = _trained(result, artifact_location)
    model = storage.read(path)
    if result.model_digest is not None and hashlib.sha256(model).hexdigest() != result.model_digest:
        raise JobError(f"{result.model_path} was changed after job {result.job_id} wrote it: run the job again")
    return _train_result(report, model)


def load_statistics(result: JobResult) -> TrainResult:
    """Read the training result of a finished job without the model, which may be large; the field `model` is empty.

    Raises:
        InvalidArgumentError: The job was skipped, so it has trained no model.
        FileNotFoundError: The files were removed, or cannot be reached from this machine.
    """
    return _train_result(_trained(result, None)[1])


def _trained(result: JobResult, artifact_location: str | None) -> tuple[str, dict[str, Any]]:
    """Return the path of a job's model, and the content of the training report in the same folder."""
    if result.skipped:
        raise InvalidArgumentError(
            f"job {result.job_id} trained no model ({result.skipped}): load the existing model {result.model_uri} with "
            "MLflow"
        )
    path = storage.as_given(result.model_path, artifact_location)
    return path, json.loads(storage.read(f"{path.rpartition('/')[0]}/{_REPORT}"))


def _train_result(report: dict[str, Any], model: bytes = b"") -> TrainResult:
    from shoal.training.boosting.request import TrainResult

    return TrainResult.model_validate_json(json.dumps({**report, "model": b64encode(model).decode()}))


def save_results(folder: str, claim: Claim, answer: FunctionResult) -> tuple[str, str]:
    """Write the return values of a training function, one per rank, into a file in the attempt's folder."""
    mark(folder, claim)
    path = f"{folder}/{_RESULTS}"
    content = cloudpickle.dumps(answer)
    with act(JobStep.PUBLISH):
        storage.write(path, content)
    return path, hashlib.sha256(content).hexdigest()


def load_reported(result: JobResult, artifact_location: str | None = None) -> Any:
    """Read the model that the best trial of a search over a function has reported; None if it has reported none.

    Raises:
        FileNotFoundError: The file was removed, or cannot be reached from this machine.
        JobError: The file was changed after the trial wrote it, or the job is not in this store.
    """
    if (known := attempts.digest_of_results(Store(), Key(result.job_id, result.attempt))) is None:
        return None
    # A pickled file can run any code when it is read, so its digest is compared with the one in the store.
    return cloudpickle.loads(storage.read_unchanged(storage.as_given(result.model_path, artifact_location), known))


def load_results(result: JobResult, artifact_location: str | None = None) -> FunctionResult:
    """Read the result of a finished job's training function: the return value of each rank, the metrics and other data.

    A pickled file can run any code when it is read. Therefore the file's digest is first compared with the digest in
    the store.

    Args:
        result: Result of the job.
        artifact_location: The job's `artifact_location`; needed only if the location contains credentials, because the
            result does not keep credentials.

    Raises:
        InvalidArgumentError: The job ran no function.
        FileNotFoundError: The file was removed, or cannot be reached from this machine.
        JobError: The file was changed after the job wrote it, or the job is not in this store.
    """
    if result.results_path is None:
        raise InvalidArgumentError(f"job {result.job_id} ran no training function: read its model with load_training")
    known = attempts.digest_of_results(Store(), Key(result.job_id, result.attempt))
    content = storage.read(storage.as_given(result.results_path, artifact_location))
    if not hmac.compare_digest(hashlib.sha256(content).hexdigest(), known or ""):
        raise JobError(
            f"{result.results_path} was changed after job {result.job_id} wrote it, and is not read, because a changed "
            "file could run any code: run the job again"
        )
    answer: FunctionResult = cloudpickle.loads(content)
    return answer
