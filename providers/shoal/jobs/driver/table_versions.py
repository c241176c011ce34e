"""Pin the versions of the tables that a job reads, so that all its attempts read the same rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shoal.data.dataset_spec import DatasetSpec
from shoal.jobs.spec import AnyJobSpec

Spec = TypeVar("Spec", bound=AnyJobSpec)


def pinned(spec: Spec, kept: Mapping[str, Any] | None, keep: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Spec:
    """Return a spec in which each table has a version.

    Args:
        spec: Spec of the job. A table may have no version, a time (`as_of`), or the name of a branch.
        kept: Version of each such table, as an earlier attempt has found it; None if there is none.
        keep: Function that stores the versions for later attempts, and returns the stored ones.
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
    if kept is None:
        kept = keep({key: _newest(dataset) for key, dataset in unpinned.items()})
    for key, dataset in unpinned.items():
        print(f"this job reads version {kept[key]} of the table {dataset.paths[0]}, in all its attempts", flush=True)

    def replaced(dataset: DatasetSpec) -> DatasetSpec:
        if _key(dataset) not in unpinned:
            return dataset
        return dataset.model_copy(update={"version": kept[_key(dataset)], "as_of": None})

    return spec.with_datasets(replaced)


def _newest(dataset: DatasetSpec) -> int | str:
    from shoal.data.connector import DataConnector

    return DataConnector.from_spec(dataset).source.lister.find_version()


def _key(dataset: DatasetSpec) -> str:
    return json.dumps([dataset.format, *dataset.paths, dataset.version, dataset.as_of])
