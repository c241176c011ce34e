"""Where rows come from: Parquet files, known by their footers."""

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

    Nothing is read until something is asked; the footers are then read once and kept, in pickled copies too, so that
    workers need not list the directory again (and all see the same files).

    Args:
        paths: Files, directories or globs, local or URIs; one or several. Hive partitions (``month=1/``) become
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
        # Column statistics serve checks and digests, in the driver alone, and may be a hundred times the rest.
        return {**self.__dict__, "_metadata": {}, "_by_path": {}}

    def footers(self) -> tuple[Footer, ...]:
        """The footers of all files, in natural order: paths as given, a directory's or glob's files sorted by path."""
        if self._footers is None:
            footers, self._metadata = read_footers(list_files(self.paths))
            self._footers = tuple(footers)
        return self._footers

    def footer(self, path: str) -> Footer:
        """The footer of one of the files, by canonical path.

        Raises:
            DataError: If the file is not one of the dataset's.
        """
        if not self._by_path:
            self._by_path = {footer.path: footer for footer in self.footers()}
        if path not in self._by_path:
            raise DataError(f"{path} does not belong to this dataset")
        return self._by_path[path]

    def metadata(self, path: str) -> Any:
        """The ``pyarrow.parquet.FileMetaData`` of one of the files."""
        if path not in self._metadata:
            self._metadata[path] = read_metadata(path)
        return self._metadata[path]

    def reference(self) -> Footer:
        """The file that says what the columns are: the first with rows (an empty frame's types are guesses)."""
        footers = self.footers()
        return next((footer for footer in footers if footer.rows), footers[0])

    def partition_fields(self) -> dict[str, pa.Field]:
        """The columns that come from the paths (``month=1/``), by name; one in the files themselves has precedence."""
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
        """The columns: those of the first file that has rows, then those of the partitions."""
        schema = self.reference().schema
        for field in self.partition_fields().values():
            schema = schema.append(field)
        return schema

    def row_groups(self) -> tuple[RowGroup, ...]:
        """All row groups in natural order, with the rows that belong to this source.

        Raises:
            DataError: If a random split left nothing.
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
                f"part {split.index} of random_split({list(split.weights)}) has no rows: the dataset has only {rows}"
            )
        return tuple(groups)

    def ranges(self) -> tuple[RowRange, ...]:
        """All rows in natural order, one range per row group that has any."""
        return tuple(RowRange(group.path, group.index, 0, group.rows) for group in self.row_groups() if group.rows)

    def num_rows(self) -> int:
        """Number of rows."""
        return sum(group.rows for group in self.row_groups())

    def split(self, weights: Sequence[float], seed: int) -> list[ParquetSource]:
        """Divides the rows at random, without reading or copying any.

        Args:
            weights: Relative sizes of the parts.
            seed: Seed of the draw.

        Returns:
            One source per weight; every row is in exactly one. Each part has its share of every row group, in row
            order.
        """
        parts = []
        for index in range(len(weights) or 1):
            part = ParquetSource(self.paths, (*self.splits, Split(tuple(map(float, weights)), index, seed)))
            part._footers, part._metadata = self._footers, self._metadata
            parts.append(part)
        return parts

    def read(self, ranges: Iterable[RowRange], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Reads row ranges; consecutive ones of a file share one open file.

        Args:
            ranges: The rows, in any order.
            columns: Columns to return, in this order; all by default.

        Yields:
            One table per range. Only one is held at a time.

        Raises:
            DataError: If a file is gone, corrupt, was changed since, or lacks a column; it names the file.
        """
        import pyarrow as pa

        wanted = list(self.schema().names if columns is None else columns)
        if not wanted:
            raise InvalidArgumentError("columns is empty: name at least one, or leave it out to read all")
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
        """Nulls of a column in a row group, as the footer's statistics give them.

        Args:
            path: One of the files.
            row_group: Number of the row group.
            column: A top-level column.

        Returns:
            Number of nulls in the whole row group (of a random split too), or None if the footer does not say.
        """
        footer = self.footer(path)
        if column not in footer.schema.names:
            values = dict(footer.partitions)
            return footer.groups[row_group][0] if values.get(column, "") is None else 0
        if str(footer.schema.field(column).type) == "null":  # Arrow writes no statistics for such a column.
            return footer.groups[row_group][0]
        group = self.metadata(path).row_group(row_group)
        for i in range(group.num_columns):
            chunk = group.column(i)
            if chunk.path_in_schema == column:
                stats = chunk.statistics if chunk.is_stats_set else None
                return stats.null_count if stats is not None and stats.has_null_count else None
        return None

    def digest(self) -> str:
        """A fingerprint of the dataset, made from footers.

        Returns:
            32 hex digits (MLflow takes 36). They stay the same when the files move or are renamed, and change with
            their sizes, row counts, schema, partition values, column statistics, order, or the split.
        """
        digest = hashlib.sha256()
        for footer in self.footers():
            digest.update(repr((footer.size, footer.groups, footer.partitions, str(footer.schema))).encode())
            metadata = self.metadata(footer.path)
            for row_group in range(metadata.num_row_groups):
                group = metadata.row_group(row_group)
                for column in range(group.num_columns):
                    digest.update(_chunk_key(group.column(column)).encode())
        for split in self.splits:
            digest.update(repr((split.weights, split.index, split.seed)).encode())
        return digest.hexdigest()[:32]

    def _selection(self) -> dict[tuple[str, int], GroupSelection] | None:
        if not self.splits:
            return None
        if self._selections is None:
            # By sorted path, so that a split does not depend on the order in which the files were given.
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
