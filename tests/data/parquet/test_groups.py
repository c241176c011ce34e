"""Groups of rows: found wherever they end, and never split."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import DataConnector
from shoal.data.parquet.source import find_groups
from shoal.data.planning import RowGroup, plan_groups
from shoal.errors import DataError


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    row_groups=st.lists(st.integers(1, 80), min_size=1, max_size=12),
    workers=st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
def test_every_row_once_no_group_split_and_repeatable(
    sizes: list[int], row_groups: list[int], workers: int, seed: int
) -> None:
    ids = np.repeat(np.arange(len(sizes)), sizes)
    row_groups = [*row_groups, max(1, len(ids) - sum(row_groups))]
    ids = np.concatenate([ids, np.full(sum(row_groups) - len(ids), ids[-1])])  # the last group takes what is left
    bounds = np.cumsum([0, *row_groups])
    begins = np.concatenate([[True], ids[1:] != ids[:-1]])
    groups = [RowGroup(f"/f{i // 3}", i % 3, rows) for i, rows in enumerate(row_groups)]
    pieces = [begins[start:stop] for start, stop in pairwise(bounds)]
    count = len(set(ids))
    if count < workers:
        with pytest.raises(DataError, match=f"has {count} groups, too few for {workers}"):
            plan_groups(groups, pieces, workers, seed)
        return

    shards = plan_groups(groups, pieces, workers, seed)

    at = {(group.path, group.index): start for group, start in zip(groups, bounds[:-1], strict=True)}
    rows = [[at[r.path, r.row_group] + i for r in shard.ranges for i in range(r.start, r.stop)] for shard in shards]
    assert Counter(row for mine in rows for row in mine) == Counter(range(len(ids)))
    owners = [set(ids[mine]) for mine in rows]
    assert all(owners)
    assert sum(map(len, owners)) == count, "a group is in two shards"
    # A group's rows come one after the other, as they stand in the dataset.
    assert all((np.diff(np.flatnonzero(ids[mine] == one)) == 1).all() for mine in rows for one in set(ids[mine]))
    assert plan_groups(groups, pieces, workers, seed) == shards


def test_even_groups_make_even_shards() -> None:
    begins = [np.arange(100) % 10 == 0] * 10
    groups = [RowGroup("/f", index, 100) for index in range(10)]
    assert [shard.rows for shard in plan_groups(groups, begins, 4, 0)] == [250] * 4
    assert plan_groups(groups, begins, 4, 0) != plan_groups(groups, begins, 4, 1)


def write(folder: Path, *files: list[object]) -> DataConnector:
    for number, values in enumerate(files):
        pq.write_table(pa.table({"q": values}), folder / f"{number}.parquet", row_group_size=3)
    return DataConnector.from_parquet(folder)


def test_groups_go_on_over_row_groups_and_files(tmp_path: Path) -> None:
    connector = write(tmp_path, ["a", "a", "b", "b", "b", "b", "c"], ["c", "d"])
    found = [begins.tolist() for begins in find_groups(connector.source, "q")]
    assert found == [[True, False, True], [False, False, False], [True], [False, True]]
    assert connector.num_groups("q") == 4


def test_a_group_in_two_places_is_refused(tmp_path: Path) -> None:
    connector = write(tmp_path, [7, 8, 8], [7, 9, 8])
    with pytest.raises(
        DataError, match=r'group 7 of "q" are in 2 separate places, and so are the rows of 1 other group: sort'
    ):
        connector.plan(2, 0, "q")


def test_a_null_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'0\.parquet, row group 1: the group column "q" is null in 1 of 2 rows'):
        write(tmp_path, [1, 1, 1, 2, None]).plan(1, 0, "q")
