"""The row-group plan: which worker reads which rows. Pure: no I/O, no Arrow, nothing but footers' numbers.

Row groups are assigned whole, in a seeded shuffle, to the shard that has the fewest rows. Where that ends within
:data:`TOLERANCE` of even, it stands, and no row group is decoded twice. Where it does not (few or uneven row groups),
whole groups go only where they fit, and what fits nowhere is cut so that the shards differ by at most one row; that
costs at most ``num_workers - 1`` cuts, that is, one row group more to decode for a worker.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shoal.errors import DataError, InvalidArgumentError

# A shard may be this much larger or smaller than the mean if that spares a cut. Workers wait for the slowest in every
# round, so 1 % of rows costs at most 1 % of the time, while a cut costs the decoding of a whole row group once.
TOLERANCE = 0.01

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group as its footer describes it.

    Args:
        path: Canonical path or URI of the file.
        index: Number of the row group within the file, from 0.
        rows: Rows that can be assigned (of a random split: only those that belong to it).
        bytes: Uncompressed size of those rows in bytes, all columns.
    """

    path: str
    index: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True, order=True)
class RowRange:
    """The rows ``start <= i < stop`` of one row group, counted over the rows that the source shows."""

    path: str
    row_group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows in the range."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """One worker's part of a dataset: row ranges sorted by file and position, so that a file is opened once."""

    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        """Number of rows in the shard."""
        return sum(part.rows for part in self.ranges)


def plan_shards(row_groups: Sequence[RowGroup], num_workers: int, seed: int) -> tuple[Shard, ...]:
    """Deals row groups to workers.

    The same row groups, number of workers and seed give the same plan, in whatever order the groups are listed. A
    directory that moves keeps its plan too: only the order of the paths enters into it, never their text.

    Args:
        row_groups: All row groups of the dataset; (path, index) must be unique.
        num_workers: Number of shards to make.
        seed: Seed of the shuffle.

    Returns:
        One shard per worker, by rank. Every row is in exactly one; none is empty; shards are within 1 % of the mean, or
        differ by at most one row where a row group had to be cut.

    Raises:
        InvalidArgumentError: If `num_workers` is less than 1 or a row group is listed twice.
        DataError: If there are fewer rows than workers.
    """
    if num_workers < 1:
        raise InvalidArgumentError(f"num_workers must be at least 1, not {num_workers}")
    groups = sorted((group for group in row_groups if group.rows > 0), key=lambda group: (group.path, group.index))
    for one, other in itertools.pairwise(groups):
        if (one.path, one.index) == (other.path, other.index):
            raise InvalidArgumentError(f"row group {one.index} of {one.path} is listed twice: name each file once")
    total = sum(group.rows for group in groups)
    if total < num_workers:
        what = "no rows" if total == 0 else f"{total} row{'s' if total > 1 else ''}"
        raise DataError(f"the dataset has {what}, too few for {num_workers} worker{'s' if num_workers > 1 else ''}")

    groups = shuffled(groups, seed)
    parts = _deal_whole(groups, num_workers)
    if not _is_even([sum(part.rows for part in mine) for mine in parts]):
        parts = _deal_cut(groups, num_workers)
    return tuple(Shard(tuple(sorted(mine))) for mine in parts)


def shuffled(items: Iterable[_T], seed: int) -> list[_T]:
    """Fisher-Yates over ``random()``: of Python's generator, only that stream is promised never to change."""
    deck = list(items)
    rng = random.Random(seed)
    for i in range(len(deck) - 1, 0, -1):
        j = int(rng.random() * (i + 1))
        deck[i], deck[j] = deck[j], deck[i]
    return deck


def _whole(group: RowGroup) -> RowRange:
    return RowRange(group.path, group.index, 0, group.rows)


def _deal_whole(groups: Sequence[RowGroup], num_workers: int) -> list[list[RowRange]]:
    """Deals every group, uncut, to the shard with the fewest rows."""
    heap = [(0, rank) for rank in range(num_workers)]
    parts: list[list[RowRange]] = [[] for _ in range(num_workers)]
    for group in groups:
        load, rank = heapq.heappop(heap)
        parts[rank].append(_whole(group))
        heapq.heappush(heap, (load + group.rows, rank))
    return parts


def _is_even(loads: Sequence[int]) -> bool:
    mean = sum(loads) / len(loads)
    # At least one row each, however small the mean: an empty shard stops XGBoost and hangs LightGBM.
    return min(loads) >= 1 and all(abs(load - mean) <= TOLERANCE * mean for load in loads)


def _deal_cut(groups: Sequence[RowGroup], num_workers: int) -> list[list[RowRange]]:
    """Deals groups whole where they fit under the shard's quota, then cuts the rest to fill every quota exactly."""
    share, extra = divmod(sum(group.rows for group in groups), num_workers)
    # A heap of (-room, rank): the shard with the most room comes first, so a group that does not fit there fits
    # nowhere.
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
