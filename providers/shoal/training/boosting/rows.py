"""The rows of a shard, decoded and checked, one row range at a time: what every boosting library is fed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from shoal.data.categories import Categories, encoded
from shoal.data.checks import check_label_values
from shoal.data.ingest import ArrowIngester
from shoal.data.matrix import to_matrix, to_vector
from shoal.data.parquet.filesystems import is_local
from shoal.data.planning.groups import group_starts
from shoal.data.planning.row_groups import RowRange, Shard
from shoal.data.planning.sizes import FLOAT32_BYTES
from shoal.errors import DataError
from shoal.training.host import memory

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from shoal.data.connector import DataConnector

CheckLabel = Callable[["np.ndarray", RowRange], None]
"""Refuses labels that an objective cannot take."""


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one dataset that fall to one worker.

    Args:
        connector: The dataset.
        shard: This worker's rows of it; may be empty for an eval set.
    """

    connector: DataConnector
    shard: Shard


@dataclass(frozen=True, slots=True)
class Columns:
    """What the columns of a dataset are for.

    Args:
        features: Feature columns, in the order the model takes them.
        label: Label column.
        weight: Column of row weights, if any.
        base_margin: Column of margins to boost from, if any.
        group: Column of groups, if any.
        categories: Feature columns of categories, and which those are.
    """

    features: tuple[str, ...]
    label: str
    weight: str | None = None
    base_margin: str | None = None
    group: str | None = None
    categories: Categories = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All of them, each once, in the order in which they are read."""
        return [
            name
            for name in dict.fromkeys((*self.features, self.label, self.weight, self.base_margin, self.group))
            if name is not None
        ]


@dataclass(frozen=True, slots=True)
class Batch:
    """One row range, decoded.

    Args:
        data: float32 ``[rows, columns]``.
        label: float32 ``[rows]``.
        weight: float32 ``[rows]``, if there are weights.
        base_margin: float32 ``[rows]``, if there are margins.
        group: int64 ``[rows]``, the number of each row's group in the shard, if there are groups.
    """

    data: np.ndarray
    label: np.ndarray
    weight: np.ndarray | None = None
    base_margin: np.ndarray | None = None
    group: np.ndarray | None = None

    def __getitem__(self, rows: slice) -> Batch:
        """Some of its rows."""
        return self._each(lambda name: None if (values := getattr(self, name)) is None else values[rows])

    def then(self, other: Batch) -> Batch:
        """These rows, and those of another one after them."""
        import numpy as np

        def joined(name: str) -> np.ndarray | None:
            mine, theirs = getattr(self, name), getattr(other, name)
            return None if mine is None else np.concatenate([mine, theirs])

        return self._each(joined)

    def _each(self, of: Callable[[str], Any]) -> Batch:
        return Batch(**{field.name: of(field.name) for field in fields(self)})


# Share of the memory that the node has left which its workers' decoded rows may take: the quantised rows beside them
# are a quarter as large, and the row group that is being decoded comes on top.
_CACHE_FRACTION = 0.3
# To decode 100 MB of rows out of a local file again takes a tenth of a second or two; to keep them, as much memory as
# all that XGBoost makes of them.
_CHEAP_BYTES = 64 * 2**20


def cache_budget(part: Part, local_world_size: int, *, often: bool = False) -> int:
    """Bytes of decoded rows that are worth keeping from one pass to the next.

    Args:
        part: The rows.
        local_world_size: Workers on this node.
        often: Whether there will be many more passes than it takes to quantise the rows.
    """
    budget = int(memory.available_bytes() * _CACHE_FRACTION / local_world_size)
    connector = part.connector
    cheap = connector.ingestor_class is ArrowIngester and all(is_local(path) for path in connector.source.paths)
    return min(budget, _CHEAP_BYTES) if cheap and not often else budget


class ShardRows:
    """A shard's batches, to go over as often as a library needs.

    Where the decoded rows fit into the budget they are kept from the first pass to the last; otherwise each pass reads
    them again, and no more than one row group is in memory.

    Args:
        part: The rows.
        columns: What they hold.
        budget: Bytes that decoded rows may take.
        check_label: Refuses labels beyond those that no library takes.
    """

    def __init__(self, part: Part, columns: Columns, budget: int, check_label: CheckLabel | None = None) -> None:
        self.passes = 0
        self.seconds = 0.0
        self.part = part
        self.columns = columns
        self._check_label = check_label
        keep = part.shard.rows * len(columns.names) * FLOAT32_BYTES <= budget
        self._kept: list[Batch] | None = [] if keep else None
        self._complete = False

    def __iter__(self) -> Iterator[Batch]:
        """One pass; the time it takes is added to `seconds`."""
        batches = iter(self._kept) if self._complete and self._kept is not None else self._decode()
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def forget(self) -> None:
        """Let go of what is kept: no more passes follow."""
        self._kept = None

    def _decode(self) -> Iterator[Batch]:
        self.passes += 1
        if self._kept is not None:
            # A pass that was broken off left a part.
            self._kept.clear()
        ranges = self.part.shard.ranges
        if ranges:
            tables = self.part.connector.ingester().iter_batches(self.part.shard, self.columns.names)
            for batch in self._batches(zip(ranges, tables, strict=True)):
                if self._kept is not None:
                    self._kept.append(batch)
                yield batch
        self._complete = True

    def _batches(self, tables: Iterable[tuple[RowRange, pa.Table]]) -> Iterator[Batch]:
        number = _GroupNumbers(self.columns.group) if self.columns.group else None
        for rows, table in tables:
            batch = self._batch(rows, table)
            yield replace(batch, group=number(table)) if number else batch

    def _batch(self, rows: RowRange, table: pa.Table) -> Batch:
        columns = self.columns
        where = f"{rows.path}, row group {rows.row_group}"
        if table.num_rows != rows.rows:
            raise DataError(f"{where}: {table.num_rows} rows were read instead of {rows.rows}")
        # XGBoost itself accepts, silently, a worker that has fewer columns than its peers.
        if table.column_names != columns.names:
            raise DataError(f"{where}: the columns {table.column_names} were read instead of {columns.names}")
        label = to_vector(table, columns.label, "float32")
        check_label_values(label, columns.label, rows)
        if self._check_label:
            self._check_label(label, rows)
        return Batch(
            to_matrix(encoded(table, columns.categories), columns.features),
            label,
            _complete(table, "weight", columns.weight, rows),
            _complete(table, "base_margin", columns.base_margin, rows),
        )


class _GroupNumbers:
    """Numbers a shard's groups in the order in which their rows come.

    Args:
        column: The groups.
    """

    def __init__(self, column: str) -> None:
        self._column = column
        self._last = -1
        self._before: pa.Scalar | None = None

    def __call__(self, table: pa.Table) -> np.ndarray:
        """int64 ``[rows]``."""
        values = table.column(self._column).combine_chunks()
        numbers = self._last + group_starts(values, self._before).cumsum()
        self._last, self._before = int(numbers[-1]), values[-1]
        return numbers


def in_whole_groups(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same rows, the end of each batch held back until its last group is complete; without groups as they are."""
    held: Batch | None = None
    for batch in batches:
        if batch.group is None:
            yield batch
            continue
        whole = batch if held is None else held.then(batch)
        assert whole.group is not None
        last = int(whole.group.searchsorted(whole.group[-1]))
        held = whole[last:]
        if last:
            yield whole[:last]
    if held is not None:
        yield held


def _complete(table: pa.Table, what: str, column: str | None, rows: RowRange) -> np.ndarray | None:
    """Weights or margins, refused where they are null: the libraries take NaN for a number."""
    import numpy as np

    if column is None:
        return None
    values = to_vector(table, column, "float32")
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise DataError(
            f'{rows.path}, row group {rows.row_group}: the {what} "{column}" is {values[bad[0]]} (or null) '
            f"in {len(bad)} of {len(values)} rows, first at row {rows.start + int(bad[0])}"
        )
    return values
