"""Compute which rows of a shard each DataLoader worker returns, and in which order.

The sequence of row ranges of a shard is called the line in this module. The line is divided among the workers of a
DataLoader at multiples of the batch size, so that the number of batches does not depend on the number of workers. The
positions of these divisions do not depend on the epoch, so that exactly one worker returns each row even if the workers
are in different epochs. Each worker then shuffles the row ranges of its share.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import get_worker_info

from shoal.data.planning import RowRange

# These numbers determine the size of a window. A window is a group of row ranges that are in memory at the same time,
# and whose rows are shuffled together. A window has at least BUFFER_RANGES ranges and at least BUFFER_ROWS rows, unless
# the next range would make the window larger than BUFFER_BYTES. A range that is larger than BUFFER_BYTES is a window by
# itself.
BUFFER_RANGES = 4
BUFFER_ROWS = 65_536
BUFFER_BYTES = 256 * 2**20

# If the dataset has no batch size, each DataLoader worker builds batches from its own rows. In a large dataset, each
# worker except the last gets a multiple of 1,024 rows; in a small dataset, a multiple of a smaller power of two. If
# DataLoader's batch size divides this power of two, these workers have only complete batches, and ``len()`` of the
# DataLoader returns the right number of batches.
_ROWS_TOGETHER = 1_024
# Rows are given to DataLoader workers in blocks of equal size. If the dataset has enough rows, each worker gets at
# least this number of blocks, so that the numbers of rows of two workers differ by at most one sixteenth.
_MULTIPLES_PER_WORKER = 16


@dataclass(frozen=True, slots=True)
class Share:
    """The rows ``start <= i < stop`` that one DataLoader worker reads, and the number of items built from them.

    The rows are numbered from 0 over all row ranges of the shard.
    """

    start: int
    stop: int
    items: int


def count_items(rows: int, batch_size: int | None, drop_last_batch: bool) -> int:
    """Compute the number of items that a dataset of `rows` rows returns: batches, or single rows without a batch
    size."""
    if batch_size is None:
        return rows
    return rows // batch_size if drop_last_batch else -(-rows // batch_size)


def share_of(rows: int, batch_size: int | None, drop_last_batch: bool, worker: int, num_workers: int) -> Share:
    """Compute which rows of a shard one DataLoader worker returns."""
    multiple = batch_size or _together(rows, num_workers)
    units = count_items(rows, multiple, drop_last_batch and batch_size is not None)
    low, high = units * worker // num_workers, units * (worker + 1) // num_workers
    start = min(low * multiple, rows)
    stop = rows if worker == num_workers - 1 else min(high * multiple, rows)
    return Share(start, stop, stop - start if batch_size is None else high - low)


def evened(line: Sequence[RowRange], rows: int, first: int = 0) -> list[RowRange]:
    """Repeat row ranges of a shard until the shard has `rows` rows, so that all workers of a training have the same
    number of rows.
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


def shuffled_windows(line: Sequence[RowRange], row_bytes: int) -> list[tuple[RowRange, ...]]:
    """Divide row ranges into windows. The rows of a window are in memory at the same time and shuffled together."""
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
    """Return the number of rows in a window (row ranges whose rows are shuffled together)."""
    return sum(part.rows for part in window)


def random_bytes(*key: int | str) -> bytes:
    """Compute 32 bytes to seed a random generator. The same key gives the same bytes on any machine."""
    return hashlib.sha256("/".join(map(str, key)).encode()).digest()


def _together(rows: int, num_workers: int) -> int:
    multiple = 1
    while multiple < _ROWS_TOGETHER and 2 * multiple * num_workers * _MULTIPLES_PER_WORKER <= rows:
        multiple *= 2
    return multiple


# Number of slots (64-bit numbers in shared memory): one for the main process and one for each DataLoader worker. 1,023
# workers are more than a machine has cores, and the slots take only 8 KiB.
_SLOTS = 1 + 1_023
_COUNT_BITS = 32
_COUNT = (1 << _COUNT_BITS) - 1


class EpochCounter:
    """Counter of epochs, from 0. All copies of a counter in the worker processes of a DataLoader share one count."""

    def __init__(self) -> None:
        self._slots = torch.zeros(_SLOTS, dtype=torch.int64).share_memory_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # In a DataLoader worker that was started by "spawn", the unpickled `_slots` already share memory with the main
        # process. Any other unpickled counter gets shared memory of its own, and therefore counts separately.
        if not self._slots.is_shared():
            self._slots.share_memory_()

    def next(self) -> int:
        """Return the number of the epoch that the next iterator of this process will begin."""
        slot, round_ = _slot_and_round()
        slots = self._slots.numpy().copy()
        begun, rounds = slots & _COUNT, slots >> _COUNT_BITS
        mine = begun[slot] if rounds[slot] == round_ else 0
        # If another worker of the same round (set of workers) has already begun an epoch, this worker begins the same
        # epoch, because all workers of a round read parts of one epoch.
        joined = begun[(rounds == round_) & (begun > mine)]
        return int(joined.max()) - 1 if len(joined) else int(begun.max())

    def begin(self, epoch: int) -> None:
        """Record in shared memory that this process has begun an epoch."""
        slot, round_ = _slot_and_round()
        self._slots.numpy()[slot] = round_ << _COUNT_BITS | (epoch + 1)

    def set(self, epoch: int) -> None:
        """Set the number of the epoch that this process begins next.

        The other workers of the DataLoader begin the same epoch, unless one of them has already begun an epoch.
        """
        slot, round_ = _slot_and_round()
        slots = self._slots.numpy()
        slots[(slots >> _COUNT_BITS) != round_] = 0
        slots[slot] = round_ << _COUNT_BITS | epoch

    def begun_by_workers(self) -> bool:
        """Return whether workers of a DataLoader, and not the main process, began the most recent epoch."""
        begun = self._slots.numpy() & _COUNT
        return bool(begun[1:].max() > begun[0])


def _slot_and_round() -> tuple[int, int]:
    """Return the index of this process's counter in shared memory, and a number that identifies the set of DataLoader
    workers to which this process belongs.

    In the main process, the index and the number are 0. The number is below 2**31.
    """
    worker = get_worker_info()
    if worker is None:
        return 0, 0
    # For each iteration over a DataLoader, PyTorch draws one random number. The seed of a worker is this number plus
    # the worker's index. So the seed minus the index identifies the iteration.
    return 1 + worker.id, (worker.seed - worker.id) % (2**31 - 2) + 1
