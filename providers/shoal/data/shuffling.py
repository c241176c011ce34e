"""Divide the rows of a shuffled torch dataset into windows: the rows that are in memory at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.data.numpy_columns import OBJECTS
from shoal.data.parquet.source import ParquetSource
from shoal.data.planning import RowRange
from shoal.lazy_imports import np

# These numbers determine the size of a window. A window is a group of row ranges that are in memory at the same time,
# and whose rows are shuffled together. A window has at least BUFFER_RANGES ranges and at least BUFFER_ROWS rows, unless
# the next range would make the window larger than BUFFER_BYTES. A range that is larger than BUFFER_BYTES is a window by
# itself.
BUFFER_RANGES = 4
BUFFER_ROWS = 65_536
BUFFER_BYTES = 256 * 2**20

# Smallest assumed size of a text or another object in bytes, to estimate the memory for shuffled rows before any row is
# read. Pictures are larger: see `_object_bytes`.
_TEXT_BYTES = 64


def shuffled_windows(line: Sequence[RowRange], row_bytes: int) -> list[tuple[RowRange, ...]]:
    """Divide row ranges into windows. The rows of a window are in memory at the same time and shuffled together."""
    found: list[tuple[RowRange, ...]] = []
    held: list[RowRange] = []
    rows = 0
    for part in line:
        enough = len(held) >= BUFFER_RANGES and rows >= BUFFER_ROWS
        if held and (enough or (rows + part.rows) * row_bytes > BUFFER_BYTES):
            found.append(tuple(sorted(held)))
            held, rows = [], 0
        held.append(part)
        rows += part.rows
    return [*found, tuple(sorted(held))] if held else found


def rows_of(window: Sequence[RowRange]) -> int:
    """Return the number of rows in a window (row ranges whose rows are shuffled together)."""
    return sum(part.rows for part in window)


def row_bytes(source: ParquetSource, dtypes: Mapping[str, Any]) -> int:
    """Return the size of a row of columns of some NumPy types; that of texts and other objects is an estimate."""
    return sum(
        _object_bytes(source, name) if dtype == OBJECTS else np.dtype(dtype).itemsize for name, dtype in dtypes.items()
    )


def _object_bytes(source: ParquetSource, column: str) -> int:
    """Estimate the size of a text, a picture or another object from the footer of the dataset's first file."""
    footer = source.reference()
    metadata = source.metadata(footer.path)
    stored = footer.stored_names([column] if column in footer.schema.names else [])
    chunks = [
        chunk
        for group in map(metadata.row_group, range(metadata.num_row_groups))
        for chunk in map(group.column, range(metadata.num_columns))
        if chunk.path_in_schema.split(".")[0] in stored
    ]
    size: int = sum(chunk.total_uncompressed_size for chunk in chunks)
    rows: int = metadata.num_rows
    return max(_TEXT_BYTES, size // max(rows, 1))
