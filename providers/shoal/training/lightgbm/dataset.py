"""Build LightGBM datasets from streamed row groups with the bins of a common sample, which each worker reads a part
of."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np

from shoal.data.numpy_columns import Categories, to_matrix, to_vector
from shoal.lazy_imports import pa, ray
from shoal.training import cluster
from shoal.training.boosting.rows import Batch, ShardRows
from shoal.training.lightgbm.library import SAMPLE_ROWS, Share, note, predict_table, slice_rows


class Binned:
    """A LightGBM dataset together with the rows from which it was built.

    A LightGBM dataset contains only bin numbers (each bin is an interval of values). To continue from a model, LightGBM
    also needs the model's prediction for each row. The rows are therefore read again, and decoded again if they are not
    in memory.

    Args:
        rows: Rows of the dataset.
        reference: Dataset whose bins are used for these rows.
        keep: Whether to keep the decoded rows in memory, for trainings that often continue from a model.
        table: Features of all rows, if they are in memory anyway. LightGBM converts them to bins column by column,
            which takes less time than row by row: it then looks for bins in one feature at a time, and not in all in
            turn.
    """

    def __init__(
        self, rows: ShardRows, reference: lightgbm.Dataset, *, keep: bool = True, table: pa.Table | None = None
    ) -> None:
        self._rows = rows
        count, columns = rows.part.shard.rows, rows.columns
        # _noted() fills these arrays before LightGBM reads a table, or while it reads the rows. The arrays are complete
        # in time, because LightGBM reads the labels and weights only after the last row.
        self._label = np.empty(count, np.float32)
        self._weight = None if columns.weight is None else np.empty(count, np.float32)
        self._has_score = False
        outputs = columns.base_margin
        self._margin = np.empty(count if len(outputs) == 1 else (count, len(outputs))) if outputs else None
        self._group = None if columns.group is None else np.empty(count, np.int64)
        data: pa.Table | list[_RowRange]
        if table is not None and _is_readable(table):
            data = table
            deque(self._noted(rows.without_features()), maxlen=0)
        else:
            batches = self._noted(rows)
            data = [_RowRange(part.rows, len(columns.features), batches) for part in rows.part.shard.ranges]
        self.dataset = lightgbm.Dataset(
            data,
            label=self._label,
            weight=self._weight,
            reference=reference,
            feature_name=list(columns.features),
            params=reference.get_params(),
        ).construct()
        if self._group is not None:
            self.dataset.set_group(np.bincount(self._group))
            # LightGBM's dataset has stored the sizes of the groups, so this array is no longer needed.
            self._group = None
        if not keep:
            rows.forget()

    def start_from(self, model: lightgbm.Booster | None, threads: int) -> None:
        """Set the initial score of each row: the sum of the row's margin and the prediction of `model`."""
        score = self._margin
        if model is not None:
            parts = [
                predict_table(model.predict, batch.data, raw_score=True, num_threads=threads) for batch in self._rows
            ]
            score = np.concatenate(parts)
            if self._margin is not None:
                score += self._margin
        if score is not None:
            self.dataset.set_init_score(score)
        elif self._has_score:
            # An earlier training on the same dataset has set the scores; set_init_score(None) would leave them.
            self.dataset.set_field("init_score", None)
        self._has_score = score is not None

    def _noted(self, rows: Iterable[Batch]) -> Iterator[Batch]:
        start = 0
        for batch in rows:
            stop = start + len(batch.label)
            columns: tuple[tuple[np.ndarray | None, np.ndarray | None], ...] = (
                (self._label, batch.label),
                (self._weight, batch.weight),
                (self._margin, batch.base_margin),
                (self._group, batch.group),
            )
            for kept, values in columns:
                if kept is not None and values is not None:
                    kept[start:stop] = values
            yield batch
            start = stop


def _is_readable(table: pa.Table) -> bool:
    """Return whether LightGBM can read a table: there are rows, and all columns are numbers or booleans."""
    types = pa.types
    return len(table) > 0 and all(
        types.is_integer(each) or types.is_float32(each) or types.is_float64(each) or types.is_boolean(each)
        for each in table.schema.types
    )


class _RowRange(lightgbm.Sequence):  # type: ignore[misc]
    """Features of one row range (rows of a Parquet row group), as a `lightgbm.Sequence` that LightGBM can
    read.

    If the dataset has a reference dataset, LightGBM reads each row range only once and in order. The rows are converted
    to float64 in slices, so that a long row range is never as a whole in memory as float64.
    """

    def __init__(self, rows: int, columns: int, batches: Iterator[Batch]) -> None:
        self.batch_size = slice_rows(rows, columns)
        self._rows = rows
        self._next = 0
        self._batches = batches
        self._table: pa.Table | None = None

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: slice | int | list[int]) -> np.ndarray:
        start, stop = self._next, min(self._next + self.batch_size, self._rows)
        assert rows == slice(start, stop), "LightGBM asked for rows out of order"
        table: pa.Table = next(self._batches).data if self._table is None else self._table
        self._next, self._table = stop, table if stop < self._rows else None
        return to_matrix(table.slice(start, stop - start), table.column_names, "float64")


