"""Pin the versions of the tables and the newest times of the datasets that a job reads, so that all its attempts read
the same rows, and check whether these rows are as expected."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeVar

from shoal.data.connector import DataConnector
from shoal.data.dataset_spec import DatasetSpec, version_of
from shoal.data.time_split import newest_time
from shoal.errors import DataError
from shoal.jobs.spec import AnyJobSpec

Spec = TypeVar("Spec", bound=AnyJobSpec)

Keep = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Function that stores choices for later attempts, unless an earlier one has stored them, and returns those stored."""


def pinned(spec: Spec, kept: Mapping[str, Any] | None, keep: Keep) -> Spec:
    """Return a spec in which each table has a version.

    Args:
        spec: Spec of the job. A table may have no version, a time (`as_of`), or the name of a branch.
        kept: Version and id of each such table, as an earlier attempt has found them; None if there are none.
        keep: Function that stores the versions for later attempts, and returns the stored ones.

    Raises:
        DataError: Another table is in the place of one that an earlier attempt has read.
    """
    # The version of an Iceberg table may be the name of a branch or tag, also of digits, which may be moved.
    tables = (
        dataset
        for dataset in spec.datasets()
        if dataset.is_table and (dataset.version is None or dataset.format == "iceberg")
    )
    unpinned = {_key(dataset): dataset for dataset in tables}
    if not unpinned:
        return spec
    if kept is None or not unpinned.keys() <= kept.keys():
        kept, versions = None, keep({key: version_of(dataset) for key, dataset in unpinned.items()})
    else:
        versions = kept

    def fixed(dataset: DatasetSpec) -> DatasetSpec:
        # Several datasets may select other rows of one table.
        version = versions.get(_key(dataset)) if _key(dataset) in unpinned else None
        return dataset if version is None else dataset.model_copy(update={"version": version[0], "as_of": None})

    for key, dataset in unpinned.items():
        table = fixed(dataset)
        if kept is not None and version_of(table)[1] != kept[key][1]:
            raise DataError(
                f"the table {table.paths[0]} was replaced by another table since the job's first attempt, which read "
                f"version {table.version}: submit the job again to read the new table"
            )
        print(f"this job and its retries read version {table.version} of the table {table.paths[0]}", flush=True)
    return spec.with_datasets(fixed)


def divided(spec: Spec, keep: Keep) -> Spec:
    """Return a spec in which each part of a dataset that is divided by time has its newest time.

    Datasets of the same files that are divided by the same column have the same time, so that no row is in two parts:
    the newest among the rows that the filters of at least one of them select.
    """
    alike: dict[str, list[DatasetSpec]] = {}
    for dataset in spec.datasets():
        if dataset.time_split is not None and dataset.time_split.until is None:
            alike.setdefault(_time_key(dataset), []).append(dataset)
    if not alike:
        return spec
    times = dict(keep({}))
    for key, datasets in alike.items():
        if key not in times:
            every = [dataset.filters for dataset in datasets]
            filters = None if None in every else tuple(dict.fromkeys(chain.from_iterable(filter(None, every))))
            rows = datasets[0].whole().model_copy(update={"filters": filters})
            times = dict(keep({key: newest_time(DataConnector.from_spec(rows).source, json.loads(key)[1])}))
        print(f"the newest {json.loads(key)[1]} in {datasets[0].origin[0]} is {times[key]}", flush=True)

    def replaced(dataset: DatasetSpec) -> DatasetSpec:
        split = dataset.time_split
        if split is None or split.until is not None:
            return dataset
        return dataset.model_copy(update={"time_split": split.model_copy(update={"until": times[_time_key(dataset)]})})

    return spec.with_datasets(replaced)


def check_expectations(spec: AnyJobSpec, created_at: float, keep: Keep) -> None:
    """Check whether the rows of all datasets of a job are as expected.

    Args:
        spec: The spec, whose rows are pinned and copied.
        created_at: Time at which this attempt was created, in seconds since the epoch.
        keep: Function that stores the time of the first attempt, so that all attempts measure the same age.

    Raises:
        DataError: The rows are not as expected.
    """
    expecting = {each.model_dump_json(): each for each in spec.datasets() if each.expect is not None}
    now = keep({"created_at": created_at})["created_at"] if expecting else created_at
    for dataset in expecting.values():
        assert dataset.expect is not None
        source = DataConnector.from_spec(dataset).source
        dataset.expect.check_rows(source, dataset.origin[0], now)
        print(f"the {source.num_rows():,} rows of {dataset.origin[0]} are as expected", flush=True)


def _time_key(dataset: DatasetSpec) -> str:
    assert dataset.time_split is not None
    return json.dumps([dataset.source_key(), dataset.time_split.column])


def _key(dataset: DatasetSpec) -> str:
    return json.dumps([dataset.format, *dataset.paths, dataset.version, dataset.as_of])
