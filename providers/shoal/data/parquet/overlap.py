"""Record which rows a dataset contains, and find rows that two datasets have in common.

This module reads only footers, and the filter columns of row groups in which a filter may match only some of the rows.
A file is identified by a fingerprint of its footer. A copy of a file, a moved file and a symbolic link therefore count
as the same file, but rows that were written into a new file are not recognised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.data.filters import Filters, parse_filters
from shoal.data.parquet.source import ParquetSource
from shoal.data.planning import GroupSelection, Split
from shoal.errors import DataError
from shoal.lazy_imports import np


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """Record of which rows of one file belong to a dataset.

    Args:
        path: Path of the file when it was recorded.
        digest: Fingerprint of the file; see :meth:`ParquetSource.file_digest`.
        groups: For each row group, the rows that belong to the dataset. If the dataset has filters, only matching rows
            are counted.
        filters: Filters of the dataset; None without filters.
        deleted: Digest of the positions of the rows that the table has deleted; None if there are none.
    """

    path: str
    digest: str
    groups: tuple[GroupSelection, ...]
    filters: Filters | None = None
    deleted: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON data, with the weights, index and seed of each split instead of row numbers."""
        splits = [split for split, _ in self.groups[0].steps] if self.groups else []
        return {
            "path": self.path,
            "digest": self.digest,
            "splits": [[list(split.weights), split.index, split.seed] for split in splits],
            "groups": [[group.rows, group.key, [before for _, before in group.steps]] for group in self.groups],
            **({"filters": self.filters} if self.filters else {}),
            **({"deleted": self.deleted} if self.deleted else {}),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RecordedFile:
        """Create a record from the JSON data that :meth:`to_json` returned."""
        splits = [Split(tuple(weights), index, seed) for weights, index, seed in document["splits"]]
        return cls(
            document["path"],
            document["digest"],
            tuple(
                GroupSelection(rows, tuple(zip(splits, before, strict=True)), key)
                for rows, key, before in document["groups"]
            ),
            parse_filters(document["filters"]) if "filters" in document else None,
            document.get("deleted"),
        )


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file that belongs to two datasets, and the number of rows that the datasets share in this file.

    Args:
        path: Path of the file in the dataset that was checked.
        recorded: Path of the file in the recorded dataset.
        rows: Number of rows that both datasets contain.
    """

    path: str
    recorded: str
    rows: int


def record_rows(source: ParquetSource) -> list[RecordedFile]:
    """Record for each file of a source which rows of the file belong to the dataset."""
    selections = source.selections()
    return [
        RecordedFile(
            footer.path,
            source.file_digest(footer.path),
            tuple(
                selections[footer.path, index] if selections else GroupSelection(rows, (), "")
                for index, (rows, _) in enumerate(footer.groups)
            ),
            source.filters,
            _digest(footer.deleted),
        )
        for footer in source.used_footers()
    ]


def shared_rows(recorded: Iterable[RecordedFile], source: ParquetSource) -> list[SharedFile]:
    """Find the files of `source` that contain rows which also belong to other datasets.

    Returns:
        The files with shared rows; empty if no row is shared. Parts of one random split share no rows.
    """
    known: dict[str, list[RecordedFile]] = {}
    for each in recorded:
        known.setdefault(each.digest, []).append(each)
    found = []
    for mine in record_rows(source) if known else ():
        theirs = known.get(mine.digest, [])
        rows = sum(
            int(_shared(source, mine, theirs, index).sum()) for index in range(len(mine.groups) if theirs else 0)
        )
        if rows:
            found.append(SharedFile(mine.path, theirs[0].path, rows))
    return found


def shared_mask(recorded: Iterable[RecordedFile], source: ParquetSource) -> np.ndarray:
    """Return for each row of `source`, in the order in which the rows are read, whether the row also belongs to other
    datasets.
    """
    known = list(recorded)
    parts = []
    for mine in record_rows(source):
        theirs = [file for file in known if file.digest == mine.digest]
        parts += [_shared(source, mine, theirs, index) for index in range(len(mine.groups))]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=bool)


def _shared(source: ParquetSource, mine: RecordedFile, theirs: Sequence[RecordedFile], index: int) -> np.ndarray:
    """Return for each row of a row group that is recorded in `mine` whether it is also recorded in `theirs`."""
    selected = mine.groups[index].selected
    theirs = [file for file in theirs if file.groups[index].selected]
    if not theirs or not selected:
        return np.zeros(selected, dtype=bool)
    if any(file.filters is None and file.deleted is None and not file.groups[index].steps for file in theirs):
        return np.ones(selected, dtype=bool)
    taken = np.zeros(source.footer(mine.path).groups[index][0], dtype=bool)
    for file in theirs:
        taken[_positions(source, mine.path, file, index)] = True
    shared: np.ndarray = taken[_positions(source, mine.path, mine, index)]
    return shared


def _positions(source: ParquetSource, path: str, file: RecordedFile, index: int) -> np.ndarray:
    """Return the positions of those rows of a row group that belong to the recorded dataset.

    The recorded filters (`file.filters`) are applied to the file `path` of `source`, which has the same fingerprint as
    the recorded file.

    If the recorded filters cannot be applied to the file, for example because the partition column has another type in
    `source`, the positions of all rows are returned. Too many reported rows are better than a missed row. Rows that the
    table has deleted since, or had deleted then, are therefore reported, too.
    """
    group, footer = file.groups[index], source.footer(path)
    if file.filters is None and file.deleted is None:
        return group.indices()
    as_now = file.deleted == _digest(footer.deleted)
    try:
        matching = source.matching(path, index, file.filters, deleted=not as_now)
    except DataError:
        return np.arange(footer.groups[index][0])
    if as_now or file.deleted is None:
        positions: np.ndarray = matching[group.indices()]
        return positions
    # The numbers of a split count only the rows that were not deleted then, which are not known.
    return np.arange(footer.groups[index][0]) if group.steps else matching


def _digest(deleted: np.ndarray | None) -> str | None:
    return None if deleted is None else hashlib.sha256(deleted.astype(np.int64).tobytes()).hexdigest()[:32]
