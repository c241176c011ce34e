"""How many bytes data takes, told from footers: pure arithmetic, for planning memory before anything is read."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.data.planning.row_groups import RowGroup, Shard

FLOAT32_BYTES = 4


def matrix_bytes(rows: int, columns: int) -> int:
    """Size of a decoded float32 matrix.

    Args:
        rows: Number of rows.
        columns: Number of columns.

    Returns:
        Bytes of a dense ``[rows, columns]`` float32 array.
    """
    return rows * columns * FLOAT32_BYTES


def shard_matrix_bytes(shards: Iterable[Shard], columns: int) -> int:
    """Size of the largest shard as a float32 matrix: what the fullest worker has to hold, in bytes."""
    return max((matrix_bytes(shard.rows, columns) for shard in shards), default=0)


def row_groups_bytes(row_groups: Iterable[RowGroup]) -> int:
    """Uncompressed size of row groups in bytes, all columns, as their footers give it."""
    return sum(group.bytes for group in row_groups)


def largest_row_group_bytes(row_groups: Iterable[RowGroup]) -> int:
    """Uncompressed size in bytes of the largest row group: the smallest unit that a worker decodes at once."""
    return max((group.bytes for group in row_groups), default=0)
