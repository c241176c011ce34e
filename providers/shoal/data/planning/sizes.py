"""Compute the size of data in bytes from the numbers in footers, to plan memory before any row is read."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.data.planning.row_groups import RowGroup, Shard

FLOAT32_BYTES = 4


def matrix_bytes(rows: int, columns: int) -> int:
    """Compute the size in bytes of a float32 matrix from its number of rows and columns.

    Args:
        rows: Number of rows.
        columns: Number of columns.

    Returns:
        Size of a dense ``[rows, columns]`` float32 array in bytes.
    """
    return rows * columns * FLOAT32_BYTES


def shard_matrix_bytes(shards: Iterable[Shard], columns: int) -> int:
    """Return the size in bytes of the largest shard as a float32 matrix, which one worker has to hold in memory."""
    return max((matrix_bytes(shard.rows, columns) for shard in shards), default=0)


def row_groups_bytes(row_groups: Iterable[RowGroup]) -> int:
    """Return the uncompressed size of row groups in bytes, over all columns, from their footers."""
    return sum(group.bytes for group in row_groups)


def largest_row_group_bytes(row_groups: Iterable[RowGroup]) -> int:
    """Return the uncompressed size of the largest row group in bytes. A worker decodes a whole row group at once."""
    return max((group.bytes for group in row_groups), default=0)
