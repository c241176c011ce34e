"""Plan which rows of a shard each DataLoader worker returns, and in which order, without I/O.

The row ranges of a shard form a line. The line is cut among the workers of a DataLoader at multiples of the batch size,
so that the number of batches does not depend on the number of workers. The cuts do not depend on the epoch, so that
exactly one worker returns each row even if the workers disagree about the epoch. Each worker then shuffles the row
ranges of its share.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.data.planning.row_groups import RowRange

# Size of a window: the row ranges whose rows are shuffled together. A window has at least BUFFER_RANGES ranges and at
# least BUFFER_ROWS rows, but it ends earlier if the next range would exceed BUFFER_BYTES. A range that is larger than
# BUFFER_BYTES is a window by itself.
BUFFER_RANGES = 4
BUFFER_ROWS = 65_536
BUFFER_BYTES = 256 * 2**20

# Without a batch size, workers get rows in multiples of this number if there are enough rows. DataLoader then builds
# batches separately in each worker. If its batch size divides this number, only one worker has a smaller last batch,
# and len() is correct.
_ROWS_TOGETHER = 1_024
# Each worker gets at least this many multiples, so that shares differ by at most one sixteenth.
_MULTIPLES_PER_WORKER = 16


@dataclass(frozen=True, slots=True)
class Share:
    """A worker's part of the line: the rows ``start <= i < stop``, and the number of items built from these rows."""

    start: int
    stop: int
    items: int


def count_items(rows: int, batch_size: int | None, drop_last_batch: bool) -> int:
    """Return the number of items in `rows` rows: batches, or single rows without a batch size."""
    if batch_size is None:
        return rows
    return rows // batch_size if drop_last_batch else -(-rows // batch_size)


def share_of(rows: int, batch_size: int | None, drop_last_batch: bool, worker: int, num_workers: int) -> Share:
    """Compute one worker's share of the line.

    Args:
        rows: Number of rows in the line.
        batch_size: Number of rows per item; None if each row is an item.
        drop_last_batch: Whether to leave out the last batch if it has fewer rows.
        worker: Index of the worker, from 0.
        num_workers: Number of workers.

    Returns:
        The worker's share. The sum of all workers' items is :func:`count_items`. Only the last worker may have a
        smaller batch, or read rows that are then dropped.
    """
    multiple = batch_size or _together(rows, num_workers)
    units = count_items(rows, multiple, drop_last_batch and batch_size is not None)
    low, high = units * worker // num_workers, units * (worker + 1) // num_workers
    start = min(low * multiple, rows)
    stop = rows if worker == num_workers - 1 else min(high * multiple, rows)
    return Share(start, stop, stop - start if batch_size is None else high - low)


def evened(line: Sequence[RowRange], rows: int, first: int = 0) -> list[RowRange]:
    """Lengthen a line to `rows` rows by repeating rows of the line.

    Args:
        line: Row ranges; at least one.
        rows: Wanted number of rows. A line that already has more rows is not cut.
        first: Index of the row range with which the repetition begins.

    Returns:
        The row ranges of the line, followed by the repeated row ranges.
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
    """Return the row ranges of the rows ``start <= i < stop`` of the line."""
    found = []
    offset = 0
    for part in line:
        low, high = max(start - offset, 0), min(stop - offset, part.rows)
        if low < high:
            found.append(RowRange(part.path, part.row_group, part.start + low, part.start + high))
        offset += part.rows
    return found


def windows(line: Sequence[RowRange], row_bytes: int) -> list[tuple[RowRange, ...]]:
    """Divide a line into windows: consecutive row ranges that are in memory, and shuffled, together.

    Args:
        line: Row ranges, shuffled.
        row_bytes: Decoded size of a row in bytes.

    Returns:
        The windows, in the line's order. The row ranges within a window are sorted, so that each file is opened once.
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
    """Return the number of rows in a window."""
    return sum(part.rows for part in window)


def random_bytes(*key: int | str) -> bytes:
    """Return 32 bytes to seed a random generator with, the same for the same key on any machine."""
    return hashlib.sha256("/".join(map(str, key)).encode()).digest()


def _together(rows: int, num_workers: int) -> int:
    multiple = 1
    while multiple < _ROWS_TOGETHER and 2 * multiple * num_workers * _MULTIPLES_PER_WORKER <= rows:
        multiple *= 2
    return multiple
