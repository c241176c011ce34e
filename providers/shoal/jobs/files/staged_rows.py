"""Record which jobs use staged data, and copy the rows of a job's queries, CSV and JSON files, and of datasets with the
option `stage`, to Parquet files for its workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from shoal.data import staged_data
from shoal.data.connections import connection_variable
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.parquet.files import join, normalise
from shoal.data.row_copies import copy_rows
from shoal.errors import DataError
from shoal.jobs.credentials import Secrets
from shoal.jobs.files import storage
from shoal.jobs.journal.attempts import Key
from shoal.jobs.spec import AnyJobSpec

Spec = TypeVar("Spec", bound=AnyJobSpec)


def locations(spec: AnyJobSpec, key: Key) -> dict[str, str]:
    """Return the directories to which an attempt copies the rows of its datasets.

    The directories' names depend only on the spec and the attempt, so that another process can find and remove the
    directories after the driver was killed.
    """
    if not (keys := list(dict.fromkeys(each.source_key() for each in spec.datasets() if each.is_copied))):
        return {}
    location = spec.run_config.artifact_location
    base = join(normalise(storage.root(location)), "staging") if location else staged_data.default_location()
    return {source: join(base, f"{key.submission_id}.{number}") for number, source in enumerate(keys)}


def staged(spec: Spec, key: Key, secrets: Secrets) -> Spec:
    """Copy the rows of a spec's datasets, if they are not read in place, into directories that the workers read.

    If several datasets have the same query or files, the rows are copied only once, and the datasets share the copy,
    also those that would be read in place: otherwise rows that a holdout shares with the training would not be found.
    """
    done: set[str] = set()
    where = locations(spec, key)
    # The champion may have other input columns than the job's model.
    whole = spec.register_as.holdout.source_key() if spec.register_as else None

    def replaced(dataset: DatasetSpec) -> DatasetSpec:
        source = dataset.source_key()
        if source not in where:
            return dataset
        if source not in done:
            url = secrets.environment.get(connection_variable(dataset.connection or ""))
            if dataset.connection is not None and url is None:
                raise DataError(
                    f'the database connection "{dataset.connection}" has no URL in this job: set '
                    f"{connection_variable(dataset.connection)} in the environment of the process that submits the job"
                )
            base, _, name = where[source].rpartition("/")
            with staged_data.staged(base, name) as directory:
                columns = None if source == whole else spec.used_columns()
                rows = copy_rows(dataset, url, directory, columns)
            print(f"copied {rows} rows of {dataset.origin[0]}", flush=True)
            done.add(source)
        is_staged = dataset.stage or not dataset.is_copied
        return dataset.model_copy(update={"staging": where[source], "stage": is_staged})

    return spec.with_datasets(replaced)


def give_up(key: Key, locations: Iterable[str]) -> None:
    """Record in directories of staged data that an attempt has ended, and remove the directories that have no other
    user.

    Directories that no longer exist are ignored.
    """
    for location in locations:
        staged_data.unclaim(location, key.submission_id)
        staged_data.discard_unused(location)


def discard(locations: Iterable[str]) -> None:
    """Remove the directories of staged data to which an ended attempt has written the rows of its SQL queries."""
    for location in locations:
        staged_data.discard(location)
