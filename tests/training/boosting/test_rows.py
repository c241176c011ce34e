"""The rows that workers see are the dataset's rows, each once and as they are written, whatever the files look like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.training.boosting.rows import Columns, ShardRows, shard_datasets

COLUMNS = Columns(("number", "half"), "label", weight="weight")
PLENTY = 2**30


def write(path: Path, first: int, groups: list[int]) -> int:
    """A file whose rows are numbered from `first`; returns the number after the last."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = np.arange(first, first + sum(groups), dtype=np.int64)
    table = pa.table({"number": number, "half": number / 2, "label": number % 7, "weight": 1.0 + number % 3})
    with pq.ParquetWriter(path, table.schema) as writer:
        start = 0
        for rows in groups:
            writer.write_table(table.slice(start, rows), row_group_size=max(1, rows))
            start += rows
    return first + sum(groups)


def many_small_files(folder: Path) -> None:
    first = 0
    for i in range(40):
        first = write(folder / f"{i}.parquet", first, [13])


def one_huge_row_group(folder: Path) -> None:
    write(folder / "a.parquet", 0, [20_000])


def skewed(folder: Path) -> None:
    write(folder / "b.parquet", write(folder / "a.parquet", 0, [9_000, 3, 1]), [1, 250, 0, 17])


def hive_partitions(folder: Path) -> None:
    first = 0
    for month in range(1, 7):
        first = write(folder / f"year=2013/month={month}/a.parquet", first, [100 * month, 7])


def fewer_groups_than_workers(folder: Path) -> None:
    write(folder / "a.parquet", 0, [600, 400])


SHAPES = [many_small_files, one_huge_row_group, skewed, hive_partitions, fewer_groups_than_workers]


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [0, PLENTY])
def test_each_row_once(shape: Callable[[Path], None], workers: int, budget: int, tmp_path: Path) -> None:
    shape(tmp_path / "rows")
    connector = DataConnector.from_parquet(tmp_path / "rows")
    shards = [
        ShardRows(part, COLUMNS, budget) for part, _ in shard_datasets(connector, {}, workers, seed=3, group_col=None)
    ]
    for _ in range(2):  # a second pass, from what is kept or decoded anew, gives the same
        batches = [batch for rows in shards for batch in rows]
        number, half = np.concatenate([batch.data for batch in batches]).T
        order = np.argsort(number)
        every = np.arange(connector.num_rows())
        assert np.array_equal(number[order], every)
        assert np.array_equal(half[order], every / 2)
        assert np.array_equal(np.concatenate([batch.label for batch in batches])[order], every % 7)
        assert np.array_equal(np.concatenate([batch.weight for batch in batches])[order], 1 + every % 3)
    assert all(rows.passes == (1 if budget else 2) for rows in shards)
