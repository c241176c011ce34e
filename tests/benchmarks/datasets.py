"""What the benchmarks train on: Parquet files, made in a folder once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.examples.flights import FEATURES, LABEL, month_files

_GROUPS_PER_FILE = 10
_ROWS_PER_GROUP = 50_000
_VALUES_PER_GROUP = _ROWS_PER_GROUP * 28


@dataclass(frozen=True)
class Data:
    """A dataset on disk.

    Attributes:
        name: What it is called in tables.
        files: Its Parquet files.
        features: Feature columns.
        label: Label column, to regress.
        judged_by: File with the rows that models are judged by; not trained on, but for the flights.
        rows: Number of rows.
        rounds: Rounds of boosting that the benchmark trains.
    """

    name: str
    files: tuple[str, ...]
    features: tuple[str, ...]
    label: str
    judged_by: str
    rows: int
    rounds: int

    @property
    def shard_bytes(self) -> int:
        """Its features as float32."""
        return self.rows * len(self.features) * 4


def flights(folder: Path) -> Data:
    """A year of real flights: 327,346 rows of 16 features."""
    files = tuple(month_files(range(1, 13), folder))
    return Data("flights, 327 k x 16", files, FEATURES, LABEL, files[0], 327_346, 100)


def small(folder: Path) -> Data:
    """The flights of January, for warming up."""
    [january] = month_files([1], folder)
    return Data("January", (january,), FEATURES, LABEL, january, 26_398, 2)


def synthetic(folder: Path, name: str, rows: int, columns: int, rounds: int) -> Data:
    """Normal features, float32, and a label that a few of them make, with noise; the same with every call.

    Args:
        folder: Where its files go.
        name: What it is called in tables.
        rows: Number of rows.
        columns: Number of features.
        rounds: Rounds of boosting.
    """
    folder.mkdir(parents=True)
    features = tuple(f"f{i}" for i in range(columns))
    group = max(1_000, min(_ROWS_PER_GROUP, _VALUES_PER_GROUP // columns))
    files = []
    each = group * _GROUPS_PER_FILE
    for start in range(0, rows, each):
        path = folder / f"{start // each:04}.parquet"
        files.append(str(path))
        with pq.ParquetWriter(path, _schema(features)) as writer:
            for at in range(start, min(start + each, rows), group):
                writer.write_table(_table(features, min(group, rows - at, start + each - at), seed=at))
    judged_by = folder / "others.parquet"
    pq.write_table(_table(features, group, seed=rows), judged_by)
    return Data(name, tuple(files), features, "y", str(judged_by), rows, rounds)


MAKE: dict[str, Callable[[Path], Data]] = {
    "flights": lambda folder: flights(folder / "flights"),
    "2m": lambda folder: synthetic(folder / "2m", "2 M x 28", 2_000_000, 28, 50),
    "5m": lambda folder: synthetic(folder / "5m", "5 M x 28", 5_000_000, 28, 50),
    "wide": lambda folder: synthetic(folder / "wide", "50 k x 1,000", 50_000, 1_000, 50),
}
"""The datasets of the benchmark, by the name that its command line takes."""


def _schema(features: tuple[str, ...]) -> pa.Schema:
    return pa.schema([(name, pa.float32()) for name in (*features, "y")])


def _table(features: tuple[str, ...], rows: int, seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, len(features)), np.float32)
    y = x[:, 0] + np.sin(2 * x[:, 1]) * x[:, 2] + np.abs(x[:, 3]) + 0.5 * rng.standard_normal(rows, np.float32)
    return pa.table([*(pa.array(x[:, i]) for i in range(len(features))), pa.array(y)], schema=_schema(features))
