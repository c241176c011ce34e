"""`ParquetSource`: Parquet files as a source of rows, planned and checked from their footers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from shoal.data.parquet.filesystems import normalise
from shoal.data.parquet.footers import Footer, read_footers, read_metadata
from shoal.data.parquet.listing import list_files, partition_type
from shoal.data.parquet.reading import read_ranges
from shoal.data.planning.row_groups import RowGroup, RowRange
from shoal.data.planning.splits import GroupSelection, Split, select
from shoal.errors import DataError, InvalidArgumentError
from shoal.redaction import redact

if TYPE_CHECKING:
    import pyarrow as pa

Path = str | os.PathLike[str]


class ParquetSource:
    """Parquet files, or a random part of their rows.

    The footers are read once, when they are first needed, and kept. A pickled copy includes the footers, so that
    workers do not list the directory again and all see the same files.

    Args:
        paths: One or several files, directories or globs: local paths or URIs. Hive partitions (``month=1/``) become
            columns.
        splits: Chain of random splits; see :meth:`split`.
    """

    def __init__(self, paths: Path | Iterable[Path], splits: Sequence[Split] = ()) -> None:
        several = list(paths) if isinstance(paths, Iterable) and not isinstance(paths, str) else [paths]
        if not several:
            raise InvalidArgumentError("a dataset needs at least one path")
        self.paths = tuple(normalise(path) for path in several)
        self.splits = tuple(splits)
        self._footers: tuple[Footer, ...] | None = None
        self._by_path: dict[str, Footer] = {}
        self._metadata: dict[str, Any] = {}
        self._selections: dict[tuple[str, int], GroupSelection] | None = None

    def __repr__(self) -> str:
        shown = ", ".join(self.paths[:3]) + (f", ... ({len(self.paths)})" if len(self.paths) > 3 else "")
        return redact(f"ParquetSource({shown}{', part of a split' if self.splits else ''})")

    def __getstate__(self) -> dict[str, Any]:
        # Column statistics may be a hundred times larger than the rest, and only the driver uses them (for checks and
        # digests).
        return {**self.__dict__, "_metadata": {}, "_by_path": {}}

    def footers(self) -> tuple[Footer, ...]:
        """Return the footers of all files, in the order of the paths; a directory's or glob's files by path."""
        if self._footers is None:
            footers, self._metadata = read_footers(list_files(self.paths))
            self._footers = tuple(footers)
        return self._footers

    def footer(self, path: str) -> Footer:
        """Return the footer of a file, by canonical path.

        Raises:
            DataError: If the file does not belong to the dataset.
        """
        if not self._by_path:
            self._by_path = {footer.path: footer for footer in self.footers()}
        if path not in self._by_path:
            raise DataError(f"{path} does not belong to this dataset")
        return self._by_path[path]

    def metadata(self, path: str) -> Any:
        """Return the ``pyarrow.parquet.FileMetaData`` of a file."""
        if path not in self._metadata:
            self._metadata[path] = read_metadata(path)
        return self._metadata[path]

    def reference(self) -> Footer:
        """Return the footer that defines the columns: that of the first file that has rows.

        The column types of an empty file are not used because an empty DataFrame's types are guesses.
        """
        footers = self.footers()
        return next((footer for footer in footers if footer.rows), footers[0])

    def partition_fields(self) -> dict[str, pa.Field]:
        """Return the partition columns (``month=1/``) by name, without those that are also stored in the files."""
        import pyarrow as pa

        values: dict[str, list[str | None]] = {}
        for footer in self.footers():
            for name, value in footer.partitions:
                values.setdefault(name, []).append(value)
        stored = set(self.reference().schema.names)
        return {
            name: pa.field(name, pa.type_for_alias(partition_type(texts)))
            for name, texts in values.items()
            if name not in stored
        }

    def schema(self) -> pa.Schema:
        """Return the columns of the first file that has rows, followed by the partition columns."""
        schema = self.reference().schema
        for field in self.partition_fields().values():
            schema = schema.append(field)
        return schema

    def row_groups(self) -> tuple[RowGroup, ...]:
        """Return all row groups in the order of the files, with the number of rows that belong to this source.

        Raises:
            DataError: If this source is a part of a random split and has no rows.
        """
        selections = self._selection()
        groups = []
        for footer in self.footers():
            for index, (rows, size) in enumerate(footer.groups):
                kept = selections[footer.path, index].selected if selections else rows
                groups.append(RowGroup(footer.path, index, kept, size * kept // rows if rows else 0))
        if self.splits and not any(group.rows for group in groups):
            split, rows = self.splits[-1], sum(footer.rows for footer in self.footers())
            raise DataError(
                f"part {split.index} of random_split({list(split.weights)}) has no rows: the whole dataset has only "
                f"{rows} row{'s' if rows != 1 else ''}"
            )
        return tuple(groups)

    def ranges(self) -> tuple[RowRange, ...]:
        """Return one range per row group that has rows, in the order of the files."""
        return tuple(RowRange(group.path, group.index, 0, group.rows) for group in self.row_groups() if group.rows)

    def num_rows(self) -> int:
        """Return the number of rows."""
        return sum(group.rows for group in self.row_groups())

    def split(self, weights: Sequence[float], seed: int) -> list[ParquetSource]:
        """Split the rows at random into parts, without reading or copying rows.

        Args:
            weights: Relative sizes of the parts.
            seed: Seed of the split.

        Returns:
            One source per weight. Every row is in exactly one source. Each source has its share of every row group,
            with the rows in their original order.
        """
        parts = []
        for index in range(len(weights) or 1):
            part = ParquetSource(self.paths, (*self.splits, Split(tuple(map(float, weights)), index, seed)))
            part._footers, part._metadata = self._footers, self._metadata
            parts.append(part)
        return parts

    def read(self, ranges: Iterable[RowRange], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read row ranges. Consecutive ranges of a file are read with the file opened once.

        Args:
            ranges: Row ranges to read, in any order.
            columns: Columns to return, in this order; all by default.

        Yields:
            One table per range. Only one table is in memory at a time.

        Raises:
            InvalidArgumentError: If `columns` is empty.
            DataError: If a file is gone, corrupt, has changed since the plan was made, or lacks a column. The message
                names the file.
        """
        import pyarrow as pa

        wanted = list(self.schema().names if columns is None else columns)
        if not wanted:
            raise InvalidArgumentError(
                "columns is empty: name at least one column, or omit the argument to read all columns"
            )
        fields = self.partition_fields()
        selections = self._selection()
        for path, parts in groupby(ranges, key=lambda part: part.path):
            footer = self.footer(path)
            values = {
                name: pa.scalar(None if text is None else _typed(text, fields[name]), fields[name].type)
                for name, text in footer.partitions
                if name in fields
            }
            indices_of = None
            if selections is not None:
                indices_of = lambda group, path=path: selections[path, group].indices()  # noqa: E731
            yield from read_ranges(footer, list(parts), wanted, values, indices_of)

    def null_count(self, path: str, row_group: int, column: str) -> int | None:
        """Return the number of nulls of a column in a row group, from the footer's statistics.

        Args:
            path: Path of one of the files.
            row_group: Index of the row group, from 0.
            column: Name of a top-level column.

        Returns:
            Number of nulls in the whole row group, even for a part of a random split; None if the footer has no
            statistics for it.
        """
        footer = self.footer(path)
        if column not in footer.schema.names:
            values = dict(footer.partitions)
            return footer.groups[row_group][0] if values.get(column, "") is None else 0
        if str(footer.schema.field(column).type) == "null":  # Arrow writes no statistics for a column of this type.
            return footer.groups[row_group][0]
        group = self.metadata(path).row_group(row_group)
        for i in range(group.num_columns):
            chunk = group.column(i)
            if chunk.path_in_schema == column:
                stats = chunk.statistics if chunk.is_stats_set else None
                return stats.null_count if stats is not None and stats.has_null_count else None
        return None

    def digest(self) -> str:
        """Return a fingerprint of the dataset, computed from the footers.

        Returns:
            32 hex digits (MLflow allows 36). The fingerprint does not change when files are moved or renamed. It
            changes with the files' sizes, row counts, schemas, partition values, column statistics and order, and with
            the split.
        """
        digest = hashlib.sha256()
        for footer in self.footers():
            for part in self._content(footer):
                digest.update(part.encode())
        for split in self.splits:
            digest.update(repr((split.weights, split.index, split.seed)).encode())
        return digest.hexdigest()[:32]

    def file_digest(self, path: str) -> str:
        """Return a fingerprint of one file, computed from its footer, wherever the file is and whatever its name.

        Args:
            path: Canonical path of one of the files.

        Returns:
            32 hex digits.
        """
        digest = hashlib.sha256()
        for part in self._content(self.footer(path)):
            digest.update(part.encode())
        return digest.hexdigest()[:32]

    def selection(self, path: str, row_group: int) -> GroupSelection | None:
        """Return which rows of a row group belong to this part of a random split; None if all rows do.

        Args:
            path: Canonical path of one of the files.
            row_group: Index of the row group, from 0.
        """
        selections = self._selection()
        return None if selections is None else selections[path, row_group]

    def _content(self, footer: Footer) -> Iterator[str]:
        """Yield what the footer says about the rows of a file."""
        yield repr((footer.size, footer.groups, footer.partitions, str(footer.schema)))
        metadata = self.metadata(footer.path)
        for row_group in range(metadata.num_row_groups):
            group = metadata.row_group(row_group)
            for column in range(group.num_columns):
                yield _chunk_key(group.column(column))

    def _selection(self) -> dict[tuple[str, int], GroupSelection] | None:
        if not self.splits:
            return None
        if self._selections is None:
            # Sorted by path, so that a split does not depend on the order in which the user listed the files.
            footers = sorted(self.footers(), key=lambda footer: footer.path)
            keys = [(i, footer.path, group) for i, footer in enumerate(footers) for group in range(len(footer.groups))]
            rows = [rows for footer in footers for rows, _ in footer.groups]
            chosen = select(rows, [f"{i}/{group}" for i, _, group in keys], self.splits)
            self._selections = {(path, group): one for (_, path, group), one in zip(keys, chosen, strict=True)}
        return self._selections


def _typed(text: str, field: pa.Field) -> int | str:
    import pyarrow as pa

    return int(text) if pa.types.is_integer(field.type) else text


def _chunk_key(chunk: Any) -> str:
    key = f"{chunk.path_in_schema}:{chunk.total_compressed_size}:{chunk.total_uncompressed_size}"
    stats = chunk.statistics if chunk.is_stats_set else None
    if stats is None:
        return key
    return f"{key}:{stats.null_count}:{stats.min_raw!r}:{stats.max_raw!r}" if stats.has_min_max else key
