"""Identify the rows of a dataset by the content of its files, so that a retry may use what an earlier attempt wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from shoal.data.parquet.listing import list_files
from shoal.data.parquet.packaged import PACKAGED_URI
from shoal.data.parquet.paths import resolve
from shoal.data.spec import DatasetSpec


def content_of(dataset: DatasetSpec) -> Sequence[object] | None:
    """Return values that differ if the files of a dataset have changed; None if a change could remain unnoticed.

    A file counts as changed if it was written again. Of rows that shoal has written for the job, such as those of a
    DataFrame, the content counts, because each submission writes them anew.
    """
    files = list_files(dataset.paths)
    # A staged or packaged file is a copy that the next attempt gets anew, at another path and time.
    if dataset.staging is not None or all(path.startswith(PACKAGED_URI) for path in dataset.paths):
        return [_digest(file.path) for file in files]
    return None if any(file.modified_ns is None for file in files) else files


def _digest(path: str) -> str:
    filesystem, inner = resolve(path)
    with filesystem.open_input_stream(inner) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
