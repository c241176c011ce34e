"""Read the rows of a Parquet file by ranges (of one row group), with the columns of the dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from shoal.data.parquet.filter_matching import Matcher, at_positions
from shoal.data.parquet.footers import Footer, changed, open_planned, wrap_read_errors
from shoal.data.parquet.table_types import in_types_of_table, read_batches
from shoal.data.planning import RowRange
from shoal.errors import DataError
from shoal.lazy_imports import np, pa


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
        for name in stored:
            if name not in footer.schema.names:
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
                    table = file.read_row_group(part.row_group, columns=footer.stored_names(stored))
                    table = in_types_of_table(table, footer, stored)
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
    for start, batch in read_batches(file, footer, part.row_group, wanted):
        found = batch.filter(matcher.mask(batch, part.row_group, start)) if matcher else batch
        if positions is not None:
            kept.append(found.filter(at_positions(positions, at, found.num_rows)))
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
