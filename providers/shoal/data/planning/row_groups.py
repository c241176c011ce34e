"""Define row groups, row ranges and shards, and assign row groups to the workers of a PyTorch training, using only the
row counts from the Parquet footers.

A shard is the part of the rows that one worker reads. The workers of a boosting training get other shards; see
:mod:`shoal.data.planning.dealing`. Here, the row groups are shuffled with a seed, and each whole row group is
assigned to the shard that has the fewest rows so far. If the sizes of all shards are then within :data:`TOLERANCE` of
the mean, the plan is ready, and no row group is decoded twice. Otherwise (with few or uneven row groups) a whole row
group is assigned only if it fits into a shard's equal share of the rows. The remaining row groups are divided between
shards, so that the sizes of the shards differ by at most one row. At most ``num_workers - 1`` divisions are needed.
Each division means that one more worker decodes the same row group.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from shoal.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np

# Largest allowed difference between the number of rows of a shard and the mean of all shards, as a fraction of the
# mean. If whole row groups cannot be assigned within this difference, some row groups are divided between shards.
# Workers wait for the slowest worker in every round, so 1 % more rows costs at most 1 % more time. Dividing a row group
# costs more, because a second worker has to decode the whole row group.
TOLERANCE = 0.01

# Length of the runs in which the rows of a row group are dealt to workers. Rows that are so close together rarely
# differ much, even if the row group is sorted. To keep one half of 1 M x 28 rows took 0.01 s with runs of 64 rows, and
# 0.15 s with single rows; decoding the row group took 0.13 s.
_RUN_ROWS = 64
# Minimum number of runs that a worker gets of a row group, if it gets enough rows. Small row groups are therefore dealt
# in shorter runs, down to single rows. With only 64 runs per worker, the means of a value with a period of 128 rows
# differed by 10 %.
_MIN_RUNS = 1_024

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Position of a row group in its file, and its number of rows, from the footer.

    Args:
        path: Canonical path or URI of the file.
        index: Index of the row group within the file, from 0.
        rows: Number of rows that can be assigned. In a part of a random split, only the rows of this part count.
    """

    path: str
    index: int
    rows: int


