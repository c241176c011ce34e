"""Record what a version was trained with: its rows, to find them in a holdout, and its settings, not to repeat it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shoal.data.filters import TimeRange, within
from shoal.data.parquet.overlap import RecordedFile, SharedFile, record_rows, shared_mask, shared_rows
from shoal.errors import RegistryError
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.mlflow_run import HOLDER_TAG, JOB_TAG, Run
from shoal.jobs.register import Register
from shoal.jobs.results import DATA_TAGS, PROMOTING
from shoal.lazy_imports import mlflow, np
from shoal.models.decision import Recency
from shoal.models.registry import REASON_TAG, WITHDRAWN, attempt_of, digest_tag, newest_versions
from shoal.state import Store
from shoal.state.schema import JobState
from shoal.training.tracking import MODEL_VERSION

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from numpy.typing import NDArray

    from shoal.data.connector import DataConnector

ROWS_TAG = "shoal.training_rows"
"""Name of the tag that contains the URI of the record of a registered version's training rows."""

_FOLDER = "shoal/training_rows"


@dataclass(frozen=True)
class TrainingRows:
    """Record of the rows that a model is trained on; empty if no rows are known.

    Attributes:
        files: The files, with the rows of each.
        times: Time range of each dataset with a time column.
    """

    files: tuple[RecordedFile, ...] = ()
    times: tuple[TimeRange, ...] = ()

    def union(self, other: TrainingRows) -> TrainingRows:
        """Return the record of the rows that are in at least one of the two records."""
        files = {json.dumps(file.to_json()): file for file in (*self.files, *other.files)}
        return TrainingRows(tuple(files.values()), tuple(dict.fromkeys((*self.times, *other.times))))


@dataclass(frozen=True)
class Overlap:
    """Comparison of a model's training rows with a holdout.

    Attributes:
        files: Files of the holdout that have rows on which the model was trained.
        training: Time range of training rows that overlaps with the time range `holdout`; None if no time ranges
            overlap.
        holdout: Time range of those rows of the holdout that are not in files of the training rows; None if `training`
            is None.
    """

    files: tuple[SharedFile, ...] = ()
    training: TimeRange | None = None
    holdout: TimeRange | None = None

    def __bool__(self) -> bool:
        return bool(self.files) or self.training is not None

    @property
    def rows(self) -> int:
        """Return the number of holdout rows that were certainly used to train the model."""
        return sum(file.rows for file in self.files)


def of_datasets(datasets: Iterable[tuple[DataConnector, TimeRange | None]]) -> TrainingRows:
    """Describe the rows in datasets by their files and time ranges, so that another process can find the same rows.

    Only the footers of the Parquet files are read.
    """
    found = list(datasets)
    files = [file for connector, _ in found for file in record_rows(connector.source)]
    return TrainingRows(tuple(files), tuple(times for _, times in found if times is not None))


def compare(rows: TrainingRows, holdout: DataConnector, time_col: str | None) -> Overlap:
    """Find out whether a holdout has rows on which a model was trained.

    Files that both datasets have are compared row by row. All other files are compared by the times of their rows,
    because the same rows may have been written to another file, or read from a database again.
    """
    source = holdout.source
    shared = tuple(shared_rows(rows.files, source))
    if not rows.times:
        return Overlap(shared)
    known = {file.digest for file in rows.files}
    compared = {footer.path for footer in source.used_footers() if source.file_digest(footer.path) in known}
    times = holdout.time_range(time_col, without=compared)
    for training in rows.times:
        if times is not None and training.overlaps(times):
            return Overlap(shared, training, times)
    return Overlap(shared)


def seen_rows(rows: TrainingRows, holdout: DataConnector, overlap: Overlap) -> NDArray[np.bool_]:
    """Return for each row of a holdout whether a model was trained on it, or may be trained on it.

    Rows of files that both datasets have are compared one by one. A row of another file counts as a training row if its
    time is in the range of the training rows' times.
    """
    source = holdout.source
    seen: NDArray[np.bool_] = shared_mask(rows.files if overlap.files else (), source)
    if overlap.training is not None:
        column, known = overlap.training.column, {file.digest for file in rows.files}
        ranges = [each for each in rows.times if each.column == column]
        by_time = [within(table.column(column), ranges).to_numpy() for table in holdout.iter_batches([column])]
        parts = source.ranges()
        by_row = np.repeat([source.file_digest(part.path) in known for part in parts], [part.rows for part in parts])
        seen |= np.concatenate(by_time) & ~by_row
    return seen


def recency(
    champion: TrainingRows, challenger: TrainingRows, holdout: DataConnector, time_col: str | None
) -> Recency | None:
    """Compare the latest times in the training rows of a champion and of a challenger.

    Returns:
        The comparison; None if the times are not known or cannot be compared.
    """
    if not champion.times:
        return None
    others = challenger.times or tuple(filter(None, [holdout.time_range(time_col)]))
    mine, theirs = _latest(champion.times), _latest(others)
    for column in mine.keys() & theirs.keys():
        if (order := mine[column].compare_ends(theirs[column])) is not None:
            return Recency(column, mine[column].last, theirs[column].last, order, of_holdout=not challenger.times)
    return None


