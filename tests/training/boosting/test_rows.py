"""The rows that workers see are the dataset's rows, each once and as they are written, whatever the files look like."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import ArrowIngester, DataConnector, RayDataIngester
from shoal.data.planning import RowRange, Shard
from shoal.training.boosting.rows import _CHEAP_BYTES as CHEAP
from shoal.training.boosting.rows import Columns, Part, ShardRows, cache_budget, shard_datasets
from shoal.training.host import memory

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


@pytest.mark.parametrize(
    ("paths", "ingestor_class", "group_rows", "reads", "kept"),
    [
        ("/data/a.parquet", ArrowIngester, 5_000, 4, CHEAP),
        ("/data/a.parquet", ArrowIngester, 4_999, 4, 3 * CHEAP),
        ("/data/a.parquet", ArrowIngester, 4_999, 2, CHEAP),
        ("/data/a.parquet", ArrowIngester, 5_000, math.inf, 3 * CHEAP),
        ("s3://bucket/a.parquet", ArrowIngester, 5_000, 4, 3 * CHEAP),
        (["/data/a.parquet", "s3://bucket/b.parquet"], ArrowIngester, 5_000, 4, 3 * CHEAP),
        ("/data/a.parquet", RayDataIngester, 5_000, 4, 3 * CHEAP),
    ],
)
def test_rows_are_kept_where_it_is_dear_to_read_them_again(
    paths: str | list[str],
    ingestor_class: Any,
    group_rows: int,
    reads: float,
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 20 * CHEAP)
    part = Part(
        DataConnector.from_parquet(paths, ingestor_class=ingestor_class),
        Shard((RowRange("/data/a.parquet", 0, 0, group_rows),)),
    )
    assert cache_budget(part, local_world_size=2, reads=reads) == kept
