"""Define `TorchDataset`, a torch dataset that returns the rows of Parquet files as tensors.

The dataset shuffles its epochs with a seed, can resume an epoch, and works in the worker processes of a DataLoader.

The sequence of row ranges of a shard is called the line in this module. The line is divided among the workers of a
DataLoader at multiples of the batch size, so that the number of batches does not depend on the number of workers. The
positions of these divisions do not depend on the epoch, so that exactly one worker returns each row even if the workers
are in different epochs. Each worker then shuffles the row ranges of its share.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shoal.data.checks import check_tensor_columns
from shoal.data.ingest import Ingester
from shoal.data.numpy_columns import Column, copied, rearranged, to_column
from shoal.data.planning import GangPosition, RowRange, Shard, cut, random_bytes, seeded, shuffled
from shoal.data.shuffling import row_bytes, rows_of, shuffled_windows
from shoal.errors import DataError, InvalidArgumentError

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
    multiple = batch_size or 1
    if batch_size is None:
        while multiple < _ROWS_TOGETHER and 2 * multiple * num_workers * _MULTIPLES_PER_WORKER <= rows:
            multiple *= 2
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
    if (worker := get_worker_info()) is None:
        return 0, 0
    # For each iteration over a DataLoader, PyTorch draws one random number. The seed of a worker is this number plus
    # the worker's index. So the seed minus the index identifies the iteration.
    return 1 + worker.id, (worker.seed - worker.id) % (2**31 - 2) + 1


Window = dict[str, Column]
Item = dict[str, Any]

# Number of rows that are converted to Python objects at a time if the user sets no batch size, to limit the memory.
_ROWS_AT_ONCE = 1_024


@dataclass(slots=True)
class _Progress:
    """Epoch of an iterator, and number of items that the iterator has returned.

    `epoch` is None until the first item is requested.
    """

    epoch: int | None = None
    items: int = 0
    ended: bool = False


class TorchDataset(IterableDataset):  # type: ignore[misc]
    """Iterable torch dataset of rows; the method ``to_torch_dataset()`` of a connector or a shard creates it.

    With a batch size, an item is a dict of column -> tensor ``[rows]`` (a list for text, bytes and structs).
    ``DataLoader(dataset, batch_size=None)`` returns these items unchanged; ``DataLoader(dataset)`` returns tensors
    ``[1, rows]``. Without a batch size, an item is a dict of column -> int, float, bool, str, bytes, dict (structs) or
    tensor (lists of numbers), and DataLoader combines the items into batches.

    Each ``iter()`` begins an epoch when its first item is requested. With ``shuffle=True`` every epoch has its own
    order, which depends only on the seed, the epoch, the rank and the DataLoader worker. The row ranges are shuffled
    first. Then the rows of a few row ranges at a time are shuffled together, so that only these row ranges are in
    memory (see `shuffled_windows`). The worker processes of a DataLoader divide the rows among
    themselves.

    Clients of object stores do not work after a fork. If the files are on an object store, pass
    ``multiprocessing_context="forkserver"`` to a DataLoader that has workers.

    Args:
        ingester: Reader of the rows.
        ranges: Row ranges of the dataset, in order.
        rows: Number of rows per epoch. If it exceeds the number of rows in `ranges`, rows are repeated.
        position: Rank and seed, which determine the order of the rows.
        batch_size: Number of rows per item; None returns single rows as Python objects.
        shuffle: Whether each epoch has a new order.
        drop_last_batch: Whether to leave out the last batch if it has fewer rows. Ignored without `batch_size`.
        columns: Columns to return, in this order; all by default.
        expand_dims: Whether a column of numbers is a tensor ``[rows, 1]`` instead of ``[rows]``, and a number of a
            single row a tensor ``[1]``.

    Raises:
        InvalidArgumentError: If `batch_size` is not a positive integer, or `columns` is invalid.
        DataError: If a column is missing, has a type that torch does not support, or differs between files, or if the
            dataset has no rows.
    """

    def __init__(
        self,
        ingester: Ingester,
        ranges: Sequence[RowRange],
        rows: int,
        position: GangPosition,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        drop_last_batch: bool = False,
        columns: Sequence[str] | None = None,
        expand_dims: bool = False,
    ) -> None:
        super().__init__()
        if batch_size is not None and (
            isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1
        ):
            raise InvalidArgumentError(f"batch_size must be a positive integer or None, not {batch_size!r}")
        self._dtypes = check_tensor_columns(ingester.source, columns)
        self.columns = tuple(self._dtypes)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last_batch = drop_last_batch
        self.expand_dims = expand_dims
        self._ingester = ingester
        self._ranges = tuple(ranges)
        self._rows = rows
        self._position = position
        self._row_bytes = row_bytes(ingester.source, self._dtypes)
        self._epochs = EpochCounter()
        self._progress = _Progress()
        self._resumed: tuple[int, dict[str, Any]] | None = None
        # A saved position contains these values, so that load_state_dict() can refuse a position that was saved for
        # other rows or for another order. The values contain no paths, so that a position stays valid after the files
        # were moved.
        plan = [(part.row_group, part.start, part.stop) for part in self._ranges]
        self._identity = {
            "rank": position.rank,
            "seed": position.seed,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "plan": random_bytes(rows, repr(plan)).hex()[:16],
        }

    def __repr__(self) -> str:
        return (
            f"TorchDataset(rank={self._position.rank} of {self._position.world_size}, rows={self._rows}, "
            f"batch_size={self.batch_size}, shuffle={self.shuffle})"
        )

    def __len__(self) -> int:
        """Return the number of items (batches, or single rows without a batch size) per epoch.

        The number does not depend on the number of DataLoader workers.
        """
        return count_items(self._rows, self.batch_size, self.drop_last_batch)

    def __iter__(self) -> Iterator[Item]:
        """Return an iterator over one epoch. The epoch begins when the first item is requested."""
        self._progress = progress = _Progress()
        return self._items(progress)

    # Epochs and positions

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next ``iter()`` begins, for example to continue an interrupted training.

        Without this call, each ``iter()`` is the epoch after the previous one.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise InvalidArgumentError(f"an epoch must be an integer of at least 0, not {epoch!r}")
        self._epochs.set(epoch)
        self._progress, self._resumed = _Progress(), None

    def state_dict(self) -> dict[str, Any]:
        """Return the position that this process has reached in the epoch.

        To continue at this position, pass it to :meth:`load_state_dict` of another dataset with the same rows in the
        same order.

        torchdata's ``StatefulDataLoader`` calls `state_dict` and `load_state_dict`, also in its worker processes.

        Raises:
            InvalidArgumentError: If the workers of a plain DataLoader read the epoch. These workers read ahead, and
                only the DataLoader knows how many items were used.
        """
        worker = get_worker_info()
        if worker is None and self._epochs.begun_by_workers():
            raise InvalidArgumentError(
                "the position in the epoch is unknown, because the workers of a DataLoader read ahead and may have "
                "read more items than the training has used. Take the position from torchdata's StatefulDataLoader, "
                "use num_workers=0, or save only the number of each finished epoch and continue with set_epoch()"
            )
        if self._progress.epoch is not None:
            epoch, items, ended = self._progress.epoch, self._progress.items, self._progress.ended
        elif self._resumed is not None:
            return dict(self._resumed[1])
        else:
            epoch, items, ended = self._epochs.next(), 0, False
        return {"epoch": epoch, "items": items, "ended": ended, **_worker_identity(), **self._identity}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` of this dataset continue at a position that :meth:`state_dict` returned.

        If the position is the end of an epoch, the next ``iter()`` begins the next epoch. In a worker of a DataLoader,
        however, the next ``iter()`` then returns no items, because other workers may not have ended the epoch.

        Raises:
            InvalidArgumentError: If `state_dict` is not a position of a `TorchDataset`, or if it is a position within
                an epoch and rows, order, batch size or DataLoader worker differ from this dataset.
        """
        state = dict(state_dict)
        try:
            epoch, items, ended = int(state["epoch"]), int(state["items"]), bool(state["ended"])
        except (KeyError, TypeError, ValueError) as exc:
            raise InvalidArgumentError(
                f"state_dict must be a result of TorchDataset.state_dict(), but is {state!r}"
            ) from exc
        if items and not ended:
            for name, here in {**self._identity, **_worker_identity()}.items():
                if state.get(name) != here:
                    raise InvalidArgumentError(
                        f"the position belongs to a dataset with other rows or another order: {name} was "
                        f"{state.get(name)!r} and is {here!r} now; create the dataset with the same arguments, or call "
                        f"set_epoch({epoch + 1}) to begin with the next epoch"
                    )
        self._epochs.set(epoch + ended)
        in_worker = get_worker_info() is not None
        self._resumed = (os.getpid(), state) if in_worker or (items and not ended) else None
        self._progress = _Progress()

    # Items

    def _items(self, progress: _Progress) -> Iterator[Item]:
        worker = get_worker_info()
        if worker is not None and self._ingester.name == "ray":
            raise InvalidArgumentError(
                "RayDataIngester reads in Ray tasks, which DataLoader's workers cannot start: use num_workers=0 or "
                "ingestor_class=ArrowIngester"
            )
        number, of = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        share = share_of(self._rows, self.batch_size, self.drop_last_batch, number, of)
        if self._resumed is None:
            progress.epoch = self._epochs.next()
        else:
            process, state = self._resumed
            if worker is not None and process != os.getpid():
                raise InvalidArgumentError(
                    "load_state_dict() was called in the main process, but DataLoader's workers read the rows, and "
                    "these workers cannot continue at a position of the main process: use num_workers=0, or "
                    "torchdata's StatefulDataLoader, which calls load_state_dict() in its workers"
                )
            self._resumed = None
            progress.epoch = int(state["epoch"])
            # A saved position at the end of the epoch leaves no items.
            progress.items = share.items if state["ended"] else int(state["items"])
        self._epochs.begin(progress.epoch)
        for item in itertools.islice(self._read(progress, share, number), share.items - progress.items):
            # The item is counted before `yield`, because the generator is suspended at `yield` while the caller uses
            # the item and may ask for the position.
            progress.items += 1
            yield item
        progress.ended = True

    def _read(self, progress: _Progress, share: Share, worker: int) -> Iterator[Item]:
        """Return an iterator over a DataLoader worker's items of one epoch, without the first `progress.items` items.

        An earlier iterator has already returned these items.

        At the end, the iterator may return one item too many, which the caller must drop.
        """
        key = (self._position.seed, progress.epoch or 0, self._position.rank)
        first = 0
        if self.shuffle:
            # Rows may be repeated, so that all ranks have the same number of rows. In each epoch, the first repeated
            # row range is chosen at random. All workers of a DataLoader make the same choice, because they divide the
            # same rows.
            first = int.from_bytes(random_bytes(*key, "repeated")[:8], "big") % len(self._ranges)
        mine = cut(evened(self._ranges, self._rows, first), share.start, share.stop)
        if self.shuffle:
            mine = shuffled(mine, int.from_bytes(random_bytes(*key, worker, "ranges"), "big"))
            order = shuffled_windows(mine, self._row_bytes)
        else:
            order = [(part,) for part in mine]
        skip = min(progress.items * (self.batch_size or 1), share.stop - share.start)
        done = 0
        while done < len(order) and rows_of(order[done]) <= skip:
            skip -= rows_of(order[done])
            done += 1
        permutations: Iterator[np.ndarray | None] = itertools.repeat(None)
        if self.shuffle:
            sizes = enumerate(map(rows_of, order[done:]), done)
            permutations = (seeded(*key, worker, i).permutation(size) for i, size in sizes)
        windows = self._windows(order[done:], permutations)
        return self._rows_of(windows, skip) if self.batch_size is None else self._batches_of(windows, skip)

    def _windows(
        self, order: Sequence[tuple[RowRange, ...]], permutations: Iterator[np.ndarray | None]
    ) -> Iterator[Window]:
        tables = self._ingester.iter_batches(Shard(tuple(itertools.chain(*order))), self.columns)
        for window in order:
            # Each table is converted to arrays before the next one is read. Otherwise tables with text and decimals
            # would be in memory in addition to the arrays, because the conversion copies text and decimals.
            parts = []
            for part in window:
                try:
                    table = next(tables)
                except DataError as exc:
                    place = f"row group {part.row_group}"
                    if place in str(exc) or not str(exc).startswith(part.path):
                        raise
                    raise DataError(f"{exc} (while reading {place})") from exc
                columns = {
                    name: to_column(table.column(name), name, dtype, part) for name, dtype in self._dtypes.items()
                }
                parts.append(columns)
                del table, columns
            permutation = next(permutations)
            # `pop` removes the arrays of a column from `parts` before `rearranged` copies them into one array.
            # Therefore at most one column is in memory twice.
            yield {name: rearranged([part.pop(name) for part in parts], permutation) for name in self.columns}

    def _batches_of(self, windows: Iterator[Window], skip: int) -> Iterator[Item]:
        size = self.batch_size or 1
        # `held` contains the first rows of an incomplete batch. The missing rows come from the next windows (row ranges
        # that are shuffled together).
        held: list[Item] = []
        missing = size
        for window in windows:
            rows = len(window[self.columns[0]])
            start, skip = skip, 0
            while start < rows:
                stop = min(start + missing, rows)
                taken = {name: copied(column, start, stop) for name, column in window.items()}
                missing -= stop - start
                start = stop
                held.append(taken)
                if missing == 0:
                    yield self._joined(held)
                    held, missing = [], size
            # Without `del`, this window (the rows that are shuffled together) would stay in memory while the next
            # window is read.
            del window
        if held:
            yield self._joined(held)

    def _joined(self, held: Sequence[Item]) -> Item:
        joined: Item = {}
        for name in self.columns:
            pieces = [taken[name] for taken in held]
            whole = list(itertools.chain(*pieces)) if isinstance(pieces[0], list) else rearranged(pieces, None)
            joined[name] = self._tensor(whole)
        return joined

    def _tensor(self, values: np.ndarray | list[Any]) -> Any:
        return values if isinstance(values, list) else torch.from_numpy(self._expanded(values))

    def _expanded(self, values: np.ndarray) -> np.ndarray:
        return values[:, np.newaxis] if self.expand_dims and values.ndim == 1 else values

    def _rows_of(self, windows: Iterator[Window], skip: int) -> Iterator[Item]:
        for window in windows:
            rows = len(window[self.columns[0]])
            for start in range(skip, rows, _ROWS_AT_ONCE):
                stop = min(start + _ROWS_AT_ONCE, rows)
                lists = [self._listed(copied(window[name], start, stop)) for name in self.columns]
                for values in zip(*lists, strict=True):
                    yield dict(zip(self.columns, values, strict=True))
            skip = 0
            del window

    def _listed(self, values: np.ndarray | list[Any]) -> list[Any]:
        if isinstance(values, list):
            return values
        values = self._expanded(values)
        if values.ndim == 1:
            return list(values.tolist())
        # Each row gets memory of its own, so that a row that is kept does not keep the others.
        return [row.clone() for row in torch.from_numpy(values)]


def _worker_identity() -> dict[str, int]:
    """Return the index of this DataLoader worker and the number of workers; 0 and 0 in the main process."""
    worker = get_worker_info()
    return (
        {"worker": 0, "num_workers": 0} if worker is None else {"worker": worker.id, "num_workers": worker.num_workers}
    )
