"""Pin the versions of the tables that a job reads, so that all its attempts read the same rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shoal.data.dataset_spec import DatasetSpec, version_of
from shoal.errors import DataError
from shoal.jobs.spec import AnyJobSpec

Spec = TypeVar("Spec", bound=AnyJobSpec)


def pinned(spec: Spec, kept: Mapping[str, Any] | None, keep: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Spec:
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
    versions = keep({key: version_of(dataset) for key, dataset in unpinned.items()}) if kept is None else kept
    fixed = {
        key: dataset.model_copy(update={"version": versions[key][0], "as_of": None})
        for key, dataset in unpinned.items()
    }
    for key, dataset in fixed.items():
        if kept is not None and version_of(dataset)[1] != kept[key][1]:
            raise DataError(
                f"the table {dataset.paths[0]} was replaced by another table since the job's first attempt, which read "
                f"version {dataset.version}: submit the job again to read the new table"
            )
        print(f"this job and its retries read version {dataset.version} of the table {dataset.paths[0]}", flush=True)
    return spec.with_datasets(lambda dataset: fixed.get(_key(dataset), dataset))


def _key(dataset: DatasetSpec) -> str:
    return json.dumps([dataset.format, *dataset.paths, dataset.version, dataset.as_of])
