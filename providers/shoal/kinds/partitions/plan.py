"""Pure: which rows a worker divides together, how many buckets there are, and which worker processes which buckets.

The plan depends only on the dataset, so that another attempt, with another number of workers, can use what an earlier
one has written.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.data.planning import RowGroup, RowRange

_MOST_CHUNKS = 64
"""Number of chunks into which a dataset with many row groups is divided. Each worker that processes a bucket opens the
files of all chunks."""

_LEAST_CHUNK_ROWS = 100_000
"""Rows that a chunk has at least, if the dataset has so many. A file of fewer rows costs more to open than to read."""

_BUCKET_ROWS = 20_000
_LEAST_BUCKETS, _MOST_BUCKETS = 32, 1024
"""Rows of a bucket for which the number of buckets is chosen, and the limits of this number. The buckets are units of
work, so there have to be many more than workers; each costs about 5 ms."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that one worker reads and divides together: whole row groups that follow each other.

    Args:
        number: Number of the chunk, from 0, in the order of the dataset.
        ranges: The rows.
    """

    number: int
    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        """Number of rows of the chunk."""
        return sum(part.rows for part in self.ranges)


def chunks_of(row_groups: Sequence[RowGroup]) -> tuple[Chunk, ...]:
    """Divide the row groups of a dataset into chunks, in the order of the dataset."""
    least = max(_LEAST_CHUNK_ROWS, -(-sum(group.rows for group in row_groups) // _MOST_CHUNKS))
    chunks: list[Chunk] = []
    pending: list[RowRange] = []
    for group in row_groups:
        if group.rows:
            pending.append(RowRange(group.path, group.index, 0, group.rows))
        if pending and sum(part.rows for part in pending) >= least:
            chunks.append(Chunk(len(chunks), tuple(pending)))
            pending = []
    if pending:
        chunks.append(Chunk(len(chunks), tuple(pending)))
    return tuple(chunks)


def number_of_buckets(rows: int) -> int:
    """Return the number of buckets for a dataset with so many rows."""
    return min(max(rows // _BUCKET_ROWS, _LEAST_BUCKETS), _MOST_BUCKETS)


def largest_first(rows: Mapping[int, int]) -> list[int]:
    """Return the buckets in the order in which they are processed, from the number of rows of each bucket."""
    return sorted((bucket for bucket in rows if rows[bucket]), key=lambda bucket: (-rows[bucket], bucket))


def dealt(rows: Mapping[int, int], num_workers: int) -> tuple[tuple[int, ...], ...]:
    """Assign items, such as buckets, to workers: the largest first, each to the worker with the fewest rows so far."""
    loads = [(0, rank) for rank in range(num_workers)]
    shares: list[list[int]] = [[] for _ in range(num_workers)]
    for item in largest_first(rows):
        load, rank = heapq.heappop(loads)
        shares[rank].append(item)
        heapq.heappush(loads, (load + rows[item], rank))
    return tuple(map(tuple, shares))
