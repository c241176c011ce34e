"""How rows are dealt to the workers of a boosting training: every row once, evenly, a fair sample for each worker."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import ArrowIngester, DataConnector
from shoal.data.planning import TOLERANCE, RowGroup, Shard, deal_rows
from shoal.errors import DataError
from tests.data.conftest import Write

PINNED_TINY = [[0, 2, 6, 9], [1, 4, 7], [3, 5, 8]]
PINNED = [
    [(1, 7), (3, 4), (4, 6), (5, 3), (6, 9), (9, 1), (10, 2), (11, 3), (13, 5), (15, 7)],
    [(0, 5), (2, 3), (5, 6), (7, 8), (8, 7), (12, 4), (14, 6), (16, 8)],
]


def groups_of(sizes: list[int]) -> list[RowGroup]:
    return [RowGroup("/f", i, rows) for i, rows in enumerate(sizes)]


def numbers(shard: Shard, rows_per_group: int) -> np.ndarray:
    """The numbers of a shard's rows in a table of equal row groups."""
    return np.concatenate([part.positions() + part.row_group * rows_per_group for part in shard.ranges])


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    workers=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_every_row_once_even_and_repeatable(sizes: list[int], workers: int, seed: int, data: st.DataObject) -> None:
    groups = groups_of(sizes)
    if sum(sizes) < workers:
        with pytest.raises(DataError, match=r"too few|no rows"):
            deal_rows(groups, workers, seed)
        return
    shards = deal_rows(groups, workers, seed)
    seen = Counter((part.row_group, row) for shard in shards for part in shard.ranges for row in part.positions())
    assert seen == Counter((i, row) for i, rows in enumerate(sizes) for row in range(rows))
    loads = [shard.rows for shard in shards]
    mean = sum(sizes) / workers
    assert len(shards) == workers and min(loads) >= 1
    assert max(loads) - min(loads) <= 1 or all(abs(load - mean) <= TOLERANCE * mean for load in loads)
    for shard in shards:
        assert len({part.row_group for part in shard.ranges}) == len(shard.ranges), "a row group is decoded twice"
        assert list(shard.ranges) == sorted(shard.ranges)
    assert deal_rows(data.draw(st.permutations(groups)), workers, seed) == shards


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 7, 8, 13, 16])
def test_the_extra_reads_are_bounded(workers: int) -> None:
    for number in range(1, 12 * workers):
        shards = deal_rows(groups_of([1_000] * number), workers, 0)
        share = number / workers
        most = max(len(shard.ranges) for shard in shards)
        assert most <= 8 or most < 8 * share
        if share >= 8:
            assert sum(len(shard.ranges) for shard in shards) <= number + workers - 1
        if workers == 1:
            assert [len(shard.ranges) for shard in shards] == [number]
            assert not any(part.deal for part in shards[0].ranges)


@pytest.mark.parametrize("number", [1, 2, 7, 8, 20, 31, 32, 50])
@pytest.mark.parametrize("workers", [2, 3, 4, 9])
@pytest.mark.parametrize("period", [None, 7, 128])
def test_each_worker_gets_a_fair_sample(number: int, workers: int, period: int | None) -> None:
    """Of a value that rises over the table, and of one with a period, such as a weekday."""
    rows = 10_080
    at = np.arange(number * rows)
    value = at / len(at) if period is None else at % period / period
    means = [value[numbers(shard, rows)].mean() for shard in deal_rows(groups_of([rows] * number), workers, 3)]
    assert means == pytest.approx([value.mean()] * workers, abs=0.065)
    if number == 1:
        assert means == pytest.approx([value.mean()] * workers, abs=0.02)


def test_of_successive_row_groups_each_worker_gets_one_in_an_order_of_the_seed() -> None:
    plans = [deal_rows(groups_of([100] * 32), 4, seed) for seed in (0, 1)]
    for shards in plans:
        assert [[part.row_group // 4 for part in shard.ranges] for shard in shards] == [list(range(8))] * 4
    assert plans[0] != plans[1]
    assert len({part.row_group % 4 for part in plans[0][0].ranges}) > 1


def test_the_rows_of_a_tiny_row_group_are_dealt_one_by_one() -> None:
    shards = deal_rows(groups_of([10]), 3, 0)
    assert [shard.rows for shard in shards] == [4, 3, 3]
    assert [numbers(shard, 10).tolist() for shard in shards] == PINNED_TINY


def test_a_moved_directory_keeps_its_plan() -> None:
    here = deal_rows([RowGroup(f"/a/{i}", 0, 10 + i) for i in range(9)], 2, 3)
    there = deal_rows([RowGroup(f"s3://b/{i}", 0, 10 + i) for i in range(9)], 2, 3)
    assert [[(r.path[-1], r.deal) for r in shard.ranges] for shard in here] == [
        [(r.path[-1], r.deal) for r in shard.ranges] for shard in there
    ]


def test_the_plan_of_today_is_the_plan_of_tomorrow() -> None:
    """Pinned: a resumed or repeated run on another version of Python, NumPy or shoal must get the same shards."""
    shards = deal_rows(groups_of([5, 7, 3, 4, 6, 9, 9, 8, 7, 1, 2, 3, 4, 5, 6, 7, 8]), 2, seed=42)
    assert [[(r.row_group, r.rows) for r in shard.ranges] for shard in shards] == PINNED


def test_a_dealt_shard_is_small_when_pickled() -> None:
    [shard, _] = deal_rows(groups_of([10_000_000]), 2, 0)
    pickled = pickle.dumps(shard)
    assert len(pickled) < 500 and pickle.loads(pickled) == shard


def test_dealt_rows_with_filters_and_splits(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.data.parquet.table_types.BATCH_ROWS", 64)
    for i in range(3):
        write(f"d/m={i}/a.parquet", 400, x=list(range(i * 400, i * 400 + 400)), text=[str(j) for j in range(400)])
    whole = DataConnector.from_parquet(tmp_path / "d")
    filtered = DataConnector.from_parquet(tmp_path / "d", filters=[("x", ">=", 150), ("x", "<", 1_050)])
    for connector in (whole, *whole.random_split([0.7, 0.3]), filtered, *filtered.random_split([0.7, 0.3])):
        expected = connector.to_arrow().sort_by("x")
        shards = connector.plan(3, seed=5)
        tables = [[*ArrowIngester(connector.source).iter_batches(shard, ["x", "text", "m"])] for shard in shards]
        for shard, mine in zip(shards, tables, strict=True):
            assert [table.num_rows for table in mine] == [part.rows for part in shard.ranges]
            assert len(mine) == 3
        rows = sorted((row for mine in tables for table in mine for row in table.to_pylist()), key=lambda row: row["x"])
        assert rows == expected.select(["x", "text", "m"]).to_pylist()


def test_a_dealt_range_names_the_row_in_the_row_group() -> None:
    for shard in deal_rows(groups_of([1_000]), 3, 0):
        [part] = shard.ranges
        assert [part.row_number(i) for i in (0, part.rows - 1)] == [part.positions()[0], part.positions()[-1]]
