"""Assign row groups to the workers of a PyTorch training, using only the row counts from the Parquet footers.

The workers of a boosting training get other shards; see :mod:`shoal.data.planning.dealing`. The row groups are shuffled
with a seed, and each whole row group is assigned to the shard that has the fewest rows so far. If the sizes of all
shards are then within `TOLERANCE` of the mean, the plan is ready, and no row group is decoded twice. Otherwise (with
few or uneven row groups) a whole row group is assigned only if it fits into a shard's equal share of the rows. The
remaining row groups are divided between shards, so that the sizes of the shards differ by at most one row. At most
``num_workers - 1`` divisions are needed. Each division means that one more worker decodes the same row group.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from shoal.data.planning.row_groups import RowGroup, RowRange, Shard, checked, is_even, shuffled


def plan_shards(row_groups: Sequence[RowGroup], num_workers: int, seed: int) -> tuple[Shard, ...]:
    """Assign the rows of all row groups to workers, so that all workers get nearly the same number of rows.

    The same row groups, number of workers and seed give the same plan. The order of `row_groups` does not matter.
    Moving the directory does not change the plan, because the plan depends on the order of the paths and not on their
    text.

    Returns:
        One shard per worker, by rank. Every row is in exactly one shard, and no shard is empty. The size of each shard
        is within 1 % of the mean; if a row group had to be divided, the sizes differ by at most one row.

    Raises:
        InvalidArgumentError: If `num_workers` is less than 1 or a row group is listed twice.
        DataError: If there are fewer rows than workers.
    """
    groups = shuffled(checked(row_groups, num_workers), seed)
    parts = _assign_whole(groups, num_workers)
    if not is_even([sum(part.rows for part in mine) for mine in parts]):
        parts = _assign_divided(groups, num_workers)
    return tuple(Shard(tuple(sorted(mine))) for mine in parts)


def _whole(group: RowGroup) -> RowRange:
    return RowRange(group.path, group.index, 0, group.rows)


def _assign_whole(groups: Sequence[RowGroup], num_workers: int) -> list[list[RowRange]]:
    """Assign every row group as a whole to the shard that has the fewest rows so far."""
    heap = [(0, rank) for rank in range(num_workers)]
    parts: list[list[RowRange]] = [[] for _ in range(num_workers)]
    for group in groups:
        load, rank = heapq.heappop(heap)
        parts[rank].append(_whole(group))
        heapq.heappush(heap, (load + group.rows, rank))
    return parts


def _assign_divided(groups: Sequence[RowGroup], num_workers: int) -> list[list[RowRange]]:
    """Assign row groups to shards, so that the sizes of the shards differ by at most one row.

    A row group that fits into a shard is assigned as a whole. The other row groups are divided between shards.
    """
    share, extra = divmod(sum(group.rows for group in groups), num_workers)
    # The heap contains (-room, rank) for each shard, where room is the number of rows that the shard can still get. The
    # shard with the most room comes first. A row group that is too large for the first shard is too large for all
    # shards, and is divided later.
    heap = [(-(share + (rank < extra)), rank) for rank in range(num_workers)]
    heapq.heapify(heap)
    parts: list[list[RowRange]] = [[] for _ in range(num_workers)]
    left: list[RowGroup] = []
    for group in groups:
        room, rank = heap[0]
        if group.rows > -room:
            left.append(group)
        else:
            heapq.heapreplace(heap, (room + group.rows, rank))
            parts[rank].append(_whole(group))
    gaps = sorted(((rank, -room) for room, rank in heap if room), reverse=True)
    for group in left:
        start = 0
        while start < group.rows:
            rank, room = gaps.pop()
            stop = min(group.rows, start + room)
            parts[rank].append(RowRange(group.path, group.index, start, stop))
            if stop - start < room:
                gaps.append((rank, room - (stop - start)))
            start = stop
    return parts
