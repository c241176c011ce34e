"""Find out whether a training would only repeat the last one, because its rows, holdout and settings are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import RegistryError
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.mlflow.job_run import Run
from shoal.jobs.mlflow.registry import (
    ATTEMPT_TAG,
    HOLDER_TAG,
    JOB_TAG,
    REASON_TAG,
    WITHDRAWN,
    digest_tag,
    newest_versions,
)
from shoal.jobs.results import DATA_TAGS, PROMOTING
from shoal.jobs.specs.register import Register
from shoal.jobs.specs.training import JobSpec
from shoal.state import Store
from shoal.state.schema import JobState

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

TAG = "shoal.spec_digest"
"""Name of the tag that contains the digest of the settings with which a registered version was trained. A version gets
the tag after its comparison with the champion. So the tag is missing if the training failed before that."""

FILES_TAG = "shoal.files_digest"
"""Name of the tag with the digest of the write times of the files that a version was trained with."""

SKIPPED = "shoal.skipped"
"""Name of the tag of an MLflow run whose training was skipped; its value is the reason."""

_LOOKED_AT = 50
"""Number of newest versions that are searched for that of the last successful training."""

_OF_THE_RUN = ("run_config", "tracking", "fingerprint", "user_code", "dataset", "verbose_eval")
"""Fields of a spec that do not change the model, or are compared separately, as the dataset by its digest."""


@dataclass(frozen=True)
class Fingerprints:
    """Digests of all inputs of a training that determine the trained model.

    Attributes:
        rows: Digest of the training rows.
        holdout: Digest of the holdout's rows.
        settings: Digest of the spec's other fields, such as parameters, columns and rules of the promotion.
        files: Digest of the times at which the files were written. It is needed because, without filters, the digest
            `rows` is computed from the files' footers, which may stay the same when a value changes.
    """

    rows: str
    holdout: str
    settings: str
    files: str

    @classmethod
    def of(cls, spec: JobSpec, rows: str, holdout: str) -> Fingerprints:
        """Build the fingerprints of a training."""
        assert spec.register_as is not None
        known = {spec.dataset.model_dump_json(): rows, spec.register_as.holdout.model_dump_json(): holdout}
        document = spec.document()
        document["seed"] = spec.run_config.seed
        for name in _OF_THE_RUN:
            document.pop(name, None)
        for name in ("holdout", "skip_if_unchanged"):
            document["register"].pop(name, None)
        document["eval_set"] = {
            name: known.get(each.model_dump_json()) or _digest(each) for name, each in spec.eval_set.items()
        }
        text = json.dumps(document, sort_keys=True)
        return cls(rows, holdout, hashlib.sha256(text.encode()).hexdigest()[:32], _files_digest(spec))

    def differences(self, tags: Mapping[str, str], register: Register) -> list[str]:
        """Return the names of the fingerprints (rows, holdout, settings, times of files) that differ from the
        fingerprints in the tags of a model version."""
        theirs = {
            "rows": (self.rows, tags.get(f"{DATA_TAGS}digest")),
            "holdout": (self.holdout, tags.get(digest_tag(register.metric))),
            "settings": (self.settings, tags.get(TAG)),
            "the times of the files": (self.files, tags.get(FILES_TAG)),
        }
        return [name for name, (mine, other) in theirs.items() if mine != other]


def reason_to_skip(
    run: Run, store: Store, key: Key, holder: str, register: Register, fingerprints: Fingerprints
) -> tuple[str, str] | None:
    """Return a model's newest version, and the reason why a new training can be skipped; None if the job must train.

    If there is a newest version but the job must train, the reason is printed to the job's log.
    """
    import mlflow

    try:
        version = _last(run, store, register.model)
        repeat_reason = None if version is None else _reason_to_repeat(run, register, version)
    except (mlflow.MlflowException, RegistryError) as error:
        # Some registries cannot search for versions. With such a registry, no job is skipped and every job trains.
        print(f"the last training of {register.model} could not be found, so the job trains: {error}", flush=True)
        return None
    if version is None:
        return None
    name = f"{register.model} version {version.version}"
    if (version.tags.get(JOB_TAG), version.tags.get(HOLDER_TAG)) == (key.job_id, holder):
        print(f"{name} was registered by an earlier attempt of this job, so the job is not skipped", flush=True)
        return None
    if repeat_reason:
        print(f"not skipped: {name} was promoted, but {repeat_reason}", flush=True)
        return None
    if different := fingerprints.differences(version.tags, register):
        print(f"not skipped: {' and '.join(different)} differ from those of {name}", flush=True)
        return None
    reason = f"skipped: rows, holdout and settings are those of {name}. To train anyway, set skip_if_unchanged=False"
    return str(version.version), reason


def mark(run: Run, register: Register, version: str, fingerprints: Fingerprints) -> None:
    """Tag a registered version with two fingerprints of its training: `settings` and `files`.

    A later job reads the tags to find out whether its training would only repeat the training of the tagged version.
    The version is tagged after the comparison with the champion.
    """
    run.client.set_model_version_tag(register.model, version, FILES_TAG, fingerprints.files)
    run.client.set_model_version_tag(register.model, version, TAG, fingerprints.settings)


def _last(run: Run, store: Store, model: str) -> ModelVersion | None:
    """Return the newest version that a successful training has registered for a model; None if there is none."""
    for version in newest_versions(run.client, model, _LOOKED_AT):
        if TAG in version.tags and _succeeded(store, version.tags):
            return version
    return None


def _reason_to_repeat(run: Run, register: Register, version: ModelVersion) -> str | None:
    """Return a reason to train again although nothing has changed: the promotion was withdrawn, or the alias was
    removed or points to a newer version. Return None if there is no such reason."""
    if version.tags.get(REASON_TAG) == WITHDRAWN:
        return "its promotion was withdrawn"
    alias = run.client.get_registered_model(register.model).aliases.get(register.alias)
    if alias is None:
        return "the alias is gone" if version.tags.get(REASON_TAG) in PROMOTING else None
    if int(alias) > int(version.version):
        return f"version {alias}, which is newer, has the alias"
    return None


def _succeeded(store: Store, tags: Mapping[str, str]) -> bool:
    """Return whether the attempt that registered a version has succeeded. True if the attempt is not in the store."""
    job_id, attempt = tags.get(JOB_TAG), tags.get(ATTEMPT_TAG, "")
    state = attempts.state(store, Key(job_id, int(attempt))) if job_id and attempt.isdigit() else None
    return state in (None, JobState.SUCCEEDED)


def _files_digest(spec: JobSpec) -> str:
    from shoal.data.connector import DataConnector

    distinct = {dataset.model_dump_json(): dataset for dataset in spec.datasets()}.values()
    times = [list(DataConnector.from_spec(dataset).write_times()) for dataset in distinct]
    if any(time is None for of_dataset in times for time in of_dataset):
        # If the write time of a file is not known, a change of the file cannot be noticed. So the digest is random, and
        # differs from every other digest.
        return uuid4().hex
    return hashlib.sha256(json.dumps(times).encode()).hexdigest()[:32]


def _digest(dataset: DatasetSpec) -> str:
    from shoal.data.connector import DataConnector

    return DataConnector.from_spec(dataset).digest()
