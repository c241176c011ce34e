"""Define row groups, row ranges and shards (the part of the rows that one worker reads), and what all plans have in
common."""

from __future__ import annotations

import hashlib
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


def is_even(loads: Sequence[int]) -> bool:
    """Return whether each shard has at least one row, and a size within :data:`TOLERANCE` of the mean."""
    mean = sum(loads) / len(loads)
    # Each shard needs at least one row, because an empty shard makes XGBoost fail and LightGBM hang.
    return min(loads) >= 1 and all(abs(load - mean) <= TOLERANCE * mean for load in loads)