@dataclass(frozen=True, slots=True, order=True)
class Deal:
    """Share of one worker in the rows of a row group that several workers read, each of them every few rows.

    The row group is divided into blocks. Each block contains a short run of consecutive rows for each worker, in a
    random order, so that all workers get an equally fair sample of a sorted row group.

    Args:
        counts: Number of rows of each worker.
        index: Index of this worker in `counts`.
        key: Seed of the random orders.
    """

    counts: tuple[int, ...]
    index: int
    key: str

    def positions(self) -> np.ndarray:
        """Return the row numbers of this worker's rows in the row group, ascending, as an int64 array."""
        import numpy as np

        counts = np.array(self.counts)
        most = int(counts.max())
        blocks = -(-most // max(1, min(_RUN_ROWS, most // _MIN_RUNS)))
        lengths = np.diff(np.arange(blocks + 1)[:, None] * counts // blocks, axis=0)
        # NumPy guarantees that the random numbers of RandomState never change.
        digest = hashlib.sha256(self.key.encode()).digest()
        random_numbers = np.random.RandomState(np.frombuffer(digest, dtype="<u4")).random_sample(lengths.shape)
        order = random_numbers.argsort(axis=1, kind="stable")
        ends = np.take_along_axis(lengths, order, axis=1).cumsum()
        mine = order.ravel() == self.index
        ends, lengths = ends[mine], lengths[:, self.index]
        # The i-th row of this worker is in the run whose first row is `ends - lengths`.
        positions: np.ndarray = np.arange(self.counts[self.index]) + np.repeat(ends - lengths.cumsum(), lengths)
        return positions


@dataclass(frozen=True, slots=True, order=True)
class RowRange:
    """Rows of one row group: the rows ``start <= i < stop``, or the share of one worker in these rows.

    If the dataset has filters or is a part of a random split, the row numbers count only the rows that match, or the
    rows of this part.

    Args:
        path: Canonical path or URI of the file.
        row_group: Index of the row group within the file, from 0.
        start: First row.
        stop: Row after the last row.
        deal: Which of these rows belong to the range, if the whole row group was dealt to several workers; None: all.
    """

    path: str
    row_group: int
    start: int
    stop: int
    deal: Deal | None = None

    @property
    def rows(self) -> int:
        """Number of rows in the range."""
        return self.stop - self.start if self.deal is None else self.deal.counts[self.deal.index]

    def positions(self) -> np.ndarray:
        """Return the row numbers of the range's rows in the row group, ascending, as an int64 array."""
        import numpy as np

        return np.arange(self.start, self.stop) if self.deal is None else self.deal.positions()

    def row_number(self, index: int) -> int:
        """Return the row number in the row group of the range's row with the given index, for error messages."""
        return self.start + index if self.deal is None else int(self.deal.positions()[index])


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows that one worker reads, as row ranges (rows of one row group).

    The ranges are sorted by file and position, so that each file is opened only once.
    """

    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        """Number of rows in the shard."""
        return sum(part.rows for part in self.ranges)


def plan_shards(row_groups: Sequence[RowGroup], num_workers: int, seed: int) -> tuple[Shard, ...]:
    """Assign the rows of all row groups to workers, so that all workers get nearly the same number of rows.

    The same row groups, number of workers and seed give the same plan. The order of `row_groups` does not matter.
    Moving the directory does not change the plan, because the plan depends on the order of the paths and not on their
    text.

    Args:
        row_groups: All row groups of the dataset; (path, index) must be unique.
        num_workers: Number of shards.
        seed: Seed of the shuffle.

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


def checked(row_groups: Iterable[RowGroup], num_workers: int) -> list[RowGroup]:
    """Return the row groups that have rows, in the order of the paths.

    Raises:
        InvalidArgumentError: If `num_workers` is less than 1 or a row group is listed twice.
        DataError: If there are fewer rows than workers.
    """
    if num_workers < 1:
        raise InvalidArgumentError(f"num_workers must be at least 1, not {num_workers}")
    groups = sorted((group for group in row_groups if group.rows > 0), key=lambda group: (group.path, group.index))
    for one, other in itertools.pairwise(groups):
        if (one.path, one.index) == (other.path, other.index):
            raise InvalidArgumentError(f"row group {one.index} of {one.path} is listed twice: list each file only once")
    total = sum(group.rows for group in groups)
    if total < num_workers:
        what = "no rows" if total == 0 else f"{total} row{'s' if total > 1 else ''}"
        raise DataError(
            f"the dataset has {what}, too few for {num_workers} worker{'s' if num_workers > 1 else ''}: each worker "
            "needs at least one row, so use fewer workers"
        )
    return groups


def shuffled(items: Iterable[_T], seed: int) -> list[_T]:
    """Return the items in a random order that depends only on the seed and is the same in every version of Python.

    The function implements a Fisher-Yates shuffle with ``random()``. Python guarantees that the numbers from
    ``random()`` never change, but gives no such guarantee for ``random.shuffle()``.
    """
    deck = list(items)
    rng = random.Random(seed)
    for i in range(len(deck) - 1, 0, -1):
        j = int(rng.random() * (i + 1))
        deck[i], deck[j] = deck[j], deck[i]
    return deck


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


def is_even(loads: Sequence[int]) -> bool:
    """Return whether each shard has at least one row, and a size within :data:`TOLERANCE` of the mean."""
    mean = sum(loads) / len(loads)
    # Each shard needs at least one row, because an empty shard makes XGBoost fail and LightGBM hang.
    return min(loads) >= 1 and all(abs(load - mean) <= TOLERANCE * mean for load in loads)


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
