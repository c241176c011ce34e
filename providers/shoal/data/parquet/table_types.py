"""Read batches of a Parquet file in the names and types of the table to which the file belongs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shoal.data.parquet.files import is_local
from shoal.data.parquet.footers import Footer, index_in_file
from shoal.lazy_imports import pa

BATCH_ROWS = 65_536
"""Number of rows that are decoded at a time, to limit the memory. 64 Ki rows of 100 float32 columns are 26 MB."""

_LONG_BYTES = 32 * 2**20
"""Size of the decoded columns from which a row group is read in pieces."""
# Arrow needs ten times the size of a piece, because it keeps a page of each column: 41 float64 columns in one row group
# took 53 MiB in pieces of 5 MiB, 135 MiB in pieces of 16 MiB, and 369 MiB as a whole. Pieces of few rows are slow.
_PIECE_BYTES, _PIECE_ROWS, _LARGEST_PIECE = 4 * 2**20, 8_192, 16 * 2**20
# A remote file is read in larger requests, because each takes 20 to 100 ms.
_LOCAL_BUFFER, _REMOTE_BUFFER = 64 * 2**10, 2**20
_TEXT_BYTES = 64
"""Least size that is assumed of a text or list, because the footer shows only the size of its dictionary codes."""


def piece_rows(footer: Footer, row_group: int, columns: Sequence[str]) -> int:
    """Return how many rows of a row group are decoded at a time: all, or of a long row group some thousands."""
    rows, size = footer.groups[row_group]
    text = max(_TEXT_BYTES, size // max(rows, 1))
    row_bytes = sum(_bytes_of(footer.schema.field(name).type, text) for name in columns)
    if rows * row_bytes <= _LONG_BYTES:
        return rows
    return max(1, int(_PIECE_BYTES / row_bytes), min(_PIECE_ROWS, int(_LARGEST_PIECE / row_bytes)))


def _bytes_of(type_: pa.DataType, text: int) -> float:
    try:
        return float(type_.bit_width / 8)
    except ValueError:
        return text


def buffer_bytes(footer: Footer, columns: Sequence[str]) -> int:
    """Return the size of the buffer through which Arrow reads each column of a file with long row groups; 0 if the
    columns of a row group are read as a whole."""
    if not columns or all(piece_rows(footer, i, columns) >= rows for i, (rows, _) in enumerate(footer.groups)):
        return 0
    return _LOCAL_BUFFER if is_local(footer.path) else _REMOTE_BUFFER


def read_batches(
    file: Any, footer: Footer, row_group: int, columns: Sequence[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Decode columns of a row group in small batches, and yield each with the position of its first row."""
    start = 0
    rows = min(BATCH_ROWS, piece_rows(footer, row_group, columns))
    for batch in file.iter_batches(rows, row_groups=[row_group], columns=footer.stored_names(columns)):
        yield start, in_types_of_table(batch, footer, columns)
        start += batch.num_rows


def in_types_of_table(rows: Any, footer: Footer, columns: Sequence[str]) -> Any:
    """Return columns of a file, which are a table or record batch, in the names and types of the table to which the
    file belongs."""
    if footer.stored is None:
        return rows
    schema = pa.schema([footer.schema.field(name).remove_metadata() for name in columns])
    if isinstance(rows, pa.Table):
        return pa.Table.from_batches([in_types_of_table(batch, footer, columns) for batch in rows.to_batches()], schema)
    stored = map(rows.column, footer.stored_names(columns))
    arrays = [_converted(values, field.type) for values, field in zip(stored, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _converted(values: pa.Array, type_: pa.DataType) -> pa.Array:
    """Convert the values of a file to the type of the table. The fields of structs, also in lists and maps, are found
    by their ids or names, and a field that the file lacks is null."""
    types, given = pa.types, values.type
    if types.is_struct(type_) and types.is_struct(given):
        stored = map(index_in_file(given), type_)
        children = [
            pa.nulls(len(values), field.type) if at is None else _converted(values.field(at), field.type)
            for field, at in zip(type_, stored, strict=True)
        ]
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=values.is_null())
    if types.is_list(type_) and types.is_list(given):
        # The offsets of a slice do not start at 0.
        content = _converted(values.values, type_.value_type)
        return pa.ListArray.from_arrays(values.offsets, content, type=type_, mask=values.is_null())
    if types.is_map(type_) and types.is_map(given):
        keys, items = _converted(values.keys, type_.key_type), _converted(values.items, type_.item_type)
        return pa.MapArray.from_arrays(values.offsets, keys, items, type=type_, mask=values.is_null())
    return values if given == type_ else values.cast(type_)
