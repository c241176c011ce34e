"""Which rows of a shard a DataLoader's worker hands out, and in which order they are read. Pure, as the plan is.

A shard's row ranges form a line. The line is cut among the workers of a DataLoader at multiples of the batch size, so
that there are as many batches with any number of workers; the cuts do not depend on the epoch, so that every row has
one worker even where the workers should not agree about it. Each worker then shuffles its own ranges.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.data.planning.row_groups import RowRange

# Row ranges that are shuffled into one another: so many at least, and more until there are so many rows; but no more
# than fit in so many bytes, unless one range alone is larger.
BUFFER_RANGES = 4
BUFFER_ROWS = 65_536
BUFFER_BYTES = 256 * 2**20

# Without a batch size rows go to workers in such multiples where there are enough of them. DataLoader makes batches in
# each worker by itself: where its batch size divides this, only one worker has a smaller last one, and len() is right.
_ROWS_TOGETHER = 1_024
# An uneven share costs a worker at most one such multiple in sixteen.
_MULTIPLES_PER_WORKER = 16


@dataclass(frozen=True, slots=True)
class Share:
    """A worker's part of the line: the rows ``start <= i < stop``, and the items that it makes of them."""

    start: int
    stop: int
    items: int


def count_items(rows: int, batch_size: int | None, drop_last_batch: bool) -> int:
    """Number of items that rows give: batches, or the rows themselves without a batch size."""
    if batch_size is None:
        return rows
    return rows // batch_size if drop_last_batch else -(-rows // batch_size)


def share_of(rows: int, batch_size: int | None, drop_last_batch: bool, worker: int, num_workers: int) -> Share:
    """Cuts the line among the workers of a DataLoader.

    Args:
        rows: Length of the line.
        batch_size: Rows per item; None: each row is one.
        drop_last_batch: Whether a last batch that is smaller is left out.
        worker: Which worker, from 0.
        num_workers: Number of workers.

    Returns:
        Its share. The workers' items sum up to :func:`count_items`; only the last worker has a smaller batch, or reads
        rows that it then drops.
    """
    multiple = batch_size or _together(rows, num_workers)
    units = count_items(rows, multiple, drop_last_batch and batch_size is not None)
    low, high = units * worker // num_workers, units * (worker + 1) // num_workers
    start = min(low * multiple, rows)
    stop = rows if worker == num_workers - 1 else min(high * multiple, rows)
    return Share(start, stop, stop - start if batch_size is None else high - low)


def evened(line: Sequence[RowRange], rows: int, first: int = 0) -> list[RowRange]:
    """Appends rows of the line to it once more until it is as long as wanted.

    Args:
        line: Row ranges; at least one.
        rows: Rows wanted; the line is never cut.
        first: Number of the range with which the repetition begins.
    """
    longer = list(line)
    missing = rows - sum(part.rows for part in line)
    turned = itertools.cycle([*line[first:], *line[:first]])
    while missing > 0:
        part = next(turned)
        taken = min(part.rows, missing)
        longer.append(RowRange(part.path, part.row_group, part.start, part.start + taken))
        missing -= taken
    return longer


def cut(line: Sequence[RowRange], start: int, stop: int) -> list[RowRange]:
    """The rows ``start <= i < stop`` of the line."""
    found = []
    offset = 0
    for part in line:
        low, high = max(start - offset, 0), min(stop - offset, part.rows)
        if low < high:
            found.append(RowRange(part.path, part.row_group, part.start + low, part.start + high))
        offset += part.rows
    return found


def windows(line: Sequence[RowRange], row_bytes: int) -> list[tuple[RowRange, ...]]:
    """Joins consecutive ranges to what is held, and shuffled, at a time.

    Args:
        line: Row ranges, shuffled.
        row_bytes: Size of a row in bytes, as decoded.

    Returns:
        The windows, in the line's order; within one the ranges are sorted, so that a file is opened once.
    """
    found: list[tuple[RowRange, ...]] = []
    held: list[RowRange] = []
    rows = 0
    for part in line:
        enough = len(held) >= BUFFER_RANGES and rows >= BUFFER_ROWS
        if held and (enough or (rows + part.rows) * row_bytes > BUFFER_BYTES):
            found.append(tuple(sorted(held)))
            held, rows = [], 0
        held.append(part)
        rows += part.rows
    return [*found, tuple(sorted(held))] if held else found


def rows_of(window: Sequence[RowRange]) -> int:
    """Number of rows in a window."""
    return sum(part.rows for part in window)


def random_bytes(*key: int | str) -> bytes:
    """32 bytes to seed a generator with, the same for the same key on any machine."""
    return hashlib.sha256("/".join(map(str, key)).encode()).digest()


def _together(rows: int, num_workers: int) -> int:
    multiple = 1
    while multiple < _ROWS_TOGETHER and 2 * multiple * num_workers * _MULTIPLES_PER_WORKER <= rows:
        multiple *= 2
    return multiple
