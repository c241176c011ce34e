"""Categories: one encoding of all rows, whatever rows come first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shoal.data import DataConnector, numpy_columns
from shoal.data.numpy_columns import encoded, find_categories, from_lists, to_lists, to_matrix
from shoal.errors import DataError

from .conftest import Write


def found(path: Path, *columns: str) -> dict[str, list[Any]]:
    return to_lists(find_categories(DataConnector.from_parquet(path).source, columns))


def test_categories_of_all_row_groups_and_files_sorted(write: Write, tmp_path: Path) -> None:
    write("d/a.parquet", 2, x=["b", "z", None, "a", "b", "é"], n=[10, -3, 10, 7, None, 7], b=[True, None] * 3)
    write("d/b.parquet", x=["Z"], n=[10**12], b=[False])
    assert found(tmp_path / "d", "x", "n", "b") == {
        "x": ["Z", "a", "b", "z", "é"],
        "n": [-3, 7, 10, 10**12],
        "b": [False, True],
    }
    assert found(tmp_path / "d") == {}


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["b", None, "a"], pa.large_string()),
        pa.array(["b", None, "a"], pa.string_view()),
        pa.array(["b", None, "a"]).dictionary_encode(),
        pa.DictionaryArray.from_arrays(pa.array([2, None, 0], pa.int8()), pa.array(["a", "unused", "b"])),
    ],
    ids=lambda values: str(values.type),
)
def test_however_text_is_stored(write: Write, values: pa.Array) -> None:
    path = write("a.parquet", x=values)
    assert found(path, "x") == {"x": ["a", "b"]}
    codes = encoded(pa.table({"x": values}), from_lists(found(path, "x")))
    assert codes["x"].to_pylist() == [1, None, 0]


def test_categories_from_the_path(write: Write, tmp_path: Path) -> None:
    write("d/carrier=UA/month=1/a.parquet", x=[1.0])
    write("d/carrier=AA/month=2/a.parquet", x=[1.0])
    assert found(tmp_path / "d", "carrier", "month") == {"carrier": ["AA", "UA"], "month": [1, 2]}


def test_only_the_rows_of_a_split_count(write: Write) -> None:
    path = write("a.parquet", 10, x=[str(i) for i in range(100)])
    parts = DataConnector.from_parquet(path).random_split([0.5, 0.5])
    sets = [set(to_lists(find_categories(part.source, ["x"]))["x"]) for part in parts]
    assert sets[0].isdisjoint(sets[1])
    assert len(sets[0]) + len(sets[1]) == 100


def test_codes_and_what_has_none() -> None:
    known = from_lists({"x": ["a", "b"], "n": [5, 7], "b": [False, True]})
    table = pa.table({
        "n": pa.chunked_array([pa.array([7, 5], pa.int8()), pa.array([6, None], pa.int8())]),
        "v": [0.5, 1.5, 2.5, None],
        "x": ["b", "unseen", None, "a"],
        "b": [True, None, False, True],
    })  # fmt: skip
    nan = np.nan
    matrix = to_matrix(encoded(table, known), ["x", "n", "v", "b"])
    expected = [[1, 1, 0.5, 1], [nan, 0, 1.5, nan], [nan, nan, 2.5, 0], [0, nan, nan, 1]]
    np.testing.assert_array_equal(matrix, np.array(expected, np.float32))
    nothing = encoded(pa.table({"x": pa.nulls(2)}), {"x": known["x"]})
    assert nothing["x"].to_pylist() == [None, None]


def test_lists_are_json_and_back(write: Write) -> None:
    path = write("a.parquet", x=pa.array(["b", "a"]), n=pa.array([3, 2], pa.uint64()), b=[True, None])
    known = find_categories(DataConnector.from_parquet(path).source, ["x", "n", "b"])
    assert from_lists(to_lists(known)) == known
    assert from_lists({"f": [2.5, 1.0]})["f"] == pa.array([2.5, 1.0])  # of a model from LightGBM itself
    with pytest.raises(DataError, match='column "f" are not of one type'):
        from_lists({"f": ["a", 1]})


def test_too_many(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a.parquet", 2, x=["a", "b", "c", "d"])
    monkeypatch.setattr(numpy_columns, "MOST_CATEGORIES", 4)
    assert len(found(path, "x")["x"]) == 4
    monkeypatch.setattr(numpy_columns, "MOST_CATEGORIES", 3)
    exceeded = r'"x" has more than 3 categories \(the limit was exceeded in .*a\.parquet, row group 1\)'
    with pytest.raises(DataError, match=exceeded):
        found(path, "x")


def test_none_at_all(write: Write) -> None:
    with pytest.raises(DataError, match='"x" is null in every row'):
        found(write("a.parquet", x=pa.array([None], pa.string())), "x")


def test_numbers_that_have_no_sign(write: Write) -> None:
    with pytest.raises(DataError, match=r'column "x" cannot be sorted .Integer value \d+ not in range.*as text'):
        found(write("a.parquet", x=pa.array([2**64 - 1], pa.uint64())), "x")
