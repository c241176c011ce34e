"""Define `ParquetSource`, which lists Parquet files, reads their footers, and reads rows by ranges (of one row group);
find the groups of rows, such as the documents of one query, that must stay on one worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from itertools import chain, groupby
from typing import Any

from shoal.data.filters import Filters, columns_of
from shoal.data.parquet.files import WHOLE_NUMBER, DataFile, list_files, normalise, partition_type, partition_values
from shoal.data.parquet.filter_matching import BATCH_ROWS, Matcher, count_rows, matches_value, matching_rows
from shoal.data.parquet.footers import (
    THREADS,
    Footer,
    changed,
    footer_texts,
    open_planned,
    read_footers,
    rows_digest,
    stored_description,
    texts_digest,
    wrap_read_errors,
)
from shoal.data.parquet.schema import common_schema, distinct, first_with_rows, to_schema, widened
from shoal.data.planning import GroupSelection, RowGroup, RowRange, Split, select
from shoal.errors import DataError, InvalidArgumentError
from shoal.lazy_imports import np, pa, pc
from shoal.secrets.redaction import redact


def read_ranges(
    footer: Footer,
    ranges: Sequence[RowRange],
    columns: Sequence[str],
    partitions: dict[str, pa.Scalar],
    indices_of: Callable[[int], np.ndarray] | None,
    matcher: Matcher | None = None,
    matching: Sequence[int] | None = None,
) -> Iterator[pa.Table]:
    """Read row ranges (rows of one row group) of one file. The file is opened only once."""
    with open_planned(footer) as file:
        stored = [name for name in columns if name not in partitions]
        names = file.schema_arrow.names
        for name in stored:
            if name not in names:
                raise DataError(
                    f'{footer.path} has no column "{name}": write this column into all files, or do not read it'
                )
        for part in ranges:
            with wrap_read_errors(footer.path, f"row group {part.row_group}"):
                rows = footer.groups[part.row_group][0]
                found = rows if matching is None else matching[part.row_group]
                # Of a split, all matching rows of the row group are read, and those of the range are taken from them.
                wanted = part if indices_of is None else RowRange(part.path, part.row_group, 0, found)
                if wanted.rows == rows:
                    table = file.read_row_group(part.row_group, columns=stored)
                else:
                    table = _read_part(file, footer, wanted, stored, matcher if found < rows else None)
                if indices_of is not None:
                    table = table.take(indices_of(part.row_group)[part.positions()])
                table = table.replace_schema_metadata(None)
                # Pass the number of rows to `_append`, because a table without columns does not know its number of
                # rows.
                for name, value in partitions.items():
                    if name in columns:
                        table = _append(table, name, value, part.rows)
                table = table.select(list(columns))
            yield table
            # Without `del`, this table would stay in memory while the next row group is decoded.
            del table


def take_rows(tables: Iterable[pa.Table], limit: int | None) -> pa.Table:
    """Concatenate tables until the result has `limit` rows. The remaining tables are not read."""
    kept: list[pa.Table] = []
    rows = 0
    for table in tables:
        kept.append(table if limit is None else table.slice(0, limit - rows))
        rows += kept[-1].num_rows
        if limit is not None and rows >= limit:
            break
    return pa.concat_tables(kept)


def _append(table: pa.Table, name: str, value: pa.Scalar, rows: int) -> pa.Table:
    column = pa.repeat(value, rows) if value.is_valid else pa.nulls(rows, value.type)
    return table.append_column(name, column) if table.num_columns else pa.table({name: column})


def _read_part(
    file: Any, footer: Footer, part: RowRange, columns: list[str], matcher: Matcher | None = None
) -> pa.Table:
    """Decode a row group in small batches, and keep only the rows of one range, so that the other rows do not take
    memory.

    With a matcher, the row numbers of the range count only the rows that match the filters.
    """
    wanted = list(dict.fromkeys([*columns, *(matcher.columns if matcher else ())]))
    if not wanted:
        return pa.table({})
    positions = None if part.deal is None else part.positions()
    kept = []
    at = 0
    for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[part.row_group], columns=wanted):
        found = batch.filter(matcher.mask(batch)) if matcher else batch
        if positions is not None:
            kept.append(found.filter(_mask(positions, at, found.num_rows)))
        else:
            start, stop = max(part.start - at, 0), min(part.stop - at, found.num_rows)
            if start < stop:
                kept.append(found.slice(start, stop - start))
        at += found.num_rows
        if at >= part.stop:
            break
    if at < part.stop:
        raise changed(footer, f"{part.stop} rows of row group {part.row_group} matched the filters then, {at} now")
    return pa.Table.from_batches(kept).select(columns)


def _mask(positions: np.ndarray, start: int, rows: int) -> pa.Array:
    """Return an Arrow array of booleans ``[rows]`` that is true for each row whose number, plus `start`, is one of the
    ascending `positions`."""
    mask = np.zeros(rows, dtype=bool)
    first, last = np.searchsorted(positions, (start, start + rows))
    mask[positions[first:last] - start] = True
    # The shorter `pa.array(mask)` would import pandas, which is slow.
    return pa.Array.from_buffers(pa.bool_(), rows, [None, pa.py_buffer(np.packbits(mask, bitorder="little"))])


Path = str | os.PathLike[str]


class ParquetSource:
    """Rows of Parquet files: all rows, only the rows that match filters, or a part of a random split of these rows.

    The footers are read once, when they are first needed, and kept. A pickled copy includes the footers, so that
    workers do not list the directory again and all see the same files.

    Args:
        paths: One or several files, directories or globs: local paths or URIs. Hive partitions (``month=1/``) become
            columns.
        splits: Random splits that are applied one after the other; see :meth:`split`.
        filters: Filters of the rows, which are applied before the splits; None for all rows. See
            :mod:`shoal.data.parquet.filter_matching`.
        by_value: Whether :meth:`digest` is computed from the values of the rows even if there are no filters.

    Attributes:
        staged_copy: The :class:`shoal.data.staged_data.StagedCopy` that prevents the removal of staged files
            while this source exists; None if this process does not hold staged files.
        staged: Whether shoal itself wrote the files, from a DataFrame, a query or another dataset.
    """

    def __init__(
        self,
        paths: Path | Iterable[Path],
        splits: Sequence[Split] = (),
        filters: Filters | None = None,
        *,
        by_value: bool = False,
    ) -> None:
        several = list(paths) if isinstance(paths, Iterable) and not isinstance(paths, str) else [paths]
        if not several:
            raise InvalidArgumentError("a dataset needs at least one path")
        self.paths = tuple(normalise(path) for path in several)
        self.splits = tuple(splits)
        self.filters = filters
        self.staged_copy: Any = None
        self.staged = by_value
        self._by_value = by_value
        self._footers: tuple[Footer, ...] | None = None
        self._by_path: dict[str, Footer] = {}
        self._metadata: dict[str, Any] = {}
        self._partition_types: dict[str, str] = {}
        self._matching: dict[str, tuple[int, ...]] | None = None
        self._selections: dict[tuple[str, int], GroupSelection] | None = None
        self._schema: pa.Schema | None = None
        self._index_gaps: tuple[str, ...] | None = None

    @property
    def place(self) -> str:
        """Where the rows are, for messages: the file, folder or glob, or the number of those that were given."""
        return (
            self.paths[0] if len(self.paths) == 1 else f"{len(self.paths)} paths, of which the first is {self.paths[0]}"
        )

    def __repr__(self) -> str:
        shown = ", ".join(self.paths[:3]) + (f", ... ({len(self.paths)})" if len(self.paths) > 3 else "")
        rows = (", filtered" if self.filters else "") + (", part of a split" if self.splits else "")
        return redact(f"ParquetSource({shown}{rows})")

    def __getstate__(self) -> dict[str, Any]:
        # The metadata with the column statistics is not pickled, because it may be a hundred times larger than the rest
        # of the source. Only the driver process uses the metadata, for checks and fingerprints.
        return {**self.__dict__, "_metadata": {}, "_by_path": {}}

    def footers(self) -> tuple[Footer, ...]:
        """Read the footers of all files at the first call, and return them in the order of the paths.

        The files of a directory or glob are sorted by path. The footers of files whose partition values (``month=1/``)
        do not match the filters are not read. At least one footer is always read, because it contains the columns.
        """
        if self._footers is None:
            files = list_files(self.paths)
            texts: dict[str, list[str | None]] = {}
            for file in files:
                for name, value in partition_values(file.path).items():
                    texts.setdefault(name, []).append(value)
            self._partition_types = {name: partition_type(values) for name, values in texts.items()}
            footers, self._metadata = read_footers(self._files_to_read(files))
            self._footers = tuple(footers)
        return self._footers

    def used_footers(self) -> list[Footer]:
        """Return the footers of the files in which at least one row matches the filters. Without filters, every row
        matches.

        Splits are not taken into account, so a split may select no row of a returned file.
        """
        if self.filters is None:
            return [footer for footer in self.footers() if footer.rows]
        matching = self._matching_counts(self.filters)
        return [footer for footer in self.footers() if any(matching[footer.path])]

    def footer(self, path: str) -> Footer:
        """Return the footer of the file with the given path or URI."""
        if not self._by_path:
            self._by_path = {footer.path: footer for footer in self.footers()}
        if path not in self._by_path:
            raise DataError(f"{path} does not belong to this dataset")
        return self._by_path[path]

    def metadata(self, path: str) -> Any:
        """Return the metadata of a file with its column statistics, as a ``pyarrow.parquet.FileMetaData``."""
        if path not in self._metadata:
            with open_planned(self.footer(path)) as file:
                self._metadata[path] = file.metadata
        return self._metadata[path]

    def reference(self) -> Footer:
        """Return the footer that defines the columns of the dataset: the footer of the first file that has rows.

        The column types of an empty file are not used, because pandas guesses the types of an empty DataFrame.
        """
        return next(iter(self.used_footers()), None) or first_with_rows(self.footers())

    def partition_fields(self) -> dict[str, pa.Field]:
        """Return the columns that exist only as partition directories (``month=1/``) and not in the files, as a dict by
        name."""
        stored = first_with_rows(self.footers()).schema.names
        types = {name: type_ for name, type_ in self._partition_types.items() if name not in stored}
        return {name: pa.field(name, pa.type_for_alias(type_)) for name, type_ in types.items()}

    def file_of_type(self, name: str) -> str:
        """Return the path of the file that decides the type of a column: for a partition column of text, the first file
        whose value is not a whole number."""
        for footer in self.used_footers() if name in self.partition_fields() else ():
            text = dict(footer.partitions).get(name)
            if text is not None and not WHOLE_NUMBER.fullmatch(text):
                return footer.path
        return self.reference().path

    def padded_partition(self, name: str) -> str | None:
        """Return the path of the first file whose whole number in the path has leading zeros (``month=01/``), or None.

        As a text, such a value is another one than its number.
        """
        for footer in self.used_footers():
            text = dict(footer.partitions).get(name)
            if text is not None and text != str(int(text)):
                return footer.path
        return None

    def partition_value(self, path: str, name: str) -> int | str | None:
        """Return the value of a partition column (``month=1/``) for one file, as an object of the column's type."""
        text = dict(self.footer(path).partitions)[name]
        return None if text is None else _typed(text, self.partition_fields()[name])

    def schema(self) -> pa.Schema:
        """Return the schema of the dataset: the columns of the first file that has rows, then the partition columns.

        If files store a column in different types, the column has the type that holds the values of all files, such as
        int64 for int32 and int64.
        """
        if self._schema is None:
            schema = self.reference().schema
            for footer in distinct(self.used_footers()):
                schema = widened(schema, footer.schema)
            for name in self.index_gaps():
                i = schema.get_field_index(name)
                schema = schema.set(i, schema.field(i).with_nullable(True))
            for field in self.partition_fields().values():
                schema = schema.append(field)
            self._schema = schema
        return self._schema

    def index_gaps(self) -> tuple[str, ...]:
        """Return the columns of the index that pandas has stored in the first file, and that some file does not have.

        pandas stores an index only if it is not 0, 1, 2, ..., so the files of one table may differ. As in
        ``pandas.read_parquet``, the index is null for the rows of a file without it.
        """
        if self._index_gaps is None:
            reference = self.reference()
            kept = set(reference.schema.names).intersection(*(footer.schema.names for footer in self.used_footers()))
            missing = set(reference.schema.names) - kept
            names = stored_description(self.metadata(reference.path)).get("index_columns", []) if missing else []
            self._index_gaps = tuple(name for name in names if isinstance(name, str) and name in missing)
        return self._index_gaps

    def row_groups(self) -> tuple[RowGroup, ...]:
        """Return all row groups in the order of the files.

        The number of rows of each row group counts only the rows that the filters and splits select.
        """
        selections = self._selection()
        groups = []
        for footer in self.footers():
            for index, (rows, _) in enumerate(footer.groups):
                kept = selections[footer.path, index].selected if selections else rows
                groups.append(RowGroup(footer.path, index, kept))
        if self.splits and not any(group.rows for group in groups):
            split, rows = self.splits[-1], sum(selection.rows for selection in (selections or {}).values())
            raise DataError(
                f"part {split.index} of random_split({list(split.weights)}) has no rows: the whole dataset has only "
                f"{rows} row{'s' if rows != 1 else ''}; give this part a larger weight"
            )
        return tuple(groups)

    def ranges(self) -> tuple[RowRange, ...]:
        """Return the row ranges of the whole dataset: one per row group that has rows, in the order of the files."""
        return tuple(RowRange(group.path, group.index, 0, group.rows) for group in self.row_groups() if group.rows)

    def num_rows(self) -> int:
        """Return the number of rows of this source, over all row groups."""
        return sum(group.rows for group in self.row_groups())

    def split(self, weights: Sequence[float], seed: int) -> list[ParquetSource]:
        """Split the rows at random into parts, without reading or copying rows."""
        parts = []
        for index in range(len(weights) or 1):
            part = copy(self)
            part.splits = (*self.splits, Split(tuple(map(float, weights)), index, seed))
            part._metadata, part._selections = self._metadata, None
            parts.append(part)
        return parts

    def read(self, ranges: Iterable[RowRange], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read row ranges (rows of one row group), and yield one table per range.

        If successive ranges are in the same file, the file is opened only once.
        """
        wanted = list(self.schema().names if columns is None else columns)
        if not wanted:
            raise InvalidArgumentError(
                "columns is empty: name at least one column, or omit the argument to read all columns"
            )
        fields = self.partition_fields()
        selections = self._selection()
        common = {field.name: field for field in self.schema()}
        for path, parts in groupby(ranges, key=lambda part: part.path):
            footer = self.footer(path)
            values = _partitions_of(footer, fields)
            indices_of = None
            if self.splits and selections is not None:
                indices_of = lambda group, path=path: selections[path, group].indices()  # noqa: E731
            matcher = None if self.filters is None else Matcher(self.filters, footer, values)
            matching = None if self.filters is None else self._matching_counts(self.filters)[path]
            gaps = {name: pa.scalar(None, common[name].type) for name in self.index_gaps()}
            constants = values | {name: null for name, null in gaps.items() if name not in footer.schema.names}
            for table in read_ranges(footer, list(parts), wanted, constants, indices_of, matcher, matching):
                yield to_schema(table, common, path)
                # Without `del`, this table would stay in memory while the next row group is decoded.
                del table

    def null_count(self, path: str, row_group: int, column: str) -> int | None:
        """Return the number of nulls of a column in a row group, from the footer's statistics.

        Returns:
            Number of nulls in the whole row group, even for a part of a random split. None if the footer has no
            statistics for the column, or if a filter may exclude the rows with nulls.
        """
        footer = self.footer(path)
        every = footer.groups[row_group][0]
        nulls: int | None
        if column not in footer.schema.names:
            nulls = every if dict(footer.partitions).get(column) is None else 0
        # Arrow writes no statistics for a column of type null. Such a column contains only nulls, so its number of
        # nulls is the number of rows.
        elif str(footer.schema.field(column).type) == "null":
            nulls = every
        else:
            stats = _statistics(self.metadata(path), row_group, column)
            nulls = stats.null_count if stats is not None and stats.has_null_count else None
        if nulls and nulls != every and self.filters is not None:
            return nulls if self._matching_counts(self.filters)[path][row_group] == every else None
        return nulls

    def bounds(self, path: str, column: str) -> Iterator[tuple[Any, Any]]:
        """Yield the smallest and the largest value of a column in each row group of a file that has such statistics."""
        metadata = self.metadata(path)
        for row_group in range(metadata.num_row_groups):
            stats = _statistics(metadata, row_group, column)
            if stats is not None and stats.has_min_max:
                yield stats.min, stats.max

    def digest(self) -> str:
        """Return a fingerprint of the dataset, which is computed from the footers, or from the rows if there are
        filters.

        If the dataset has filters, the values of all matching rows are read. Equal rows then have the same fingerprint
        even if they are in other files; see :func:`shoal.data.parquet.footers.rows_digest`. Columns that are missing or
        have another kind of type in some file are left out. If no column is left, the fingerprint is computed from the
        footers and the filters.
        """
        if self._by_value or self.filters is not None:
            schema = common_schema(self.schema(), self.partition_fields(), self.used_footers())
            if schema.names:
                return rows_digest(self.read(self.ranges(), schema.names), schema)
        options = [repr((split.weights, split.index, split.seed)) for split in self.splits]
        options += [repr(self.filters)] if self.filters is not None else []
        texts = (footer_texts(footer, self.metadata(footer.path)) for footer in self.footers())
        return texts_digest(chain(chain.from_iterable(texts), options))

    def write_times(self) -> tuple[int | None, ...]:
        """Return the time of each file's last change, in nanoseconds since the epoch.

        The result is empty if `digest` is computed from the rows.

        The time of a file is None if the filesystem does not report it.
        """
        if self._by_value or self.filters is not None:
            return ()
        return tuple(file.modified_ns for file in list_files(self.paths))

    def file_digest(self, path: str) -> str:
        """Compute a fingerprint of one file from the file's footer.

        The fingerprint does not depend on the file's name or folder.
        """
        return texts_digest(footer_texts(self.footer(path), self.metadata(path)))

    def selection(self, path: str, row_group: int) -> GroupSelection | None:
        """Return the rows of a row group that remain after filters and random splits, or None if the source has
        neither.

        If the source has filters, only matching rows are counted, and the splits select from these rows.
        """
        selections = self._selection()
        return None if selections is None else selections[path, row_group]

    def matching(self, path: str, row_group: int, filters: Filters) -> np.ndarray:
        """Return the positions of the rows of a row group that match the given filters.

        The source's own filters are ignored.
        """
        footer = self.footer(path)
        matcher = Matcher(filters, footer, _partitions_of(footer, self.partition_fields()))
        return matching_rows(footer, self.metadata(path), matcher, row_group)

    def _files_to_read(self, files: Sequence[DataFile]) -> Sequence[DataFile]:
        """Return the files that may contain matching rows, according to the partition values in their paths.

        If no file matches, return the first file, because its footer contains the columns.
        """
        named = [name for name in columns_of(self.filters or ()) if name in self._partition_types]
        if not named:
            return files
        # If a column is stored in the files and is also a partition directory, the stored values are used. For such a
        # column, the path of a file does not show whether the rows match.
        stored = read_footers(files[:1])[0][0].schema.names
        fields = {name: pa.field(name, pa.type_for_alias(self._partition_types[name])) for name in named}
        deciding = [
            [term for term in terms if term[0] in fields and term[0] not in stored] for terms in self.filters or ()
        ]

        def may_match(file: DataFile) -> bool:
            values = {
                name: _scalar(text, fields[name])
                for name, text in partition_values(file.path).items()
                if name in fields
            }
            return any(
                all(term[0] not in values or matches_value(file.path, term, values[term[0]]) for term in terms)
                for terms in deciding
            )

        return [file for file in files if may_match(file)] or files[:1]

    def _matching_counts(self, filters: Filters) -> dict[str, tuple[int, ...]]:
        """Count the rows of each row group that match the filters. Later calls return the stored numbers."""
        if self._matching is None:
            fields = self.partition_fields()

            def count(footer: Footer) -> tuple[int, ...]:
                if not footer.rows:
                    return (0,) * len(footer.groups)
                matcher = Matcher(filters, footer, _partitions_of(footer, fields))
                return tuple(count_rows(footer, self.metadata(footer.path), matcher))

            footers = self.footers()
            with ThreadPoolExecutor(min(THREADS, len(footers)), thread_name_prefix="shoal-filters") as threads:
                counts = list(threads.map(count, footers))
            self._matching = {footer.path: found for footer, found in zip(footers, counts, strict=True)}
        return self._matching

    def _selection(self) -> dict[tuple[str, int], GroupSelection] | None:
        if not self.splits and self.filters is None:
            return None
        if self._selections is None:
            matching = None if self.filters is None else self._matching_counts(self.filters)
            # The files are sorted by path, so that a split does not depend on the order in which the user listed the
            # files.
            footers = sorted(self.footers(), key=lambda footer: footer.path)
            keys = [(i, footer.path, group) for i, footer in enumerate(footers) for group in range(len(footer.groups))]
            rows = [
                footer.groups[group][0] if matching is None else matching[footer.path][group]
                for footer in footers
                for group in range(len(footer.groups))
            ]
            chosen = select(rows, [f"{i}/{group}" for i, _, group in keys], self.splits)
            self._selections = {(path, group): one for (_, path, group), one in zip(keys, chosen, strict=True)}
        return self._selections


def _statistics(metadata: Any, row_group: int, column: str) -> Any:
    """Return the statistics of a column in a row group, or None if the footer has none."""
    group = metadata.row_group(row_group)
    chunks = map(group.column, range(group.num_columns))
    return next((chunk.statistics for chunk in chunks if chunk.path_in_schema == column and chunk.is_stats_set), None)


def _partitions_of(footer: Footer, fields: dict[str, pa.Field]) -> dict[str, pa.Scalar]:
    """Return a file's partition values as a dict: name of the partition column -> value in the type of the column."""
    return {name: _scalar(text, fields[name]) for name, text in footer.partitions if name in fields}


def _scalar(text: str | None, field: pa.Field) -> pa.Scalar:
    return pa.scalar(None if text is None else _typed(text, field), field.type)


def _typed(text: str, field: pa.Field) -> int | str:
    return int(text) if pa.types.is_integer(field.type) else text


def group_starts(values: pa.Array, before: pa.Scalar | None) -> np.ndarray:
    """Return a bool array that is True for each row at which a group of rows begins."""
    begins = np.empty(len(values), dtype=bool)
    begins[1:] = pc.not_equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False)
    begins[:1] = before is None or values[0] != before
    return begins


def find_groups(source: ParquetSource, column: str) -> list[np.ndarray]:
    """Read the group column and return for each row whether a group of rows begins at this row."""
    found: list[np.ndarray] = []
    first: list[pa.Array] = []
    before: pa.Scalar | None = None
    ranges = source.ranges()
    for rows, table in zip(ranges, source.read(ranges, [column]), strict=True):
        values = table.column(column).combine_chunks()
        if values.null_count:
            raise DataError(
                f'{rows.path}, row group {rows.row_group}: the group column "{column}" is null in '
                f"{values.null_count} of {len(values)} rows: leave these rows out, or fill in the group"
            )
        begins = group_starts(values, before)
        found.append(begins)
        first.append(values.filter(pa.array(begins)))
        before = values[-1]
    counts = pc.value_counts(pa.chunked_array(first))
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        value, places = twice[0]["values"], twice[0]["counts"]
        more = len(twice) - 1
        others = f", and so are the rows of {more} other group{'s' if more > 1 else ''}" if more else ""
        raise DataError(
            f'the rows of group {value} of "{column}" are in {places} separate places{others}: sort the dataset by '
            f'"{column}", so that the rows of each group are contiguous'
        )
    return found
