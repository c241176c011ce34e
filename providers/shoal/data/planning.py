"""Pure: which worker reads which rows. The only state is the rank of this process in its gang (the workers of one
training).

Row groups are dealt to boosting workers, whole groups of rows if the dataset has a group column; PyTorch workers read
contiguous rows; a random split divides row groups into parts.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite
from typing import TypeVar

from shoal.errors import DataError, InvalidArgumentError
from shoal.lazy_imports import np

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


def random_bytes(*key: int | str) -> bytes:
    """Compute 32 bytes to seed a random generator. The same key gives the same bytes on any machine."""
    return hashlib.sha256("/".join(map(str, key)).encode()).digest()


def seeded(*key: int | str) -> np.random.RandomState:
    """Return a random generator whose numbers depend only on the key.

    NumPy guarantees that the numbers of RandomState never change. Those of the newer class Generator may change with a
    NumPy release.
    """
    return np.random.RandomState(np.frombuffer(random_bytes(*key), dtype="<u4"))


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
        first: Index among this worker's rows of the first row that is read.
        rows: Number of rows that are read; None: all from `first` on.
    """

    counts: tuple[int, ...]
    index: int
    key: str
    first: int = 0
    rows: int | None = None

    def positions(self) -> np.ndarray:
        """Return the row numbers of this worker's rows in the row group, ascending, as an int64 array."""
        counts = np.array(self.counts)
        most = int(counts.max())
        blocks = -(-most // max(1, min(_RUN_ROWS, most // _MIN_RUNS)))
        lengths = np.diff(np.arange(blocks + 1)[:, None] * counts // blocks, axis=0)
        order = seeded(self.key).random_sample(lengths.shape).argsort(axis=1, kind="stable")
        ends = np.take_along_axis(lengths, order, axis=1).cumsum()
        mine = order.ravel() == self.index
        ends, lengths = ends[mine], lengths[:, self.index]
        # The i-th row of this worker is in the run whose first row is `ends - lengths`.
        positions: np.ndarray = np.arange(self.counts[self.index]) + np.repeat(ends - lengths.cumsum(), lengths)
        return positions[self.first : None if self.rows is None else self.first + self.rows]


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
        if self.deal is None:
            return self.stop - self.start
        return self.deal.counts[self.deal.index] - self.deal.first if self.deal.rows is None else self.deal.rows

    def piece(self, first: int, rows: int) -> RowRange:
        """Return successive rows of the range, of which the first has the given index."""
        if rows == self.rows:
            return self
        if self.deal is None:
            return replace(self, start=self.start + first, stop=self.start + first + rows)
        return replace(self, deal=replace(self.deal, first=self.deal.first + first, rows=rows))

    def positions(self) -> np.ndarray:
        """Return the row numbers of the range's rows in the row group, ascending, as an int64 array."""
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


def checked(row_groups: Iterable[RowGroup], num_workers: int) -> list[RowGroup]:
    """Return the row groups that have rows, in the order of the paths."""
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


def is_even(loads: Sequence[int]) -> bool:
    """Return whether each shard has at least one row, and a size within :data:`TOLERANCE` of the mean."""
    mean = sum(loads) / len(loads)
    # Each shard needs at least one row, because an empty shard makes XGBoost fail and LightGBM hang.
    return min(loads) >= 1 and all(abs(load - mean) <= TOLERANCE * mean for load in loads)


def plan_shards(row_groups: Sequence[RowGroup], num_workers: int, seed: int) -> tuple[Shard, ...]:
    """Assign the rows of all row groups to workers, so that all workers get nearly the same number of rows.

    The same row groups, number of workers and seed give the same plan. The order of `row_groups` does not matter.
    Moving the directory does not change the plan, because the plan depends on the order of the paths and not on their
    text.

    Returns:
        One shard per worker, by rank. Every row is in exactly one shard, and no shard is empty. The size of each shard
        is within 1 % of the mean; if a row group had to be divided, the sizes differ by at most one row.
    """
    groups = shuffled(checked(row_groups, num_workers), seed)
    # Each row group goes as a whole to the shard that has the fewest rows so far.
    heap = [(0, rank) for rank in range(num_workers)]
    parts: list[list[RowRange]] = [[] for _ in range(num_workers)]
    for group in groups:
        load, rank = heap[0]
        parts[rank].append(range_of(group))
        heapq.heapreplace(heap, (load + group.rows, rank))
    if not is_even([sum(part.rows for part in mine) for mine in parts]):
        parts = _assign_divided(groups, num_workers)
    return tuple(Shard(tuple(sorted(mine))) for mine in parts)


def range_of(group: RowGroup) -> RowRange:
    """Return the range of all rows of a row group."""
    return RowRange(group.path, group.index, 0, group.rows)


def gathered(ranges: Iterable[RowRange], least: int) -> Iterator[list[RowRange]]:
    """Yield successive row ranges together, as few as have `least` rows; the last ones may have fewer."""
    together: list[RowRange] = []
    for part in ranges:
        together.append(part)
        if sum(each.rows for each in together) >= least:
            yield together
            together = []
    if together:
        yield together


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
            parts[rank].append(range_of(group))
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


FAIR_GROUPS = 8
"""Number of row groups per worker from which whole row groups are a fair sample of a dataset.

With eight row groups that are spread over a table in time order, the means of the workers differ by at most one eighth
of the table's trend.
"""

# A gang is divided into subgangs, of which each worker reads the row groups of the whole subgang. These numbers limit
# the size of subgangs, and so the extra reads: a subgang has four workers, or as many as it needs to get four row
# groups. If the number of workers is not a multiple of this size, they are larger, but less than twice as large.
_SUBGANG_WORKERS = 4
_SUBGANG_GROUPS = 4


def deal_rows(row_groups: Sequence[RowGroup], num_workers: int, seed: int) -> tuple[Shard, ...]:
    """Deal the rows of all row groups to workers, so that each worker gets a fair sample and nearly as many rows.

    As with :func:`shoal.data.planning.plan_shards`, the plan depends only on the rows of the row groups, the
    order of their paths, the number of workers and the seed.

    Returns:
        One shard per worker, by rank, with at most one row range per row group. Every row is in exactly one shard, and
        no shard is empty. The sizes differ by at most one row, or each size is within 1 % of the mean. If the row
        groups have equal sizes, a worker reads at most eight row groups, or less than eight times its share of the row
        groups, whichever is more.
    """
    groups = checked(row_groups, num_workers)
    for_fair_sample = -(-FAIR_GROUPS * num_workers // len(groups))
    limit = max(_SUBGANG_WORKERS, -(-_SUBGANG_GROUPS * num_workers // len(groups)))
    number = max(1, num_workers // min(for_fair_sample, limit))
    bounds = [num_workers * i // number for i in range(number + 1)]
    subgangs = [range(first, after) for first, after in itertools.pairwise(bounds)]
    dealt = _deal_whole(groups, [len(subgang) for subgang in subgangs], seed)
    sizes = [(sum(mine.values()), len(subgang)) for mine, subgang in zip(dealt, subgangs, strict=True)]
    if not is_even([(rows + place) // workers for rows, workers in sizes for place in range(workers)]):
        # The rows that each subgang should get, so that the shards of all workers differ by at most one row.
        share, extra = divmod(sum(group.rows for group in groups), num_workers)
        _even_out(dealt, [len(subgang) * share + sum(rank < extra for rank in subgang) for subgang in subgangs])
    parts: list[list[RowRange]] = [[] for _ in range(num_workers)]
    loads = [0] * num_workers
    for i, group in enumerate(groups):
        counts = [0] * num_workers
        for mine, subgang in zip(dealt, subgangs, strict=True):
            if i not in mine:
                continue
            each, extra = divmod(mine[i], len(subgang))
            for place, rank in enumerate(sorted(subgang, key=lambda rank: loads[rank])):
                counts[rank] = each + (place < extra)
        readers = [rank for rank in range(num_workers) if counts[rank]]
        shares = tuple(counts[rank] for rank in readers)
        for place, rank in enumerate(readers):
            deal = Deal(shares, place, f"{seed}/{i}") if len(readers) > 1 else None
            parts[rank].append(RowRange(group.path, group.index, 0, group.rows, deal))
            loads[rank] += counts[rank]
    return tuple(Shard(tuple(mine)) for mine in parts)


def _deal_whole(groups: Sequence[RowGroup], sizes: Sequence[int], seed: int) -> list[dict[int, int]]:
    """Deal whole row groups to subgangs, and return for each a dict: index of the row group -> number of its rows.

    Of each N successive row groups, each of N subgangs gets one, if the row groups have equal sizes. Which one depends
    on the seed, so that a period in the data, such as a week, has no effect. Otherwise each row group goes to the
    subgang that has the fewest rows per worker so far.
    """
    place = {group: i for i, group in enumerate(shuffled(range(len(groups)), seed))}
    dealt: list[dict[int, int]] = [{} for _ in sizes]
    heap = [(0.0, subgang) for subgang in range(len(sizes))]
    for start in range(0, len(groups), len(sizes)):
        block = range(start, min(start + len(sizes), len(groups)))
        for group in sorted(block, key=place.__getitem__):
            load, subgang = heap[0]
            dealt[subgang][group] = groups[group].rows
            heapq.heapreplace(heap, (load + groups[group].rows / sizes[subgang], subgang))
    return dealt


def _even_out(dealt: Sequence[dict[int, int]], capacities: Sequence[int]) -> None:
    """Move rows from subgangs that have too many to those that have too few. At most N - 1 row groups are then divided
    between N subgangs."""
    room = [capacity - sum(mine.values()) for mine, capacity in zip(dealt, capacities, strict=True)]
    short = [subgang for subgang, rows in enumerate(room) if rows > 0]
    for subgang, mine in enumerate(dealt):
        # The largest row groups come first, so that as few row groups as possible are divided.
        for group in sorted(mine, key=lambda group: -mine[group]):
            while room[subgang] < 0 and mine[group]:
                other = short[-1]
                moved = min(-room[subgang], room[other], mine[group])
                mine[group] -= moved
                dealt[other][group] = dealt[other].get(group, 0) + moved
                room[subgang] += moved
                room[other] -= moved
                if not room[other]:
                    short.pop()


def plan_groups(
    row_groups: Sequence[RowGroup], begins: Sequence[np.ndarray], num_workers: int, seed: int
) -> tuple[Shard, ...]:
    """Assign groups of rows to workers without splitting a group.

    The row groups are put into one sequence in a seeded random order. Row groups that share a group of rows stay next
    to each other. The sequence is then divided at the starts of groups into parts that are as equal as possible.
    """
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
    bounds = [*map(int, at[cuts]), total]
    whole = [range_of(row_groups[index]) for index in line]
    return tuple(Shard(tuple(sorted(cut(whole, start, stop)))) for start, stop in itertools.pairwise(bounds))


def cut(line: Sequence[RowRange], start: int, stop: int) -> list[RowRange]:
    """Return the rows ``start <= i < stop`` of a list of row ranges, as a new list of row ranges.

    The rows are numbered from 0 across the whole list.
    """
    found = []
    offset = 0
    for part in line:
        low, high = max(start - offset, 0), min(stop - offset, part.rows)
        if low < high:
            found.append(RowRange(part.path, part.row_group, part.start + low, part.start + high))
        offset += part.rows
    return found


@dataclass(frozen=True, slots=True)
class Split:
    """One part of a random split, described by the weights of all parts, the index of this part and the seed.

    Args:
        weights: Relative sizes of all the parts.
        index: Index of this part, from 0.
        seed: Seed of the split.
    """

    weights: tuple[float, ...]
    index: int
    seed: int

    def __post_init__(self) -> None:
        if not self.weights or not all(isfinite(weight) and weight > 0 for weight in self.weights):
            raise InvalidArgumentError(f"the weights of a split must be positive numbers, not {list(self.weights)}")
        if not 0 <= self.index < len(self.weights):
            raise InvalidArgumentError(
                f"a split into {len(self.weights)} parts has no part {self.index}: the index must be from 0 to "
                f"{len(self.weights) - 1}"
            )

    def counts(self, before: int, rows: int) -> list[int]:
        """Compute how many rows of one row group each part of the random split gets."""
        # The weights are converted to exact fractions, such as 29/100 for 0.29. With floats, 0.29 * 100 is
        # 28.999999999999996, and a row would be missing.
        weights = [Fraction(str(weight)) for weight in self.weights]
        counts = []
        for part, weight in enumerate(weights):
            share = weight / sum(weights[part:])
            taken = int(before * share)
            count = int((before + rows) * share) - taken
            counts.append(count)
            before, rows = before - taken, rows - count
        return counts


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """Rows of one row group that remain after several random splits were applied one after the other.

    Args:
        rows: Number of rows of the row group in the file.
        steps: For each split, in the order of application: the split, and the number of rows that the split divides in
            all previous row groups.
        key: Identifier of the row group that does not depend on the name of its directory.
    """

    rows: int
    steps: tuple[tuple[Split, int], ...]
    key: str

    @property
    def selected(self) -> int:
        """Number of rows of this row group that remain after all random splits were applied."""
        rows = self.rows
        for split, before in self.steps:
            rows = split.counts(before, rows)[split.index]
        return rows

    def indices(self) -> np.ndarray:
        """Return the positions of the rows that remain after all random splits were applied, as an int64 array in
        ascending order."""
        indices = np.arange(self.rows)
        for level, (split, before) in enumerate(self.steps):
            order = seeded(split.seed, level, self.key).permutation(len(indices))
            counts = split.counts(before, len(indices))
            start = sum(counts[: split.index])
            indices = indices[np.sort(order[start : start + counts[split.index]])]
        return indices


def select(rows: Sequence[int], keys: Sequence[str], splits: Sequence[Split]) -> list[GroupSelection]:
    """Apply several random splits one after the other, and return the remaining rows of each row group."""
    steps: list[tuple[tuple[Split, int], ...]] = [() for _ in rows]
    left = list(rows)
    for split in splits:
        before = 0
        for i, count in enumerate(left):
            steps[i] = (*steps[i], (split, before))
            left[i] = split.counts(before, count)[split.index]
            before += count
    return [GroupSelection(count, step, key) for count, step, key in zip(rows, steps, keys, strict=True)]


@dataclass(frozen=True, slots=True)
class GangPosition:
    """Rank of a process in its gang (the workers of one training), size of the gang, and seed for the assignment of
    rows to workers.

    All workers compute the same assignment (the shard plan) with the same seed.
    """

    rank: int
    """Rank of the process, from 0."""
    world_size: int
    """Number of workers in the gang."""
    seed: int = 0
    """Seed of the shard plan, the same in all workers."""


ALONE = GangPosition(rank=0, world_size=1)

# The position is stored in a global variable and not in a context variable, because a new thread begins with an empty
# context. With a context variable, a thread that the user starts in a worker would get rank 0 and read all rows.
_position = ALONE


def current_position() -> GangPosition:
    """Return the rank of this process and the size of its gang (the workers of one training).

    A process that belongs to no gang has rank 0 in a gang of size 1.
    """
    return _position


def set_current_position(position: GangPosition) -> None:
    """Set the rank of this process and the size of its gang (the workers of one training).

    The training package calls this function in each worker.
    """
    global _position
    _position = position
