"""Write tables and record batches to Parquet files, with row groups that are small enough to be assigned evenly to
workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoal.data.parquet.paths import resolve
from shoal.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

# These numbers determine the size of a row group, the unit in which rows are assigned to workers. With 64 row groups,
# each of 16 workers gets four row groups. A row group has at least 8 Ki rows, because smaller row groups compress badly
# and make the footer large. A row group has at most 32 MiB after decoding, which limits the memory that a worker needs
# while it reads.
_GROUPS = 64
_MIN_GROUP_ROWS = 8_192
_MAX_GROUP_BYTES = 32 * 2**20


def group_rows(rows: int, bytes_per_row: float) -> int:
    """Compute the number of rows per row group, from the dataset's number of rows and the size of a row."""
    most = max(1, int(_MAX_GROUP_BYTES / max(bytes_per_row, 1.0)))
    return min(most, max(_MIN_GROUP_ROWS, -(-rows // _GROUPS)))


class TableWriter:
    """Writer that appends tables with the same schema to one Parquet file.

    The writer is a context manager, which closes the file.

    Args:
        path: File to write.
        schema: Columns of the file.

    Raises:
        DataError: If several columns have the same name.
    """

    def __init__(self, path: str, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        names = schema.names
        for name in names:
            if names.count(name) > 1:
                raise DataError(f'the data has several columns named "{name}": rename all but one')
        filesystem, inner = resolve(path)
        self._stack = contextlib.ExitStack()
        stream = self._stack.enter_context(filesystem.open_output_stream(inner))
        self._writer = self._stack.enter_context(pq.ParquetWriter(stream, schema, compression="zstd"))

    def write(self, table: pa.Table, row_group_rows: int) -> None:
        """Append a table to the file, divided into row groups of `row_group_rows` rows."""
        self._writer.write_table(table, row_group_size=row_group_rows)

    def close(self) -> None:
        """Write the Parquet footer and close the file."""
        self._stack.close()

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def write_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema, path: str) -> None:
    """Write record batches with the same schema to a Parquet file. Only one row group is in memory at a time."""
    import pyarrow as pa

    kept: list[pa.RecordBatch] = []
    rows = size = 0
    with TableWriter(path, schema) as writer:
        for batch in batches:
            kept.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            # The total number of rows is unknown, so group_rows() cannot be used. Instead, row groups get a size that
            # suits a dataset of medium size.
            if rows >= 4 * _MIN_GROUP_ROWS or size >= _MAX_GROUP_BYTES:
                writer.write(pa.Table.from_batches(kept, schema), rows)
                kept, rows, size = [], 0, 0
        if rows:
            writer.write(pa.Table.from_batches(kept, schema), rows)
