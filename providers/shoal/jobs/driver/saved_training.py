"""Continue with the training that an earlier attempt of the job has saved before it failed, instead of training again.

The earlier attempt may have failed because MLflow was away, or because its driver was killed during the upload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.data.dataset_spec import content_of
from shoal.jobs.driver.context import AttemptContext
from shoal.jobs.files import artifacts
from shoal.jobs.journal import attempts
from shoal.jobs.journal.steps import patiently
from shoal.jobs.specs.training import JobSpec
from shoal.secrets.redaction import redact_value
from shoal.training.boosting.library import library_of

if TYPE_CHECKING:
    from shoal.data.connector import DataConnector
    from shoal.training.boosting.request import TrainResult


def inputs_of(spec: JobSpec, dataset: DataConnector, rows: str, init_model: bytes | None) -> dict[str, str] | None:
    """Return a digest of each input of a training. Trainings with equal inputs train the same model.

    Args:
        spec: Spec of the job.
        dataset: Training dataset.
        rows: Digest of the training rows.
        init_model: The model from which the training continues; None if there is none.

    Returns:
        The digests by the name of the input; None if the input may change and shoal would not notice it, as with the
        user's own functions or with files whose write times are not known.
    """
    if spec.user_code is not None:
        return None
    files = [content_of(one) for one in {one.paths: one for one in spec.inputs()}.values()]
    if None in files:
        return None
    found = {
        "the spec": spec.fingerprint,
        "the training rows": [rows, [(group.index, group.rows) for group in dataset.source.row_groups()]],
        "the files of the datasets": files,
        "the library": library_of(spec.framework).version(),
        "init_model": None if init_model is None else hashlib.sha256(init_model).hexdigest(),
    }
    return {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in found.items()}


def of_earlier_attempt(spec: JobSpec, place: AttemptContext, inputs: Mapping[str, str]) -> TrainResult | None:
    """Return the training that an earlier attempt has saved before it failed; None if this attempt has to train.

    Only a digest in the store shows that an attempt has written the files: anybody may write to a shared folder.
    """
    found = patiently(place.store, lambda: attempts.saved_before_failure(place.store, place.key))
    if found is None:
        return None
    key, digest = found
    folder = artifacts.folder(key, spec.run_config.artifact_location)
    try:
        trained, saved = artifacts.load_saved(folder, spec.framework, digest)
    except Exception as error:  # whatever the cause is, this attempt can train
        print(
            f"attempt {key.attempt} has saved a model, but it cannot be used, so the job trains again: "
            f"{type(error).__name__}: {redact_value(str(error))}",
            flush=True,
        )
        return None
    if changed := [name for name, value in inputs.items() if saved.get(name) != value]:
        print(
            f"attempt {key.attempt} has saved a model, but the job trains again, because {' and '.join(changed)} "
            "changed meanwhile",
            flush=True,
        )
        return None
    print(f"not trained again: attempt {key.attempt} has saved its model in {redact_value(folder)}, and failed later")
    place.stopwatch.worked(read_s=0.0, train_s=0.0)
    return trained
