"""Rows dealt to the workers of a boosting training: every row once, a fair sample for each worker, few extra reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import DataConnector
from shoal.data.checks import check_finite
from shoal.data.planning.dealing import FAIR_GROUPS, deal_rows
from shoal.data.planning.row_groups import TOLERANCE, RowGroup, Shard
from shoal.errors import DataError, InvalidArgumentError

from .conftest import Write
from .test_plan import groups_of, sizes

PINNED = [
    [("/f0", 0, [0, 1, 4]), ("/f0", 1, [2, 4, 6]), ("/f0", 2, [0, 2]), ("/f1", 0, [1, 3]), ("/f1", 1, [1, 2, 5])],
    [("/f0", 0, [2, 3]), ("/f0", 1, [0, 1, 3, 5]), ("/f0", 2, [1]), ("/f1", 0, [0, 2]), ("/f1", 1, [0, 3, 4])],
]


def rows_of(shard: Shard) -> list[tuple[str, int, int]]:
    return [(part.path, part.row_group, int(row)) for part in shard.ranges for row in part.positions()]


@settings(max_examples=50, deadline=None)
@given(sizes=sizes, workers=st.integers(1, 9), seed=st.integers(0, 2**31), data=st.data())
def test_every_row_once_even_and_repeatable(
    sizes: list[list[int]], workers: int, seed: int, data: st.DataObject
) -> None:
    groups = groups_of(*sizes)
    total = sum(group.rows for group in groups)
    if total < workers:
        with pytest.raises(DataError, match="too few"):
            deal_rows(groups, workers, seed)
        return
    shards = deal_rows(groups, workers, seed)
    seen = Counter(row for shard in shards for row in rows_of(shard))
    assert seen == Counter((group.path, group.index, i) for group in groups for i in range(group.rows))
    assert all(len(rows_of(shard)) == shard.rows >= 1 for shard in shards)
    loads, mean = [shard.rows for shard in shards], total / workers
    assert max(loads) - min(loads) <= 1 or all(abs(load - mean) <= TOLERANCE * mean for load in loads)
    # One range per row group: all rows of a worker in a row group come from one decode.
    assert all(len({(part.path, part.row_group) for part in shard.ranges}) == len(shard.ranges) for shard in shards)
    assert deal_rows(data.draw(st.permutations(groups)), workers, seed) == shards


@settings(max_examples=50, deadline=None)
@given(groups=st.integers(1, 120), workers=st.integers(1, 40), seed=st.integers(0, 9))
def test_the_bound_on_reads_of_equal_row_groups(groups: int, workers: int, seed: int) -> None:
    for shard in deal_rows(groups_of([4_000] * groups), workers, seed):
        assert len(shard.ranges) <= max(8, 8 * groups / workers)
        assert len(shard.ranges) >= min(groups, 4), "a worker sees several places of a sorted table"


@pytest.mark.parametrize("groups", [1, 2, 5, 15, 16, 40])
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_each_worker_gets_a_fair_sample_of_a_sorted_table(groups: int, workers: int) -> None:
    shards = deal_rows(groups_of([12_000 // groups] * groups), workers, seed=3)
    places = [[int(path[2:]) + index * (12_000 // groups) + row for path, index, row in rows_of(s)] for s in shards]
    # The means of contiguous parts would differ from the mean of the table by up to half of its length.
    exact = groups < FAIR_GROUPS * workers and workers <= 4
    assert np.abs(np.mean(places, axis=1) / 6_000 - 1).max() < (0.01 if exact else 0.3)


def test_whole_row_groups_are_dealt_one_of_each_block_to_each_worker() -> None:
    shards = deal_rows(groups_of([100] * 32), 4, seed=7)
    for block in range(8):
        dealt = [part for shard in shards for part in shard.ranges if part.row_group // 4 == block]
        assert len(dealt) == 4 and all(part.deal is None for part in dealt)
    assert {tuple(part.row_group % 4 for part in shard.ranges) for shard in shards} != {(i,) * 8 for i in range(4)}


def test_runs_do_not_follow_a_period_of_the_data() -> None:
    for shard in deal_rows(groups_of([7 * 512]), 7, seed=1):
        days = np.bincount([row % 7 for _, _, row in rows_of(shard)], minlength=7)
        assert days.max() < 1.5 * days.min()


def test_a_moved_directory_keeps_its_plan() -> None:
    here, there = (
        deal_rows([RowGroup(f"{folder}/{i}", 0, 10 + i) for i in range(9)], 2, 3) for folder in ("/a", "s3://b")
    )
    assert [[(row[0][-1], row[2]) for row in rows_of(shard)] for shard in here] == [
        [(row[0][-1], row[2]) for row in rows_of(shard)] for shard in there
    ]


def test_the_deal_of_today_is_the_deal_of_tomorrow() -> None:
    """Pinned: a resumed or repeated training on another version of Python, NumPy or shoal gets the same shards."""
    shards = deal_rows(groups_of([5, 7, 3], [4, 6]), 2, seed=42)
    found = [[(part.path, part.row_group, part.positions().tolist()) for part in shard.ranges] for shard in shards]
    assert found == PINNED


def test_what_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_workers must be at least 1"):
        deal_rows(groups_of([3]), 0, 0)
    with pytest.raises(InvalidArgumentError, match="listed twice"):
        deal_rows([RowGroup("/a", 0, 3)] * 2, 1, 0)


@pytest.mark.parametrize("kind", ["plain", "filters", "split"])
def test_dealt_rows_are_read_with_filters_and_splits(write: Write, tmp_path: Path, kind: str) -> None:
    write("d/a.parquet", 300, x=list(range(900)), y=[i % 7 for i in range(900)])
    write("d/b.parquet", 900, x=list(range(900, 1800)), y=[i % 7 for i in range(900)])
    filters = [("y", "<", 4)] if kind == "filters" else None
    connector = DataConnector.from_parquet(tmp_path / "d", filters=filters)
    if kind == "split":
        connector = connector.random_split([0.6, 0.4], seed=1)[0]
    right = connector.to_arrow()["x"].to_pylist()
    tables = [list(connector.ingester().iter_batches(shard, ["x"])) for shard in connector.plan(3, seed=0)]
    assert all(len(shard) == 4 for shard in tables), "one batch per row group"
    dealt = [[x for table in shard for x in table["x"].to_pylist()] for shard in tables]
    assert sorted(x for shard in dealt for x in shard) == sorted(right)
    assert all(shard == sorted(shard) for shard in dealt)
    assert max(np.mean(shard) for shard in dealt) - min(np.mean(shard) for shard in dealt) < 20


def test_errors_name_the_row_in_the_row_group(write: Write) -> None:
    connector = DataConnector.from_parquet(write("a.parquet", 100, x=list(range(200)), y=[1.0] * 157 + [None] * 43))
    for shard in connector.plan(2, seed=0):
        [_, part] = shard.ranges
        rows = part.positions()
        [_, table] = connector.ingester().iter_batches(shard, ["y"])
        first = int(rows[rows >= 57][0])
        with pytest.raises(DataError, match=f"row group 1.*first at row {first}:"):
            check_finite(np.array(table["y"].to_pylist(), dtype=float), "label", "y", part, "leave these rows out")
