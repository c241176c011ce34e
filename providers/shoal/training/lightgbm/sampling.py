"""Choose the sample of rows from which LightGBM's workers make the same bins, read each worker's part of it, and share
the parts, so that the driver holds none of them.

The parts are in Ray's object store, or, if the worker is no Ray actor, in memory of this machine that the worker owns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.training import cluster
from shoal.training.boosting.rows import ShardRows

if TYPE_CHECKING:
    import pyarrow as pa


_SAMPLE_ROWS = 200_000
"""Number of rows in the sample if the user does not set `bin_construct_sample_cnt`; the same as LightGBM's default."""


@dataclass(frozen=True, slots=True)
class Share:
    """Position of a worker's rows among all rows. The position determines how many rows this worker adds to the sample.

    Args:
        rank: Rank of the worker.
        before: Number of rows of all lower ranks.
        rows: Number of rows of this worker.
        total: Number of rows of all workers.
    """

    rank: int
    before: int
    rows: int
    total: int

    def chosen(self, wanted: int, seed: int) -> np.ndarray:
        """Choose this worker's rows for the sample from which LightGBM finds its bins (intervals of feature values).

        The same share, sample size and seed always give the same rows.
        """
        wanted = min(wanted, self.total)
        count = (self.before + self.rows) * wanted // self.total - self.before * wanted // self.total
        if count == self.rows:
            return np.arange(self.rows)
        return np.sort(np.random.default_rng([seed, self.rank]).choice(self.rows, count, replace=False))


def shares(rows: Sequence[int]) -> list[Share]:
    """Compute each worker's `Share`: the position of its rows among the rows of all workers."""
    ends = np.cumsum(rows)
    return [
        Share(rank, int(end) - count, count, int(ends[-1]))
        for rank, (count, end) in enumerate(zip(rows, ends, strict=True))
    ]


def sample(rows: ShardRows, share: Share, params: Mapping[str, Any], seed: int) -> pa.Table:
    """Read this worker's part of the sample from which LightGBM finds its bins (intervals of feature values).

    The function reads the worker's rows once.
    """
    import pyarrow as pa

    chosen = share.chosen(int(params.get("bin_construct_sample_cnt", _SAMPLE_ROWS)), seed)
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
        import pyarrow as pa

        try:
            with pa.memory_map(f"/proc/{self.pid}/fd/{self.descriptor}") as file:
                return pa.ipc.open_stream(file).read_all()
        except FileNotFoundError as exc:
            raise LookupError(f"its process {self.pid} has ended") from exc


def share(table: pa.Table) -> Any:
    """Store a table for another worker, and return a reference, which the driver passes on."""
    if (ray := cluster.ray_if_connected()) is not None:
        return ray.put(table)
    import pyarrow as pa

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
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.ObjectLostError as exc:
        raise LookupError(str(exc)) from exc
