"""Read row ranges (rows of a row group) of Parquet files, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.parquet.filter_matching import BATCH_ROWS, Matcher
from shoal.data.parquet.footers import Footer, changed, open_planned, wrap_read_errors
from shoal.data.planning import RowRange
from shoal.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


def read_ranges(
    footer: Footer,
    ranges: Sequence[RowRange],
    columns: Sequence[str],
    partitions: dict[str, pa.Scalar],
    indices_of: Callable[[int], np.ndarray] | None,
    matcher: Matcher | None = None,
    matching: Sequence[int] | None = None,
) -> Iterator[pa.Table]:
    """Read row ranges (rows of one row group) of one file. The file is opened only once.

    Raises:
        DataError: If the file is gone, corrupt, has changed since the plan was made, or lacks a column.
    """
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
                if (
                    matcher is not None
                    and matching is not None
                    and matching[part.row_group] < footer.groups[part.row_group][0]
                ):
                    if indices_of is None:
                        table = _read_part(file, footer, part, stored, matcher)
                    else:
                        every = RowRange(part.path, part.row_group, 0, matching[part.row_group])
                        table = _read_part(file, footer, every, stored, matcher)
                        table = table.take(indices_of(part.row_group)[part.positions()])
                elif indices_of is not None:
                    table = file.read_row_group(part.row_group, columns=stored)
                    table = table.take(indices_of(part.row_group)[part.positions()])
                elif part.rows == footer.groups[part.row_group][0]:
                    table = file.read_row_group(part.row_group, columns=stored)
                else:
                    table = _read_part(file, footer, part, stored)
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
    import pyarrow as pa

    kept: list[pa.Table] = []
    rows = 0
    for table in tables:
        kept.append(table if limit is None else table.slice(0, limit - rows))
        rows += kept[-1].num_rows
        if limit is not None and rows >= limit:
            break
    return pa.concat_tables(kept)


def _append(table: pa.Table, name: str, value: pa.Scalar, rows: int) -> pa.Table:
    import pyarrow as pa

    column = pa.repeat(value, rows) if value.is_valid else pa.nulls(rows, value.type)
    return table.append_column(name, column) if table.num_columns else pa.table({name: column})


def _read_part(
    file: Any, footer: Footer, part: RowRange, columns: list[str], matcher: Matcher | None = None
) -> pa.Table:
    """Decode a row group in small batches, and keep only the rows of one range, so that the other rows do not take
    memory.

    With a matcher, the row numbers of the range count only the rows that match the filters.
    """
    import pyarrow as pa

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
    import numpy as np
    import pyarrow as pa

    mask = np.zeros(rows, dtype=bool)
    first, last = np.searchsorted(positions, (start, start + rows))
    mask[positions[first:last] - start] = True
    # The shorter `pa.array(mask)` would import pandas, which is slow.
    return pa.Array.from_buffers(pa.bool_(), rows, [None, pa.py_buffer(np.packbits(mask, bitorder="little"))])
