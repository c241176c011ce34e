"""Profiles of columns and their population stability index (PSI), against a computation with NumPy alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.data.profile import profile_of, sample_rows, stability_index

RANDOM = np.random.default_rng(0)


def psi(expected: list[float], actual: list[float]) -> float:
    pairs = [(max(e, 1e-4), max(a, 1e-4)) for e, a in zip(expected, actual, strict=True)]
    return sum((a - e) * math.log(a / e) for e, a in pairs)


def test_the_index_of_numbers_is_that_of_the_deciles_of_the_profile() -> None:
    before, after = RANDOM.normal(0, 1, 5_000), RANDOM.normal(0.4, 1.2, 3_000)
    after[:90] = np.nan
    deciles = np.quantile(before, np.arange(0, 1.05, 0.1))

    def shares(values: np.ndarray) -> list[float]:
        known = values[~np.isnan(values)]
        inner, _ = np.histogram(known, deciles)
        below, above = (known < deciles[0]).sum(), (known > deciles[-1]).sum()
        return [count / len(values) for count in (below, *inner, above, np.isnan(values).sum())]

    found = profile_of(pa.chunked_array([before]), is_category=False)
    assert found["shares"] == pytest.approx(shares(before), abs=1 / 5_000) and len(found["shares"]) == 13
    assert (found["min"], found["max"], found["std"]) == (before.min(), before.max(), before.std())
    index = stability_index(found, pa.chunked_array([after]))
    assert index == pytest.approx(psi(shares(before), shares(after)), rel=0.02) and index > 0.25
    assert stability_index(found, pa.chunked_array([before])) == 0


@pytest.mark.parametrize("text", [True, False])
def test_the_index_of_texts_and_of_categories_is_that_of_their_frequent_values(text: bool) -> None:
    def column(*counts: int) -> pa.ChunkedArray:
        codes = [code for code, count in enumerate(counts) for _ in range(count)]
        return pa.chunked_array([pa.array([f"carrier {code}" for code in codes] if text else codes)])

    before = column(*range(60, 35, -1))  # 25 values
    found = profile_of(before, is_category=not text)
    rows = sum(range(36, 61))
    expected = [count / rows for count in range(60, 40, -1)] + [sum(range(36, 41)) / rows, 0]
    assert found["shares"] == pytest.approx(expected)
    actual = [100 / 280, *[0.0] * 19, 180 / 280, 0]
    assert stability_index(found, column(100, *[0] * 22, 90, 90)) == pytest.approx(psi(expected, actual))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([0.0] * 50 + [*range(1, 51)], [-999.0] * 50 + [*range(1, 51)]),
        ([3] * 100, [2] * 100),
        ([*range(100)], [*range(80)] + [None] * 20),
        ([True] * 90 + [False] * 10, [True] * 10 + [False] * 90),
    ],
    ids=["another mark of missing values", "another constant", "nulls", "booleans"],
)
def test_a_change_that_the_deciles_alone_would_not_show_is_drift(before: list[object], after: list[object]) -> None:
    found = profile_of(pa.chunked_array([before]), is_category=False)
    index = stability_index(found, pa.chunked_array([after]))
    assert index is not None and index > 0.5


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us", "Europe/Berlin"), pa.timestamp("ns")])
def test_times_drift_if_they_are_missing_or_earlier_but_not_if_they_are_later(kind: pa.DataType) -> None:
    def column(*days: int | None) -> pa.ChunkedArray:
        return pa.chunked_array([pa.array(days, pa.int32()).cast(pa.date32()).cast(pa.timestamp("ns")).cast(kind)])

    found = profile_of(column(20_000, 20_009, None, 20_004), is_category=False)
    assert (found["min"][:10], found["max"][:10], found["nulls"]) == ("2024-10-04", "2024-10-13", 0.25)
    assert found["shares"] == [0, 0.75, 0.25]
    later, nulls, earlier = (stability_index(found, column(*days)) for days in ((21_000,) * 3 + (None,), (None,), (0,)))
    assert later == 0 and nulls is not None and nulls > 1 and earlier is not None and earlier > 1
    assert stability_index(found, pa.chunked_array([[1.0]])) is None
    assert stability_index(profile_of(pa.chunked_array([["a"]]), is_category=False), column(1)) is None
    empty = profile_of(column(None), is_category=False)
    assert "min" not in empty and stability_index(empty, column(None)) == 0


def test_columns_of_other_types_are_not_compared_and_empty_ones_have_a_profile() -> None:
    numbers = profile_of(pa.chunked_array([[1, 2]]), is_category=False)
    assert stability_index(numbers, pa.chunked_array([["1", "2"]])) is None
    truths, ones = pa.chunked_array([[True, False, True]]), pa.chunked_array([[1, 0, 1]])
    for before, after in ((truths, ones), (ones, truths)):
        assert stability_index(profile_of(before, is_category=False), after) == 0
    texts = [pa.chunked_array([pa.array(["a", None, "b"]).cast(kind)]) for kind in (pa.string(), pa.string_view())]
    texts.append(texts[0].dictionary_encode())
    assert [profile_of(each, is_category=False)["shares"] for each in texts] == [[1 / 3, 1 / 3, 0, 1 / 3]] * 3
    nulls = profile_of(pa.chunked_array([pa.nulls(3)]), is_category=False)
    assert nulls["nulls"] == 1 and stability_index(nulls, pa.chunked_array([[1.0, 2.0]])) > 1


def test_a_sample_is_even_over_the_rows_the_same_each_time_and_bounded(tmp_path: Path) -> None:
    rows = 120_000
    table = pa.table({"x": np.arange(rows), "text": [f"{i:0100d}" for i in range(rows)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=35_000)
    source = DataConnector.from_parquet(tmp_path, filters=[("x", ">=", 20_000)]).source
    sample = sample_rows(source, ["x", "text"])
    found = sample.column("x").to_numpy()
    assert 10_000 <= len(found) <= 10_010 and len(set(found)) == len(found)
    assert np.bincount((found - 20_000) // 10_000).tolist() == pytest.approx([1_000] * 10, abs=5)
    assert sample.equals(sample_rows(source, ["x", "text"]))
