"""Random splits: exact, disjoint, complete, repeatable."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import DataConnector
from shoal.data.planning import Split, select
from shoal.errors import DataError, InvalidArgumentError
from tests.data.conftest import Write

weights_ = st.lists(st.floats(0.001, 10), min_size=1, max_size=5).map(tuple)


@settings(max_examples=100, deadline=None)
@given(groups=st.lists(st.integers(0, 300), max_size=8), weights=weights_, seed=st.integers(0, 99))
def test_every_row_is_in_exactly_one_part(groups: list[int], weights: tuple[float, ...], seed: int) -> None:
    keys = [str(i) for i in range(len(groups))]
    parts = [select(groups, keys, [Split(weights, k, seed)]) for k in range(len(weights))]
    for i, rows in enumerate(groups):
        chosen = [part[i].indices() for part in parts]
        assert [len(indices) for indices in chosen] == [part[i].selected for part in parts]
        assert all((np.diff(indices) > 0).all() for indices in chosen), "rows keep their order"
        assert sorted(np.concatenate(chosen).tolist()) == list(range(rows))


@settings(max_examples=100, deadline=None)
@given(groups=st.lists(st.integers(0, 300), min_size=1, max_size=8), weights=weights_)
def test_parts_have_their_share_however_the_rows_are_grouped(groups: list[int], weights: tuple[float, ...]) -> None:
    befores = [0, *accumulate(groups)]
    counts = [Split(weights, 0, 0).counts(b, rows) for b, rows in zip(befores, groups, strict=False)]
    sums = [sum(column) for column in zip(*counts, strict=True)]
    assert sums == Split(weights, 0, 0).counts(0, sum(groups))
    for got, weight in zip(sums, weights, strict=True):
        assert abs(got - sum(groups) * weight / sum(weights)) <= len(weights)


def test_shares_are_exact_decimals() -> None:
    assert Split((0.29, 0.71), 0, 0).counts(0, 100) == [29, 71]
    assert Split((0.99, 0.01), 0, 0).counts(0, 327_346) == [324_072, 3_274]


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [-1, 2], [float("nan"), 1]])
def test_bad_weights_are_refused(write: Write, weights: list[float]) -> None:
    with pytest.raises(InvalidArgumentError, match="weights"):
        DataConnector.from_parquet(write("a.parquet", x=[1])).random_split(weights)


def test_connector_split_reads_each_row_once(write: Write) -> None:
    write("d/a.parquet", 700, x=list(range(3000)))
    last = write("d/b.parquet", x=list(range(3000, 5000)))
    whole = DataConnector.from_parquet(last.parent)
    parts = whole.random_split([0.7, 0.2, 0.1], seed=5)
    rows = [part.to_arrow()["x"].to_pylist() for part in parts]
    assert [len(part) for part in rows] == [part.num_rows() for part in parts] == [3500, 1000, 500]
    assert sorted(x for part in rows for x in part) == list(range(5000))
    assert all(part == sorted(part) for part in rows)
    # Every file has its share, and the choice is not a block of rows.
    assert sum(x >= 3000 for x in rows[2]) in range(198, 203)
    assert max(np.diff(rows[1])) < 60

    again = DataConnector.from_parquet(last.parent).random_split([0.7, 0.2, 0.1], seed=5)
    other = whole.random_split([0.7, 0.2, 0.1], seed=6)
    assert again[1].to_arrow()["x"].to_pylist() == rows[1] != other[1].to_arrow()["x"].to_pylist()


def test_a_split_does_not_depend_on_the_order_of_the_paths(write: Write) -> None:
    a, b = write("a.parquet", x=list(range(100))), write("b.parquet", x=list(range(100, 200)))
    one = DataConnector.from_parquet([a, b]).random_split([0.5, 0.5])[0]
    other = DataConnector.from_parquet([b, a]).random_split([0.5, 0.5])[0]
    assert set(one.to_arrow()["x"].to_pylist()) == set(other.to_arrow()["x"].to_pylist())


def test_a_split_of_a_split_and_its_shards(write: Write) -> None:
    whole = DataConnector.from_parquet(write("a.parquet", 300, x=list(range(2000))))
    train, test = whole.random_split([0.8, 0.2], seed=1)
    inner, holdout = train.random_split([0.9, 0.1], seed=1)
    seen: list[int] = []
    for shard in inner.plan(3, seed=0):
        tables = list(inner.ingester().iter_batches(shard, ["x"]))
        assert [table.num_rows for table in tables] == [part.rows for part in shard.ranges]
        seen += [x for table in tables for x in table["x"].to_pylist()]
    for part in (holdout, test):
        seen += part.to_arrow()["x"].to_pylist()
    assert sorted(seen) == list(range(2000))
    assert whole.digest() != train.digest() != inner.digest()


def test_an_empty_part_says_so(write: Write) -> None:
    part = DataConnector.from_parquet(write("a.parquet", x=[1, 2])).random_split([0.01, 0.99])[0]
    with pytest.raises(
        DataError, match=r"part 0 of random_split\(\[0.01, 0.99\]\) has no rows: the whole dataset has only 2 rows"
    ):
        part.num_rows()
