"""Record which jobs use staged data, and write the rows of a job's SQL queries to files for its workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from shoal.data import staged_data
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.parquet.files import join, normalise
from shoal.data.sql import connection_variable, stage_select
from shoal.errors import DataError
from shoal.jobs.credentials import Secrets
from shoal.jobs.files import storage
from shoal.jobs.journal.attempts import Key
from shoal.jobs.spec import AnyJobSpec

Spec = TypeVar("Spec", bound=AnyJobSpec)


def locations(spec: AnyJobSpec, key: Key) -> dict[str, str]:
    """Return the directories to which an attempt writes the rows that its SQL queries return.

    The directories' names depend only on the spec and the attempt, so that another process can find and remove the
    directories after the driver was killed.
    """
    queries = list(dict.fromkeys(query for dataset in spec.datasets() if (query := dataset.query_key())))
    if not queries:
        return {}
    location = spec.run_config.artifact_location
    base = join(normalise(storage.root(location)), "staging") if location else staged_data.default_location()
    return {query: join(base, f"{key.submission_id}.{number}") for number, query in enumerate(queries)}


def staged(spec: Spec, key: Key, secrets: Secrets) -> Spec:
    """Run the queries of a spec's datasets, and write their rows into directories that the workers read.

    If several datasets have the same query, the query is run only once, and the datasets share the rows.
    """
    done: set[str] = set()
    where = locations(spec, key)

    def replaced(dataset: DatasetSpec) -> DatasetSpec:
        query = dataset.query_key()
        if query is None or dataset.sql is None or dataset.connection is None:
            return dataset
        if query not in done:
            url = secrets.environment.get(connection_variable(dataset.connection))
            if url is None:
                raise DataError(
                    f'the database connection "{dataset.connection}" has no URL in this job: set '
                    f"{connection_variable(dataset.connection)} in the environment of the process that submits the job"
                )
            base, _, name = where[query].rpartition("/")
            with staged_data.staged(base, name) as directory:
                rows = stage_select(dataset.sql, dataset.params or {}, url, directory)
            print(f'the query of connection "{dataset.connection}" returned {rows} rows', flush=True)
            done.add(query)
        return dataset.model_copy(update={"paths": (where[query],), "staging": where[query]})

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
