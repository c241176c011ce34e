"""Define `ParquetSource`: the rows of Parquet files, which belong to folders or to a table of another format;
find the groups of rows, such as the documents of one query, that must stay on one worker."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

from shoal.data.filters import Filters, Term, columns_of
from shoal.data.listing import DataFile, TableLister, naming_versions
from shoal.data.parquet.files import WHOLE_NUMBER, ParquetPaths, in_threads, list_files, normalise, partition_type
from shoal.data.parquet.filter_matching import Matcher, count_rows, matches_value, matching_rows, may_match_between
from shoal.data.parquet.footers import (
    Footer,
    footer_texts,
    open_planned,
    read_footers,
    stored_description,
    texts_digest,
)
from shoal.data.parquet.reading import read_ranges
from shoal.data.parquet.rows_digest import STORED, rows_digest
from shoal.data.parquet.schema import common_schema, distinct, first_with_rows, to_schema, widened
from shoal.data.planning import GroupSelection, RowGroup, RowRange, Split, select
from shoal.errors import DataError, InvalidArgumentError
from shoal.lazy_imports import np, pa, pc
from shoal.secrets.redaction import redact

Path = str | os.PathLike[str]


class ParquetSource:
    """Rows of Parquet files: all rows, only the rows that match filters, or a part of a random split of these rows.

    The footers are read once, when they are first needed, and kept. A pickled copy includes the footers, so that
    workers do not list the directory again and all see the same files.

    Args:
        paths: One or several files, directories or globs: local paths or URIs. Hive partitions (``month=1/``) become
            columns.
        filters: Filters of the rows, which are applied before splits; None for all rows. See
            :mod:`shoal.data.parquet.filter_matching`.
        lister: Lister of the table at the path; None if the paths are Parquet files. The digest of a table is always
            computed from the values.

    Attributes:
        splits: Random splits that are applied one after the other; see :meth:`split`.
        staged_copy: The :class:`shoal.data.staged_data.StagedCopy` that prevents the removal of staged files
            while this source exists; None if this process does not hold staged files.
        is_table: Whether the files belong to a table, whose schema is that of the dataset.
        staged: Whether shoal itself wrote the files, from a DataFrame, a query or another dataset.
    """

    def __init__(
        self, paths: Path | Iterable[Path], filters: Filters | None = None, *, lister: TableLister | None = None
    ) -> None:
        several = list(paths) if isinstance(paths, Iterable) and not isinstance(paths, str) else [paths]
        if not several:
            raise InvalidArgumentError("a dataset needs at least one path")
        self.paths = tuple(normalise(path) for path in several)
        self.splits: tuple[Split, ...] = ()
        self.filters = filters
        self.lister: TableLister | ParquetPaths = lister or ParquetPaths(self.paths)
        self.is_table = lister is not None
        self.staged_copy: Any = None
        self.staged = False
        self._footers: tuple[Footer, ...] | None = None
        self._table: pa.Schema | None = None
        self._version: str | None = None
        self._defaults: Mapping[str, Any] = {}
        self._has_deleted = False
        self._by_path: dict[str, Footer] = {}
        self._metadata: dict[str, Any] = {}
        self._partition_fields: dict[str, pa.Field] = {}
        self._matching: dict[str, tuple[int, ...]] | None = None
        self._selections: dict[tuple[str, int], GroupSelection] | None = None
        self._schema: pa.Schema | None = None
        self._index_gaps: tuple[str, ...] | None = None

    @property
    def place(self) -> str:
        """Where the rows are, for messages: the table, file, folder or glob, or the number of those that were given."""
        return self.lister.place

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
            listing = self.lister.list_files(self.filters)
            self._table, self._version, self._defaults = listing.schema, listing.version, listing.defaults
            values: dict[str, list[Any]] = {}
            for file in listing.files:
                for name, value in file.partitions.items():
                    values.setdefault(name, []).append(value)
            fields = {
                name: pa.field(name, pa.type_for_alias(partition_type(texts)))
                if self._table is None
                else self._table.field(name)
                for name, texts in values.items()
            }
            with naming_versions(self.place, listing.version, listing.remaining):
                footers, self._metadata = read_footers(self._files_to_read(listing.files, fields), self._table)
            self._has_deleted = any(footer.deleted is not None for footer in footers)
            if self._table is None:
                stored = set(first_with_rows(footers).schema.names)
            else:
                stored = {name for name in fields for footer in footers if name not in dict(footer.partitions)}
            self._partition_fields = {name: field for name, field in fields.items() if name not in stored}
            self._footers = tuple(footers)
        return self._footers

    @property
    def version(self) -> str | None:
        """The version of the table that is read; None for Parquet files that belong to no table."""
        self.footers()
        return self._version

    @property
    def filtered(self) -> bool:
        """Whether filters or the deletions of a table may leave out rows of the files."""
        self.footers()
        return self.filters is not None or self._has_deleted

    def used_footers(self) -> list[Footer]:
        """Return the footers of the files in which at least one row matches the filters. Without filters, every row
        matches.

        Splits are not taken into account, so a split may select no row of a returned file.
        """
        if not self.filtered:
            return [footer for footer in self.footers() if footer.rows]
        matching = self._matching_counts()
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
        if not self.footers():
            raise DataError(
                f"the dataset has no rows: {self.place} has no files; check the program that writes the table"
            )
        return next(iter(self.used_footers()), None) or first_with_rows(self.footers())

    def partition_fields(self) -> dict[str, pa.Field]:
        """Return the columns that exist only as partition directories (``month=1/``) or values in a table's log, and
        not in the files, as a dict by name."""
        self.footers()
        return self._partition_fields

    def file_of_type(self, name: str) -> str:
        """Return the path of the file that decides the type of a column: for a partition column of text, the first file
        whose value is not a whole number."""
        for footer in self.used_footers() if name in self.partition_fields() and not self.is_table else ():
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

    def partition_value(self, path: str, name: str) -> Any:
        """Return the value of a partition column (``month=1/``) for one file, as an object of the column's type."""
        return _scalar(dict(self.footer(path).partitions)[name], self.partition_fields()[name]).as_py()

    def schema(self) -> pa.Schema:
        """Return the schema of the dataset: the columns of the first file that has rows, then the partition columns.

        If files store a column in different types, the column has the type that holds the values of all files, such as
        int64 for int32 and int64. The schema of a table is that of its log.
        """
        self.footers()
        if self._schema is None and self._table is not None:
            self._schema = pa.schema([pa.field(field.name, field.type, field.nullable) for field in self._table])
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
            if self.is_table:
                return ()
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
        selections = self.selections()
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

    def restricted_to(self, filters: Filters) -> ParquetSource:
        """Return the rows of the same files that match further filters. Splits are applied afterwards."""
        part = copy(self)
        part.filters = tuple((*mine, *more) for mine in self.filters or ((),) for more in filters)
        part._matching = part._selections = part._schema = part._index_gaps = None
        return part

    def read(self, ranges: Iterable[RowRange], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read row ranges (rows of one row group), and yield one table per range.

        If successive ranges are in the same file, the file is opened only once.
        """
        wanted = list(ranges)
        pieces = self.read_pieces(wanted, columns)
        for part in wanted:
            tables: list[pa.Table] = []
            while sum(table.num_rows for table in tables) < part.rows:
                tables.append(next(pieces)[1])
            yield tables[0] if len(tables) == 1 else pa.concat_tables(tables)
            # Without `del`, these tables would stay in memory while the next row group is decoded.
            del tables
        next(pieces, None)

    def read_pieces(
        self, ranges: Iterable[RowRange], columns: Sequence[str] | None = None
    ) -> Iterator[tuple[RowRange, pa.Table]]:
        """Read row ranges as :meth:`read` does, and yield long row groups in pieces, so that at most 32 MiB are decoded
        at a time."""
        if not (wanted := list(self.schema().names if columns is None else columns)):
            raise InvalidArgumentError(
                "columns is empty: name at least one column, or omit the argument to read all columns"
            )
        selections = self.selections() if self.splits else None
        common = {field.name: field for field in self.schema()}
        for path, parts in groupby(ranges, key=lambda part: part.path):
            footer = self.footer(path)
            values = self._constants(footer)
            matcher = Matcher(self.filters, footer, values) if self.filtered else None
            matching = self._matching_counts()[path] if self.filtered else None
            gaps = {name: pa.scalar(None, common[name].type) for name in self.index_gaps()}
            constants = values | {name: null for name, null in gaps.items() if name not in footer.schema.names}
            pieces = read_ranges(footer, list(parts), wanted, constants, selections, matcher, matching)
            for part, table in pieces:
                yield part, to_schema(table, common, path)
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
            value = self._constants(footer).get(column)
            nulls = 0 if value is not None and value.is_valid else every
        # Arrow writes no statistics for a column of type null. Such a column contains only nulls, so its number of
        # nulls is the number of rows.
        elif str(footer.schema.field(column).type) == "null":
            nulls = every
        else:
            stats = _statistics(self.metadata(path), row_group, *footer.stored_names([column]))
            nulls = stats.null_count if stats is not None and stats.has_null_count else None
        if nulls and nulls != every and self.filtered:
            return nulls if self._matching_counts()[path][row_group] == every else None
        return nulls

    def bounds(self, path: str, column: str) -> Iterator[tuple[Any, Any]]:
        """Yield the smallest and the largest value of a column in each row group of a file that has such statistics."""
        footer, metadata = self.footer(path), self.metadata(path)
        if column not in footer.schema.names:
            return
        for row_group in range(metadata.num_row_groups):
            stats = _statistics(metadata, row_group, *footer.stored_names([column]))
            if stats is not None and stats.has_min_max:
                yield stats.min, stats.max

    def digest(self) -> str:
        """Return a fingerprint of the dataset.

        If shoal has staged the rows in one file, it has stored the fingerprint of their values there. If the dataset
        has filters, the values of all matching rows are read; see :class:`shoal.data.parquet.rows_digest.RowsDigest`.
        Equal rows then have the same fingerprint even if they are in other files. Columns that are missing or have
        another kind of type in some file are left out. Otherwise, or if no column is left, the fingerprint is computed
        from the footers and the filters.
        """
        options = [repr((split.weights, split.index, split.seed)) for split in self.splits]
        if (stored := self._stored_digest()) is not None:
            return texts_digest([stored, *options]) if options else stored
        if self.is_table or self.filters is not None:
            schema = self.schema()
            if not self.is_table:
                schema = common_schema(schema, self.partition_fields(), self.used_footers())
            if schema.names:
                return rows_digest((table for _, table in self.read_pieces(self.ranges(), schema.names)), schema)
        options += [repr(self.filters)] if self.filters is not None else []
        texts = (footer_texts(footer, self.metadata(footer.path)) for footer in self.footers())
        return texts_digest(chain(chain.from_iterable(texts), options))

    def _stored_digest(self) -> str | None:
        """Return the fingerprint of all rows that shoal has stored in the footer of the file that it wrote; None if it
        wrote none, or if filters select some of the rows.

        In a file of another program, the fingerprint may be a copy from a file with other rows.
        """
        if not self.staged or self.filters is not None or len(self.footers()) != 1:
            return None
        stored = (self.metadata(self.footers()[0].path).metadata or {}).get(STORED)
        return None if stored is None else stored.decode()

    def write_times(self) -> tuple[int | None, ...]:
        """Return the time of each file's last change, in nanoseconds since the epoch.

        The result is empty if `digest` is computed from the rows.

        The time of a file is None if the filesystem does not report it.
        """
        if self.is_table or self.filters is not None or self._stored_digest() is not None:
            return ()
        return tuple(file.modified_ns for file in list_files(self.paths))

    def file_digest(self, path: str) -> str:
        """Compute a fingerprint of one file from the file's footer.

        The fingerprint does not depend on the file's name or folder.
        """
        return texts_digest(footer_texts(self.footer(path), self.metadata(path)))

    def matching(self, path: str, row_group: int, filters: Filters | None, *, deleted: bool = False) -> np.ndarray:
        """Return the positions of the rows of a row group that match the given filters.

        The source's own filters are ignored. With `deleted`, rows that the table has deleted may match, too.
        """
        footer = self.footer(path)
        if deleted:
            footer = replace(footer, deleted=None)
        matcher = Matcher(filters, footer, self._constants(footer))
        return matching_rows(footer, self.metadata(path), matcher, row_group)

    def _files_to_read(self, files: Sequence[DataFile], fields: Mapping[str, pa.Field]) -> Sequence[DataFile]:
        """Return the files that may contain matching rows, according to their partition values and bounds.

        If no file matches, return the first file, because its footer contains the columns.
        """
        named = columns_of(self.filters or ())
        fields = {name: fields[name] for name in named if name in fields}
        if not fields and not any(file.bounds for file in files):
            return files
        # If a column is stored in the files and is also a partition directory, the stored values are used. For such a
        # column, the path of a file does not show whether the rows match.
        stored = [] if self.is_table else read_footers(files[:1])[0][0].schema.names
        deciding = [
            [term for term in terms if self.is_table or (term[0] in fields and term[0] not in stored)]
            for terms in self.filters or ()
        ]

        def may_match(file: DataFile) -> bool:
            values = {name: _scalar(text, fields[name]) for name, text in file.partitions.items() if name in fields}

            def may(term: Term) -> bool:
                name = term[0]
                if name in values:
                    return matches_value(file.path, term, values[name])
                if self._table is not None and name in file.bounds:
                    return may_match_between(file.path, term, self._table.field(name).type, file.bounds[name])
                return True

            return any(all(map(may, terms)) for terms in deciding)

        return [file for file in files if may_match(file)] or files[:1]

    def _constants(self, footer: Footer) -> dict[str, pa.Scalar]:
        """Return the values of the columns that a file does not store: partition columns and, in a table, columns that
        were added later."""
        values = dict(footer.partitions)
        if self._table is None:
            return {
                name: _scalar(values[name], field) for name, field in self._partition_fields.items() if name in values
            }
        stored = set(footer.schema.names)
        return {
            field.name: _scalar(values.get(field.name, self._defaults.get(field.name)), field)
            for field in self._table
            if field.name not in stored
        }

    def _matching_counts(self) -> dict[str, tuple[int, ...]]:
        """Count the rows of each row group that match the filters and are not deleted. Later calls return the stored
        numbers."""
        if self._matching is None:

            def count(footer: Footer) -> tuple[int, ...]:
                if not footer.rows:
                    return (0,) * len(footer.groups)
                matcher = Matcher(self.filters, footer, self._constants(footer))
                return tuple(count_rows(footer, self.metadata(footer.path), matcher))

            counts = in_threads("filters", count, self.footers())
            self._matching = {footer.path: found for footer, found in zip(self.footers(), counts, strict=True)}
        return self._matching

    def selections(self) -> dict[tuple[str, int], GroupSelection] | None:
        """Return the rows of each row group, by its file and index, that remain after filters and random splits, or
        None if the source has neither.

        If the source has filters, only matching rows are counted, and the splits select from these rows.
        """
        if not self.splits and not self.filtered:
            return None
        if self._selections is None:
            matching = self._matching_counts() if self.filtered else None
            # The files are sorted by path, so that a split does not depend on the order in which the user listed the
            # files.
            footers = sorted(self.footers(), key=lambda footer: footer.path)
            keys = [(i, footer.path, group) for i, footer in enumerate(footers) for group in range(len(footer.groups))]
            rows = [footers[i].groups[at][0] if matching is None else matching[path][at] for i, path, at in keys]
            chosen = select(rows, [f"{i}/{group}" for i, _, group in keys], self.splits)
            self._selections = {(path, group): one for (_, path, group), one in zip(keys, chosen, strict=True)}
        return self._selections


def _statistics(metadata: Any, row_group: int, column: str) -> Any:
    """Return the statistics of a column in a row group, or None if the footer has none."""
    group = metadata.row_group(row_group)
    chunks = map(group.column, range(group.num_columns))
    return next((chunk.statistics for chunk in chunks if chunk.path_in_schema == column and chunk.is_stats_set), None)


def _scalar(value: Any, field: pa.Field) -> pa.Scalar:
    """Return a partition value, which is a text in the path of a Hive partition, in the type of its column."""
    return pa.scalar(int(value) if isinstance(value, str) and pa.types.is_integer(field.type) else value, field.type)


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
