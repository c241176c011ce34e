"""The row-group planners: every row once, evenly, the same plan every time."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.planning import TOLERANCE, RowGroup, RowRange, Shard, plan_shards
from shoal.errors import DataError, InvalidArgumentError


def groups_of(*files: list[int]) -> list[RowGroup]:
    return [RowGroup(f"/f{i}", j, rows) for i, sizes in enumerate(files) for j, rows in enumerate(sizes)]


PINNED = [
    [("/f0", 0, 0, 5), ("/f0", 1, 0, 7), ("/f1", 0, 0, 1)],
    [("/f0", 2, 0, 3), ("/f1", 0, 1, 4), ("/f1", 1, 0, 6)],
]

sizes = st.lists(st.lists(st.integers(0, 400), max_size=6), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(sizes=sizes, workers=st.integers(1, 9), seed=st.integers(0, 2**31), data=st.data())
def test_every_row_once_even_and_repeatable(
    sizes: list[list[int]], workers: int, seed: int, data: st.DataObject
) -> None:
    groups = groups_of(*sizes)
    total = sum(group.rows for group in groups)
    if total < workers:
        with pytest.raises(DataError, match="too few"):
            plan_shards(groups, workers, seed)
        return
    shards = plan_shards(groups, workers, seed)

    seen = Counter((r.path, r.row_group, i) for shard in shards for r in shard.ranges for i in range(r.start, r.stop))
    assert seen == Counter((group.path, group.index, i) for group in groups for i in range(group.rows))

    loads = [shard.rows for shard in shards]
    mean = total / workers
    assert len(shards) == workers and min(loads) >= 1
    assert max(loads) - min(loads) <= 1 or all(abs(load - mean) <= TOLERANCE * mean for load in loads)

    ranges = sum(len(shard.ranges) for shard in shards)
    assert ranges <= sum(group.rows > 0 for group in groups) + workers - 1, "more cuts than needed"
    assert all(list(shard.ranges) == sorted(shard.ranges) for shard in shards)

    assert plan_shards(data.draw(st.permutations(groups)), workers, seed) == shards


def test_equal_groups_are_never_cut() -> None:
    groups = groups_of([100] * 12)
    shards = plan_shards(groups, 4, seed=7)
    assert [len(shard.ranges) for shard in shards] == [3, 3, 3, 3]


def test_nearly_even_groups_are_not_cut_for_the_last_percent() -> None:
    shards = plan_shards(groups_of([1000, 1005]), 2, seed=0)
    assert sorted(shard.rows for shard in shards) == [1000, 1005]


def test_a_group_that_fills_a_shard_exactly_is_not_cut() -> None:
    shards = plan_shards(groups_of([2, 3, 2]), 2, seed=0)
    assert [len(shard.ranges) for shard in shards] == [2, 1]


def test_one_big_group_is_cut_evenly() -> None:
    shards = plan_shards(groups_of([10]), 3, seed=0)
    assert [shard.rows for shard in shards] == [4, 3, 3]


def test_the_seed_decides_the_deal() -> None:
    groups = groups_of([100] * 20)
    assert plan_shards(groups, 4, 0) == plan_shards(groups, 4, 0)
    assert len({plan_shards(groups, 4, seed) for seed in range(5)}) == 5


def test_sorted_data_is_mixed() -> None:
    """Shards of data sorted by time must not be periods: LightGBM's bins come from one shard's sample."""
    shards = plan_shards(groups_of([100] * 100), 2, seed=0)
    means = [sum(r.row_group for r in shard.ranges) / len(shard.ranges) for shard in shards]
    assert all(35 < mean < 65 for mean in means)


def test_a_moved_directory_keeps_its_plan() -> None:
    here = plan_shards([RowGroup(f"/a/{i}", 0, 10 + i) for i in range(9)], 2, 3)
    there = plan_shards([RowGroup(f"s3://b/{i}", 0, 10 + i) for i in range(9)], 2, 3)
    assert [[r.path[-1] for r in shard.ranges] for shard in here] == [[r.path[-1] for r in s.ranges] for s in there]


def test_the_plan_of_today_is_the_plan_of_tomorrow() -> None:
    """Pinned: a resumed or repeated run on another version of Python or shoal must get the same shards."""
    shards = plan_shards(groups_of([5, 7, 3], [4, 6]), 2, seed=42)
    assert [[(r.path, r.row_group, r.start, r.stop) for r in shard.ranges] for shard in shards] == PINNED


def test_pickles() -> None:
    shard = Shard((RowRange("/a", 0, 0, 3),))
    assert pickle.loads(pickle.dumps(shard)) == shard and shard.rows == 3


@pytest.mark.parametrize("workers", [0, -1])
def test_no_workers_is_refused(workers: int) -> None:
    with pytest.raises(InvalidArgumentError, match="num_workers must be at least 1"):
        plan_shards(groups_of([3]), workers, 0)


def test_no_rows_and_too_few_rows_are_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        plan_shards(groups_of([0]), 1, 0)
    with pytest.raises(DataError, match="2 rows, too few for 3 workers"):
        plan_shards(groups_of([2]), 3, 0)


def test_a_row_group_listed_twice_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="listed twice"):
        plan_shards([RowGroup("/a", 0, 3)] * 2, 1, 0)
