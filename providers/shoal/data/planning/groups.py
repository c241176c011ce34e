"""Groups of rows that belong together, such as the documents of a query: found, and assigned whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.data.planning.row_groups import RowGroup, RowRange, Shard, shuffled
from shoal.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from shoal.data.parquet.source import ParquetSource


def group_starts(values: pa.Array, before: pa.Scalar | None) -> np.ndarray:
    """Where groups begin.

    Args:
        values: The group of each row.
        before: The group of the row before these; None: there is none.

    Returns:
        Whether a group begins at each row, bool ``[rows]``.
    """
    import numpy as np
    import pyarrow.compute as pc

    begins = np.empty(len(values), dtype=bool)
    begins[1:] = pc.not_equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False)
    begins[:1] = before is None or values[0] != before
    return begins


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


def plan_groups(
    row_groups: Sequence[RowGroup], begins: Sequence[np.ndarray], num_workers: int, seed: int
) -> tuple[Shard, ...]:
    """Deal groups to workers, none of them split.

    Row groups are laid out in a seeded shuffle, those that share a group of rows one after the other, and this line is
    cut where a group begins, as near as possible to equal parts.

    Args:
        row_groups: All row groups that have rows, in the dataset's order.
        begins: Whether a group of rows begins at each row of each, bool ``[rows]``.
        num_workers: Number of shards to make.
        seed: Seed of the shuffle.

    Returns:
        One shard per worker, by rank; each has a group at least, and is within a group's size of the mean where the
        groups allow it.

    Raises:
        DataError: If there are fewer groups than workers.
    """
    import numpy as np

    chains: list[list[int]] = []
    for index, mine in enumerate(begins):
        if mine[0] or not chains:
            chains.append([])
        chains[-1].append(index)
    line = [index for chain in shuffled(chains, seed) for index in chain]
    at = np.flatnonzero(np.concatenate([begins[index] for index in line])) if line else np.empty(0, dtype=int)
    if len(at) < num_workers:
        raise DataError(f"the dataset has {len(at)} groups, too few for {num_workers} workers")
    total = sum(row_groups[index].rows for index in line)
    cuts = [0]
    for rank in range(1, num_workers):
        ideal = total * rank / num_workers
        after = int(np.searchsorted(at, ideal))
        nearest = after - (after == len(at) or (after > 0 and ideal - at[after - 1] <= at[after] - ideal))
        # Every shard, this one and those that follow, has a group at least.
        cuts.append(min(max(nearest, cuts[-1] + 1), len(at) - (num_workers - rank)))
    bounds = [*(int(at[cut]) for cut in cuts), total]
    return tuple(
        Shard(tuple(sorted(_ranges(row_groups, line, start, stop)))) for start, stop in itertools.pairwise(bounds)
    )


def _ranges(row_groups: Sequence[RowGroup], line: Sequence[int], start: int, stop: int) -> list[RowRange]:
    """The rows ``start <= i < stop`` of the line."""
    found = []
    offset = 0
    for index in line:
        group = row_groups[index]
        low, high = max(start - offset, 0), min(stop - offset, group.rows)
        if low < high:
            found.append(RowRange(group.path, group.index, low, high))
        offset += group.rows
    return found