def _latest(times: Iterable[TimeRange]) -> dict[str, TimeRange]:
    """Return for each time column the range that ends last."""
    latest: dict[str, TimeRange] = {}
    for each in times:
        if each.column not in latest or each.compare_ends(latest[each.column]) == 1:
            latest[each.column] = each
    return latest


def store_rows(run: Run, rows: TrainingRows) -> dict[str, str]:
    """Store a record of training rows in the MLflow run.

    Returns:
        Tags for the registered version that refer to the record; empty if no rows are known.
    """
    if not rows.files:
        return {}
    document = {"files": [file.to_json() for file in rows.files], "times": [asdict(each) for each in rows.times]}
    return {ROWS_TAG: run.log_record(_FOLDER, json.dumps(document, separators=(",", ":")))}


def load_rows(run: Run, model: str, version: str) -> TrainingRows | None:
    """Load the record of the rows on which a registered version of a model was trained."""
    uri = run.client.get_model_version(model, version).tags.get(ROWS_TAG)
    document = None if uri is None else load_record(run, uri, f"the training rows of {model} version {version}")
    if document is None:
        return None
    times = tuple(TimeRange(**each) for each in document["times"])
    return TrainingRows(tuple(RecordedFile.from_json(file) for file in document["files"]), times)


def load_record(run: Run, uri: str, what: str) -> Any:
    """Load a record from MLflow. If it cannot be read, print that `what` is not known, and return None."""
    try:
        return json.loads(mlflow.artifacts.load_text(uri))
    except (mlflow.MlflowException, OSError) as error:
        # If MLflow cannot be reached, this request fails, too, and the record does not count as unknown.
        run.client.get_run(run.run_id)
        print(f"{what} are not known: {uri} cannot be read ({error})", flush=True)
        return None


def rows_of(run: Run, model: str) -> TrainingRows | None:
    """Load the record of the rows on which a model was trained."""
    named = MODEL_VERSION.fullmatch(model)
    return load_rows(run, named["name"], named["version"]) if named else None


SETTINGS_TAG = "shoal.spec_digest"
"""Name of the tag that contains the digest of the settings with which a registered version was trained. A version gets
the tag after its comparison with the champion. So the tag is missing if the training failed before that."""

FILES_TAG = "shoal.files_digest"
"""Name of the tag with the digest of the write times of the files that a version was trained with."""

SKIPPED = "shoal.skipped"
"""Name of the tag of an MLflow run whose training was skipped; its value is the reason."""

_LOOKED_AT = 50
"""Number of newest versions that are searched for that of the last successful training."""


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

    def differences(self, tags: Mapping[str, str], register: Register) -> list[str]:
        """Return the names of the fingerprints (rows, holdout, settings, times of files) that differ from the
        fingerprints in the tags of a model version."""
        theirs = {
            "rows": (self.rows, tags.get(f"{DATA_TAGS}digest")),
            "holdout": (self.holdout, tags.get(digest_tag(register.metric))),
            "settings": (self.settings, tags.get(SETTINGS_TAG)),
            "the times of the files": (self.files, tags.get(FILES_TAG)),
        }
        return [name for name, (mine, other) in theirs.items() if mine != other]


def reason_to_skip(
    run: Run, store: Store, key: Key, holder: str, register: Register, fingerprints: Fingerprints
) -> tuple[str, str] | None:
    """Return a model's newest version, and the reason why a new training can be skipped; None if the job must train.

    If there is a newest version but the job must train, the reason is printed to the job's log.
    """
    try:
        known = newest_versions(run.client, register.model, _LOOKED_AT)
        trained = (each for each in known if SETTINGS_TAG in each.tags and _succeeded(store, each))
        version = next(trained, None)
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
    reason = f"rows, holdout and settings are those of {name}. To train anyway, set skip_if_unchanged=False"
    return str(version.version), reason


def mark(run: Run, register: Register, version: str, fingerprints: Fingerprints) -> None:
    """Tag a registered version with two fingerprints of its training: `settings` and `files`.

    A later job reads the tags to find out whether its training would only repeat the training of the tagged version.
    The version is tagged after the comparison with the champion.
    """
    run.client.set_model_version_tag(register.model, version, FILES_TAG, fingerprints.files)
    run.client.set_model_version_tag(register.model, version, SETTINGS_TAG, fingerprints.settings)


def _reason_to_repeat(run: Run, register: Register, version: ModelVersion) -> str | None:
    """Return a reason to train again although nothing has changed: the promotion was withdrawn, or the alias was
    removed or points to a newer version. Return None if there is no such reason."""
    if version.tags.get(REASON_TAG) == WITHDRAWN:
        return "its promotion was withdrawn"
    if (alias := run.client.get_registered_model(register.model).aliases.get(register.alias)) is None:
        return "the alias is gone" if version.tags.get(REASON_TAG) in PROMOTING else None
    return f"version {alias}, which is newer, has the alias" if int(alias) > int(version.version) else None


def _succeeded(store: Store, version: ModelVersion) -> bool:
    """Return whether the attempt that registered a version has succeeded. True if the attempt is not in the store."""
    key = attempt_of(version)
    return key is None or attempts.state(store, key) in (None, JobState.SUCCEEDED)
