"""Read the rows of a Parquet file by ranges (of one row group), with the columns of the dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shoal.data.parquet.filter_matching import Matcher, at_positions
from shoal.data.parquet.footers import Footer, changed, open_planned, wrap_read_errors
from shoal.data.parquet.schema import plain_type
from shoal.data.parquet.table_types import buffer_bytes, in_types_of_table, piece_rows, read_batches
from shoal.data.planning import GroupSelection, RowRange
from shoal.errors import DataError
from shoal.lazy_imports import np, pa


def read_ranges(
    footer: Footer,
    ranges: Sequence[RowRange],
    columns: Sequence[str],
    partitions: dict[str, pa.Scalar],
    selections: Mapping[tuple[str, int], GroupSelection] | None,
    matcher: Matcher | None,
    matching: Sequence[int] | None,
) -> Iterator[tuple[RowRange, pa.Table]]:
    """Read row ranges (rows of one row group) of one file, in pieces of limited size. The file is opened only once.

    Yields:
        A range or, of a long row group, successive pieces of it, and the rows.
    """
    stored = [name for name in columns if name not in partitions]
    for name in stored:
        if name not in footer.schema.names:
            raise DataError(
                f'{footer.path} has no column "{name}": write this column into all files, or do not read it'
            )
    with open_planned(footer, buffer_bytes(footer, stored)) as file:
        for part in ranges:
            rows = footer.groups[part.row_group][0]
            found = rows if matching is None else matching[part.row_group]
            if selections is not None:
                positions = selections[footer.path, part.row_group].indices()[part.positions()]
            else:
                positions = None if part.deal is None else part.positions()
            tables = _read_part(file, footer, part, stored, positions, matcher if found < rows else None)
            first = 0
            while first < part.rows:
                with wrap_read_errors(footer.path, f"row group {part.row_group}"):
                    table = next(tables).replace_schema_metadata(None)
                    read = table.num_rows if stored else part.rows
                    # Pass the number of rows to `_append`, because a table without columns does not know its number of
                    # rows.
                    for name, value in partitions.items():
                        if name in columns:
                            table = _append(table, name, value, read)
                    table = table.select(list(columns))
                yield part.piece(first, read), table
                # Without `del`, this table would stay in memory while the next one is decoded.
                del table
                first += read


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
    file: Any,
    footer: Footer,
    part: RowRange,
    columns: list[str],
    positions: np.ndarray | None,
    matcher: Matcher | None,
) -> Iterator[pa.Table]:
    """Decode a row group in small batches, and yield the rows of one range, in tables of limited size.

    Args:
        file: The open file.
        footer: Its footer.
        part: The range.
        columns: Columns to read.
        positions: Row numbers in the row group of the rows to read, ascending; None: those of the range.
        matcher: If it is given, row numbers count only the rows that match.
    """
    wanted = list(dict.fromkeys([*columns, *(matcher.columns if matcher else ())]))
    if not columns:
        yield pa.table({})
        return
    most = piece_rows(footer, part.row_group, wanted)
    if part.rows == footer.groups[part.row_group][0] <= most:
        table = file.read_row_group(part.row_group, columns=footer.stored_names(columns))
        yield in_types_of_table(table, footer, columns)
        return
    last = part.stop if positions is None else int(positions[-1]) + 1
    kept: list[pa.RecordBatch] = []
    at = rows = 0
    for start, decoded in read_batches(file, footer, part.row_group, wanted):
        batch = _without_views(decoded)
        found = batch.filter(matcher.mask(batch, part.row_group, start)) if matcher else batch
        if positions is None:
            skipped = min(max(part.start - at, 0), found.num_rows)
            rows_here = found.slice(skipped, max(0, part.stop - at - skipped))
        else:
            rows_here = found.filter(at_positions(positions, at, found.num_rows))
        at += found.num_rows
        if rows and rows + rows_here.num_rows > most:
            yield pa.Table.from_batches(kept).select(columns)
            kept, rows = [], 0
        if rows_here.num_rows:
            kept.append(rows_here)
            rows += rows_here.num_rows
        del batch, decoded, found, rows_here
        if at >= last:
            break
    if at < last:
        raise changed(footer, f"{last} rows of row group {part.row_group} matched the filters then, {at} now")
    yield pa.Table.from_batches(kept).select(columns)


def _without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose texts and bytes are no views, of which Arrow cannot filter rows."""
    if not any(str(type_) in ("string_view", "binary_view") for type_ in batch.schema.types):
        return batch
    arrays = [
        column if pa.types.is_dictionary(column.type) else column.cast(plain_type(column.type)) for column in batch
    ]
    return pa.RecordBatch.from_arrays(arrays, batch.schema.names)
