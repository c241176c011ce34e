"""Torch datasets: rows of Parquet as tensors, in seeded epochs, shared among DataLoader's workers, resumable."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shoal.data.checks import check_tensor_columns
from shoal.data.columns import OBJECTS, Column, copied, rearranged, to_column
from shoal.data.planning.row_groups import Shard, shuffled
from shoal.data.torch import sampler
from shoal.data.torch.epochs import EpochCounter
from shoal.data.torch.sampler import count_items, cut, evened, rows_of, share_of
from shoal.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    import pyarrow as pa

    from shoal.data.gang_position import GangPosition
    from shoal.data.ingest import Ingester
    from shoal.data.planning.row_groups import RowRange

Window = dict[str, Column]
Item = dict[str, Any]

# Bytes that a value of text counts for where the size of a buffer is reckoned before anything is read.
_TEXT_BYTES = 64

# Rows made into Python objects at a time where there is no batch size.
_ROWS_AT_ONCE = 1_024


@dataclass(slots=True)
class _Place:
    """How far the newest iterator of this process is; no epoch: it has not begun."""

    epoch: int | None = None
    items: int = 0
    ended: bool = False


class TorchDataset(IterableDataset):  # type: ignore[misc]
    """Rows as torch items; ``to_torch_dataset()`` of a connector or a shard makes one.

    With a batch size an item is a dict of column -> tensor ``[rows]`` (a list for text and bytes), which
    ``DataLoader(dataset, batch_size=None)`` hands on as it is, and ``DataLoader(dataset)`` as ``[1, rows]``. Without
    one an item is a dict of column -> int, float, bool, str or bytes, for DataLoader to make batches of.

    Each ``iter()`` is an epoch, which counts from its first item on. With ``shuffle=True`` every epoch has an order of
    its own, told by seed, epoch, rank and DataLoader worker alone: row ranges are shuffled, and rows among a few of
    them at a time (see :mod:`shoal.data.torch.sampler`), which are all that is held. The worker processes of a
    DataLoader divide the rows among themselves.

    Rows on object stores: their clients do not outlive a fork, so give a DataLoader with workers
    ``multiprocessing_context="forkserver"``.

    Args:
        ingester: Reads the rows.
        ranges: Which rows, in their order.
        rows: Rows to hand out per epoch; where these are more than there are, some come twice.
        position: Rank and seed, on which the order depends.
        batch_size: Rows per item; None: one row, as Python objects.
        shuffle: Whether each epoch has a new order.
        drop_last_batch: Whether a last batch of fewer rows is left out. Without `batch_size` it means nothing.
        columns: Columns to hand out, in this order; all by default.

    Raises:
        InvalidArgumentError: If an argument is wrong by itself.
        DataError: If a column is missing, torch has no type for it or files differ in it, or there are no rows.
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
        self._ingester = ingester
        self._ranges = tuple(ranges)
        self._rows = rows
        self._position = position
        self._row_bytes = sum(
            _TEXT_BYTES if dtype == OBJECTS else np.dtype(dtype).itemsize for dtype in self._dtypes.values()
        )
        self._epochs = EpochCounter()
        self._place = _Place()
        self._resumed: tuple[int, dict[str, Any]] | None = None
        # Positions of another plan are told from those of this one by row groups, not paths: data may move.
        plan = [(part.row_group, part.start, part.stop) for part in self._ranges]
        self._identity = {
            "rank": position.rank,
            "seed": position.seed,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "plan": sampler.random_bytes(rows, repr(plan)).hex()[:16],
        }

    def __repr__(self) -> str:
        return (
            f"TorchDataset(rank={self._position.rank} of {self._position.world_size}, rows={self._rows}, "
            f"batch_size={self.batch_size}, shuffle={self.shuffle})"
        )

    def __len__(self) -> int:
        """Items per epoch, with any number of DataLoader workers: batches, or rows without a batch size."""
        return count_items(self._rows, self.batch_size, self.drop_last_batch)

    def __iter__(self) -> Iterator[Item]:
        """Begins an epoch with the first item that is asked for.

        Raises:
            DataError: With the item, if a file is gone, corrupt or was changed, or a value has no place in a tensor;
                it names the file and the row group.
            InvalidArgumentError: With the first item, if what reads the rows does not work in a DataLoader's workers.
        """
        self._place = place = _Place()
        return self._items(place)

    # Epochs and positions

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next ``iter()`` is, as to go on from an earlier run; by itself each is one further.

        Args:
            epoch: Its number, from 0.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise InvalidArgumentError(f"an epoch must be an integer of at least 0, not {epoch!r}")
        self._epochs.set(epoch)
        self._place, self._resumed = _Place(), None

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator of this process is, for :meth:`load_state_dict` of an equal dataset.

        torchdata's ``StatefulDataLoader`` calls both where they belong, in its workers too.

        Returns:
            The epoch, the items handed out of it, and what tells whether another dataset hands out the same ones; all
            of it JSON.

        Raises:
            InvalidArgumentError: If the epoch is read by the workers of a plain DataLoader. They read ahead, and only
                their loader knows how many of their items were used.
        """
        worker = get_worker_info()
        if worker is None and self._epochs.begun_by_workers():
            raise InvalidArgumentError(
                "the last epoch was read by DataLoader's workers, which are ahead of what was used: take the position "
                "from torchdata's StatefulDataLoader, use num_workers=0, or note the number of the epoch at its end, "
                "and go on with set_epoch()"
            )
        if self._place.epoch is not None:
            epoch, items, ended = self._place.epoch, self._place.items, self._place.ended
        elif self._resumed is not None:
            return dict(self._resumed[1])
        else:
            epoch, items, ended = self._epochs.next(), 0, False
        return {"epoch": epoch, "items": items, "ended": ended, **_worker_identity(), **self._identity}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Has the next ``iter()`` go on where another stood.

        After the end of an epoch that is the next one; in a DataLoader's worker it is the nothing that is left, since
        other workers may not have ended it.

        Args:
            state_dict: What :meth:`state_dict` returned.

        Raises:
            InvalidArgumentError: If it is a position in the midst of an epoch of other rows, order or batch size, or
                of another worker.
        """
        state = dict(state_dict)
        try:
            epoch, items, ended = int(state["epoch"]), int(state["items"]), bool(state["ended"])
        except (KeyError, TypeError, ValueError) as exc:
            raise InvalidArgumentError(f"this is no position in a TorchDataset: {state!r}") from exc
        if items and not ended:
            for name, here in {**self._identity, **_worker_identity()}.items():
                if state.get(name) != here:
                    raise InvalidArgumentError(
                        f"the position is one in other rows or another order: {name} was {state.get(name)!r} and is "
                        f"{here!r} now; set_epoch({epoch + 1}) begins the epoch after it"
                    )
        self._epochs.set(epoch + ended)
        in_worker = get_worker_info() is not None
        self._resumed = (os.getpid(), state) if in_worker or (items and not ended) else None
        self._place = _Place()

    def _begin(self) -> tuple[int, int | None]:
        """The epoch that begins now, and how many of its items were handed out before; None: all of them."""
        if self._resumed is None:
            epoch = self._epochs.next()
            items: int | None = 0
        else:
            process, state = self._resumed
            if get_worker_info() is not None and process != os.getpid():
                raise InvalidArgumentError(
                    "load_state_dict() was called outside of DataLoader's workers, which cannot go on from there: use "
                    "num_workers=0, or torchdata's StatefulDataLoader, which calls it inside"
                )
            self._resumed = None
            epoch, items = int(state["epoch"]), None if state["ended"] else int(state["items"])
        self._epochs.begin(epoch)
        return epoch, items

    # Items

    def _items(self, place: _Place) -> Iterator[Item]:
        worker = get_worker_info()
        if worker is not None and self._ingester.name == "ray":
            raise InvalidArgumentError(
                "RayDataIngester reads in Ray's tasks, which DataLoader's workers cannot reach: use num_workers=0, or "
                "ingestor_class=ArrowIngester"
            )
        place.epoch, before = self._begin()
        number, of = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        share = share_of(self._rows, self.batch_size, self.drop_last_batch, number, of)
        place.items = share.items if before is None else before
        for item in itertools.islice(self._read(place, share, number), share.items - place.items):
            # Counted first: the item is handed out when this goes on.
            place.items += 1
            yield item
        place.ended = True

    def _read(self, place: _Place, share: sampler.Share, worker: int) -> Iterator[Item]:
        """Items of a worker's share from the place on, and perhaps one more that is to be dropped."""
        key = (self._position.seed, place.epoch or 0, self._position.rank)
        first = 0
        if self.shuffle:
            # Not always the same rows come twice; but they are the same to all workers of a DataLoader.
            first = int.from_bytes(sampler.random_bytes(*key, "repeated")[:8], "big") % len(self._ranges)
        mine = cut(evened(self._ranges, self._rows, first), share.start, share.stop)
        if self.shuffle:
            mine = shuffled(mine, int.from_bytes(sampler.random_bytes(*key, worker, "ranges"), "big"))
            order = sampler.windows(mine, self._row_bytes)
        else:
            order = [(part,) for part in mine]
        skip = min(place.items * (self.batch_size or 1), share.stop - share.start)
        done = 0
        while done < len(order) and rows_of(order[done]) <= skip:
            skip -= rows_of(order[done])
            done += 1
        permutations: Iterator[np.ndarray | None] = itertools.repeat(None)
        if self.shuffle:
            permutations = (_generator(*key, worker, i).permutation(rows_of(order[i])) for i in range(done, len(order)))
        windows = self._windows(order[done:], permutations)
        return self._rows_of(windows, skip) if self.batch_size is None else self._batches_of(windows, skip)

    def _windows(
        self, order: Sequence[tuple[RowRange, ...]], permutations: Iterator[np.ndarray | None]
    ) -> Iterator[Window]:
        tables = self._ingester.iter_batches(Shard(tuple(itertools.chain(*order))), self.columns)
        for window in order:
            # Converted one by one, so that text and decimals are not held twice.
            parts = [self._convert(tables, part) for part in window]
            permutation = next(permutations)
            # Column by column, and each leaves `parts`, so that no more than one is held twice.
            yield {name: rearranged([part.pop(name) for part in parts], permutation) for name in self.columns}

    def _convert(self, tables: Iterator[pa.Table], part: RowRange) -> Window:
        try:
            table = next(tables)
        except DataError as exc:
            where = f"row group {part.row_group}"
            if where in str(exc) or not str(exc).startswith(part.path):
                raise
            raise DataError(f"{exc} ({where} was to be read)") from exc
        return {name: to_column(table.column(name), name, dtype, part) for name, dtype in self._dtypes.items()}

    def _batches_of(self, windows: Iterator[Window], skip: int) -> Iterator[Item]:
        size = self.batch_size or 1
        # The rows of a batch that is not full yet.
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
                if missing == 0 and not held:
                    yield {name: _tensor(values) for name, values in taken.items()}
                    missing = size
                    continue
                held.append(taken)
                if missing == 0:
                    yield self._joined(held)
                    held, missing = [], size
            # The next one is read while nobody holds this one any more.
            del window
        if held:
            yield self._joined(held)

    def _joined(self, held: Sequence[Item]) -> Item:
        joined: Item = {}
        for name in self.columns:
            pieces = [taken[name] for taken in held]
            whole = list(itertools.chain(*pieces)) if isinstance(pieces[0], list) else np.concatenate(pieces)
            joined[name] = _tensor(whole)
        return joined

    def _rows_of(self, windows: Iterator[Window], skip: int) -> Iterator[Item]:
        for window in windows:
            rows = len(window[self.columns[0]])
            for start in range(skip, rows, _ROWS_AT_ONCE):
                stop = min(start + _ROWS_AT_ONCE, rows)
                lists = [_listed(copied(window[name], start, stop)) for name in self.columns]
                for values in zip(*lists, strict=True):
                    yield dict(zip(self.columns, values, strict=True))
            skip = 0
            del window


def _tensor(values: np.ndarray | list[Any]) -> Any:
    return values if isinstance(values, list) else torch.from_numpy(values)


def _listed(values: np.ndarray | list[Any]) -> list[Any]:
    return values if isinstance(values, list) else list(values.tolist())


def _generator(*key: int | str) -> np.random.RandomState:
    # RandomState, because NumPy has frozen its streams; a Generator's may change with a release.
    return np.random.RandomState(np.frombuffer(sampler.random_bytes(*key), dtype="<u4"))


def _worker_identity() -> dict[str, int]:
    """Which worker of a DataLoader this process is; 0 of 0: none."""
    worker = get_worker_info()
    return (
        {"worker": 0, "num_workers": 0} if worker is None else {"worker": worker.id, "num_workers": worker.num_workers}
    )
