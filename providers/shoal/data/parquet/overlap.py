"""Record which rows a dataset has, and find the rows of another dataset that are among them, from footers alone.

A file is known by its content as its footer describes it: a copy, a moved file and a symbolic link are the same file.
Rows that were written into another file are not recognised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.data.planning.splits import GroupSelection, Split

if TYPE_CHECKING:
    from shoal.data.parquet.source import ParquetSource


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """The rows of one file that a dataset has.

    Args:
        path: Path of the file when it was recorded.
        digest: Fingerprint of the file; see :meth:`ParquetSource.file_digest`.
        groups: For each row group, the selected rows.
    """

    path: str
    digest: str
    groups: tuple[GroupSelection, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON, without the row numbers: a split is stored by its weights, index and seed."""
        splits = [split for split, _ in self.groups[0].steps] if self.groups else []
        return {
            "path": self.path,
            "digest": self.digest,
            "splits": [[list(split.weights), split.index, split.seed] for split in splits],
            "groups": [[group.rows, group.key, [before for _, before in group.steps]] for group in self.groups],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RecordedFile:
        """Build a record from the result of :meth:`to_json`."""
        splits = [Split(tuple(weights), index, seed) for weights, index, seed in document["splits"]]
        return cls(
            document["path"],
            document["digest"],
            tuple(
                GroupSelection(rows, tuple(zip(splits, before, strict=True)), key)
                for rows, key, before in document["groups"]
            ),
        )


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file of which two datasets have the same rows.

    Args:
        path: Path of the file in the dataset that was checked.
        recorded: Path of the file in the recorded dataset.
        rows: Number of rows that both have.
    """

    path: str
    recorded: str
    rows: int


def record(source: ParquetSource) -> list[RecordedFile]:
    """Record which rows a source has.

    Args:
        source: The source; only its footers are read.

    Returns:
        One record for each file that has rows.
    """
    return [
        RecordedFile(
            footer.path,
            source.file_digest(footer.path),
            tuple(
                source.selection(footer.path, index) or GroupSelection(rows, (), "")
                for index, (rows, _) in enumerate(footer.groups)
            ),
        )
        for footer in source.footers()
        if footer.rows
    ]


def shared_rows(recorded: Iterable[RecordedFile], source: ParquetSource) -> list[SharedFile]:
    """Find the files of which a source has rows that were recorded.

    Args:
        recorded: Records of other sources.
        source: The source to check.

    Returns:
        The files with shared rows; empty if no row is shared. Parts of one random split share no rows.
    """
    known: dict[str, list[RecordedFile]] = {}
    for each in recorded:
        known.setdefault(each.digest, []).append(each)
    found = []
    for mine in record(source) if known else ():
        theirs = known.get(mine.digest, [])
        rows = sum(_shared(group, [each.groups[index] for each in theirs]) for index, group in enumerate(mine.groups))
        if rows:
            found.append(SharedFile(mine.path, theirs[0].path, rows))
    return found


def _shared(mine: GroupSelection, theirs: Sequence[GroupSelection]) -> int:
    """Return the number of rows of a row group that are in one selection and in at least one of the others."""
    import numpy as np

    theirs = [selection for selection in theirs if selection.selected]
    if not theirs or not mine.selected:
        return 0
    if any(not selection.steps for selection in theirs):
        return mine.selected
    taken = np.zeros(mine.rows, dtype=bool)
    for selection in theirs:
        taken[selection.indices()] = True
    return int(taken[mine.indices()].sum())
