"""Assign groups of rows, such as the documents of a query, to workers without splitting a group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.data.planning.row_groups import RowGroup, RowRange, Shard, shuffled
from shoal.errors import DataError

if TYPE_CHECKING:
    import numpy as np


def plan_groups(
    row_groups: Sequence[RowGroup], begins: Sequence[np.ndarray], num_workers: int, seed: int
) -> tuple[Shard, ...]:
    """Assign groups of rows to workers without splitting a group.

    The row groups are put into one sequence in a seeded random order. Row groups that share a group of rows stay next
    to each other. The sequence is then divided at the starts of groups into parts that are as equal as possible.

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
        raise DataError(
            f"the dataset has {len(at)} groups, too few for {num_workers} workers: each worker needs at least one "
            "group, so use fewer workers"
        )
    total = sum(row_groups[index].rows for index in line)
    cuts = [0]
    for rank in range(1, num_workers):
        ideal = total * rank / num_workers
        after = int(np.searchsorted(at, ideal))
        nearest = after - (after == len(at) or (after > 0 and ideal - at[after - 1] <= at[after] - ideal))
        # `nearest` is the index of the group with which this worker should begin, so that the shards have nearly equal
        # sizes. The worker begins with another group if some worker would otherwise get no group.
        cuts.append(min(max(nearest, cuts[-1] + 1), len(at) - (num_workers - rank)))
    bounds = [*(int(at[cut]) for cut in cuts), total]
    return tuple(
        Shard(tuple(sorted(_ranges(row_groups, line, start, stop)))) for start, stop in itertools.pairwise(bounds)
    )


def _ranges(row_groups: Sequence[RowGroup], line: Sequence[int], start: int, stop: int) -> list[RowRange]:
    """Return the rows ``start <= i < stop`` of a sequence of row groups, as a list of row ranges.

    `line` contains the indexes of the row groups in `row_groups`. The rows are numbered from 0 across the whole
    sequence.
    """
    found = []
    offset = 0
    for index in line:
        group = row_groups[index]
        low, high = max(start - offset, 0), min(stop - offset, group.rows)
        if low < high:
            found.append(RowRange(group.path, group.index, low, high))
        offset += group.rows
    return found
