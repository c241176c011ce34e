"""Find groups of rows that belong together, such as the documents of a query, in Parquet files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.data.parquet.source import ParquetSource
from shoal.data.planning.groups import group_starts
from shoal.errors import DataError

if TYPE_CHECKING:
    import numpy as np


def find_groups(source: ParquetSource, column: str) -> list[np.ndarray]:
    """Read one column, and find where its groups begin.

    Args:
        source: The rows.
        column: The group of each row; the rows of one group stand one after the other, in files and row groups too.

    Returns:
        For each row group with rows, in the dataset's order: whether a group begins at each row, bool ``[rows]``.

    Raises:
        DataError: If a group is null, or stands in two places.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    found: list[np.ndarray] = []
    first: list[pa.Array] = []
    before: pa.Scalar | None = None
    ranges = source.ranges()
    for rows, table in zip(ranges, source.read(ranges, [column]), strict=True):
        values = table.column(column).combine_chunks()
        if values.null_count:
            raise DataError(
                f'{rows.path}, row group {rows.row_group}: the group "{column}" is null in {values.null_count} of '
                f"{len(values)} rows"
            )
        begins = group_starts(values, before)
        found.append(begins)
        first.append(values.filter(pa.array(begins)))
        before = values[-1]
    counts = pc.value_counts(pa.chunked_array(first))
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        value, places = twice[0]["values"], twice[0]["counts"]
        others = f", and {len(twice) - 1} groups more" if len(twice) > 1 else ""
        raise DataError(
            f'the rows of group {value} of "{column}" stand in {places} places{others}: sort the dataset by it'
        )
    return found
