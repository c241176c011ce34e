"""Record a model's training rows in the MLflow run, to check later whether a holdout contains any of these rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shoal.data.filters import TimeRange, within
from shoal.data.parquet.overlap import RecordedFile, SharedFile, record_rows, shared_mask, shared_rows
from shoal.jobs.mlflow.job_run import Run
from shoal.jobs.mlflow.promotion_decision import Recency

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shoal.data.connector import DataConnector

TAG = "shoal.training_rows"
"""Name of the tag that contains the URI of the record of a registered version's training rows."""

_FOLDER = "shoal/training_rows"
_EVALUATION_NAMES = ("eval", "holdout", "test", "val")


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
    import numpy as np

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
        order = mine[column].compare_ends(theirs[column])
        if order is not None:
            return Recency(column, mine[column].last, theirs[column].last, order, of_holdout=not challenger.times)
    return None


def _latest(times: Iterable[TimeRange]) -> dict[str, TimeRange]:
    """Return for each time column the range that ends last."""
    latest: dict[str, TimeRange] = {}
    for each in times:
        if each.column not in latest or each.compare_ends(latest[each.column]) == 1:
            latest[each.column] = each
    return latest


def is_training_data(name: str) -> bool:
    """Return True unless the dataset's name begins with "eval", "holdout", "test" or "val".

    shoal does not know how a training function uses its datasets, so it decides by the name.
    """
    return not name.lower().startswith(_EVALUATION_NAMES)


def store(run: Run, rows: TrainingRows) -> dict[str, str]:
    """Store a record of training rows in the MLflow run.

    Returns:
        Tags for the registered version that refer to the record; empty if no rows are known.
    """
    if not rows.files:
        return {}
    document = {"files": [file.to_json() for file in rows.files], "times": [asdict(each) for each in rows.times]}
    text = json.dumps(document, separators=(",", ":"))
    path = f"{_FOLDER}/{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    run.client.log_text(run.run_id, text, path)
    return {TAG: f"runs:/{run.run_id}/{path}"}


def load(run: Run, model: str, version: str) -> TrainingRows | None:
    """Load the record of the rows on which a registered version of a model was trained."""
    import mlflow

    uri = run.client.get_model_version(model, version).tags.get(TAG)
    if uri is None:
        return None
    try:
        document = json.loads(mlflow.artifacts.load_text(uri))
    except (mlflow.MlflowException, OSError) as error:
        # If MLflow cannot be reached, this request fails, too, and the rows do not count as unknown.
        run.client.get_run(run.run_id)
        print(
            f"the training rows of {model} version {version} are not known: {uri} cannot be read ({error})", flush=True
        )
        return None
    times = tuple(TimeRange(**each) for each in document["times"])
    return TrainingRows(tuple(RecordedFile.from_json(file) for file in document["files"]), times)
