"""Find the groups of rows in Parquet files. A group, such as the documents of one query, must stay on one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.data.parquet.source import ParquetSource
from shoal.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


def group_starts(values: pa.Array, before: pa.Scalar | None) -> np.ndarray:
    """Return a bool array that is True for each row at which a group of rows begins."""
    import numpy as np
    import pyarrow.compute as pc

    begins = np.empty(len(values), dtype=bool)
    begins[1:] = pc.not_equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False)
    begins[:1] = before is None or values[0] != before
    return begins


def find_groups(source: ParquetSource, column: str) -> list[np.ndarray]:
    """Read the group column and return for each row whether a group of rows begins at this row.

    Raises:
        DataError: If a group is null, or its rows are not contiguous.
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