_ZERO = np.float32(1e-35)
"""Largest absolute value that LightGBM takes for zero (``kZeroThreshold`` in ``meta.h``)."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Bins of all features (intervals of feature values), in a form that can be sent to other workers.

    Args:
        binary: LightGBM's binary file of a dataset with these bins and a single row.
        features: Names of the columns.
        params: LightGBM's parameters of the dataset.
    """

    binary: bytes
    features: tuple[str, ...]
    params: dict[str, Any]

    def reference(self, categories: Categories) -> lightgbm.Dataset:
        """Build the LightGBM dataset whose bins all other datasets of the training use."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "bins")
            file.write_bytes(self.binary)
            reference = lightgbm.Dataset(file, feature_name=list(self.features), params=dict(self.params)).construct()
        note(reference, categories)
        return reference


def find_bins(rows: pa.Table, features: Sequence[str], params: Mapping[str, Any], threads: int) -> Bins:
    """Find the bins of all features. The number of threads does not change the bins.

    Only one worker calls this function, because LightGBM needs the whole sample as float64.
    """
    each = params.get("num_threads", 1)
    # With these settings LightGBM uses all rows of the sample, and finds the bins in this worker without connecting to
    # the other workers.
    params = {
        **params,
        "bin_construct_sample_cnt": max(1, len(rows)),
        "num_machines": 1,
        "num_threads": threads,
    }
    categorical = params.pop("categorical_feature", None)
    if categorical is not None:
        # LightGBM's C library needs column numbers. `lightgbm.Dataset` converts names to numbers only for a dataset
        # with rows. `reference` is a dataset without rows, so the names are converted here.
        numbers = {name: number for number, name in enumerate(features)}
        params["categorical_column"] = sorted(numbers.get(column, column) for column in categorical)
    reference = _without_rows(rows, params)
    # The bins are saved as a dataset with one row, because LightGBM cannot save a dataset without rows.
    single = lightgbm.Dataset(
        np.zeros((1, len(features)), np.float32),
        label=np.zeros(1),
        reference=reference,
        feature_name=list(features),
        params=reference.get_params(),
    ).construct()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bins")
        single.save_binary(file)
        # Each worker builds its datasets with these parameters. The number of threads is reset to that of one worker,
        # because all workers of a node build their datasets at the same time.
        return Bins(file.read_bytes(), tuple(features), {**reference.get_params(), "num_threads": each})


def _without_rows(rows: pa.Table, params: Mapping[str, Any]) -> lightgbm.Dataset:
    """Create a dataset that has the bins of a sample, but not the sample's rows.

    The constructor of `lightgbm.Dataset` would also convert the sample to bins, which takes longer than finding the
    bins.
    """
    every = np.arange(len(rows), dtype=np.int32)
    values, indices = [], []
    for name in rows.column_names:
        column = to_vector(rows, name)
        # LightGBM gets only the values that are not zero. Missing values (NaN) count as not zero.
        used = ~(np.abs(column) <= _ZERO)
        is_full = bool(used.all())
        values.append(column if is_full else column[used])
        indices.append(every if is_full else every[used])
    dataset = lightgbm.Dataset(None, params=dict(params))
    return dataset._init_from_sample(values, indices, len(rows), len(rows))


def sample(rows: ShardRows, share: Share, params: Mapping[str, Any], seed: int) -> pa.Table:
    """Read this worker's part of the sample from which LightGBM finds its bins (intervals of feature values).

    The function reads the worker's rows once.
    """
    chosen = share.chosen(int(params.get("bin_construct_sample_cnt", SAMPLE_ROWS)), seed)
    parts: list[pa.Table] = []
    start = 0
    for batch in rows:
        stop = start + len(batch.data)
        first, last = np.searchsorted(chosen, (start, stop))
        numbers = chosen[first:last] - start
        # `pa.array` would import pandas, which is slow.
        indices = pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])
        parts.append(batch.data.take(indices))
        start = stop
    return pa.concat_tables(parts).combine_chunks()


_files: list[int] = []
"""Descriptors of the files in memory with the parts of this process."""


@dataclass(frozen=True, slots=True)
class _InMemory:
    """Reference to a table in a file in memory, which belongs to a process of this machine.

    Args:
        pid: Id of the process.
        descriptor: The process's descriptor of the file.
    """

    pid: int
    descriptor: int

    def read(self) -> pa.Table:
        """Return the table, which uses the memory of the file."""
        try:
            with pa.memory_map(f"/proc/{self.pid}/fd/{self.descriptor}") as file:
                return pa.ipc.open_stream(file).read_all()
        except FileNotFoundError as exc:
            raise LookupError(f"its process {self.pid} has ended") from exc


def share(table: pa.Table) -> Any:
    """Store a table for another worker, and return a reference, which the driver passes on."""
    if (ray := cluster.ray_if_connected()) is not None:
        return ray.put(table)
    descriptor = os.memfd_create("shoal-sample")
    _files.append(descriptor)
    with open(descriptor, "wb", closefd=False) as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return _InMemory(os.getpid(), descriptor)


def own() -> pa.Table | None:
    """Return the table that this process has shared; None if it is in Ray's object store."""
    return _InMemory(os.getpid(), _files[-1]).read() if _files else None


def forget() -> None:
    """Free the memory of the tables of this process. Those in Ray's object store are freed with their references."""
    while _files:
        os.close(_files.pop())


def fetch(reference: Any) -> pa.Table:
    """Return the table that another worker has shared.

    Raises:
        LookupError: The worker or its node was lost, and the table with it.
    """
    if isinstance(reference, _InMemory):
        return reference.read()
    try:
        return ray.get(reference)
    except ray.exceptions.ObjectLostError as exc:
        raise LookupError(str(exc)) from exc
