"""Go on with the model that an earlier attempt of the same job has saved, instead of training it again.

The earlier attempt may have failed after the training, for example because MLflow did not answer.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from shoal.errors import ShoalError
from shoal.jobs.driver.context import AttemptContext
from shoal.jobs.files import artifacts
from shoal.jobs.journal import attempts
from shoal.jobs.journal.store_outages import patiently
from shoal.jobs.mlflow.skip_if_unchanged import digest_of, files_digest
from shoal.jobs.specs.training import JobSpec

if TYPE_CHECKING:
    from shoal.training.boosting.request import TrainResult


def inputs_digest(spec: JobSpec, rows: str, init_model: bytes | None) -> str:
    """Return the digest of all inputs of a training. Trainings with the same digest train the same model.

    Args:
        spec: Spec of the job.
        rows: Digest of the training rows.
        init_model: The model from which the training continues; None if there is none.
    """
    evaluated = [digest_of(dataset) for dataset in spec.eval_set.values()]
    base = None if init_model is None else hashlib.sha256(init_model).hexdigest()
    inputs = [spec.fingerprint, rows, evaluated, files_digest(spec), base]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def note(place: AttemptContext, trained: TrainResult, inputs: str) -> None:
    """Record in the attempt's row that the attempt has saved its training.

    Args:
        place: Context of the attempt.
        trained: The saved training.
        inputs: Result of `inputs_digest`.
    """
    digest = _digest(trained, inputs)
    patiently(place.store, lambda: attempts.note_saved(place.store, place.key, digest))


def of_earlier_attempt(spec: JobSpec, place: AttemptContext, inputs: str) -> TrainResult | None:
    """Return the training that an earlier attempt has saved before it failed; None if this attempt has to train.

    Args:
        spec: Spec of the job.
        place: Context of the attempt.
        inputs: Result of `inputs_digest`.
    """
    for key, digest in patiently(place.store, lambda: attempts.saved_by_failed(place.store, place.key)):
        folder = artifacts.folder(key, spec.run_config.artifact_location)
        try:
            trained = artifacts.load_saved(folder, spec.framework)
        except (OSError, ValueError, ShoalError) as error:
            print(f"the model of attempt {key.attempt} cannot be read, so the job trains again: {error}", flush=True)
            continue
        # The digest is in the store, so a model that somebody else has put into the folder is not used.
        if _digest(trained, inputs) == digest:
            print(f"not trained again: attempt {key.attempt} has trained on the same rows and failed later", flush=True)
            return trained
        print(f"the rows or the model of attempt {key.attempt} have changed, so the job trains again", flush=True)
    return None


def _digest(trained: TrainResult, inputs: str) -> str:
    return hashlib.sha256(f"{inputs} {trained.model_dump_json()}".encode()).hexdigest()
