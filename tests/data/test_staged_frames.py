"""DataFrames with columns that Parquet has no type for, and DataFrames of other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from shoal.data import DataConnector
from shoal.data.checks import check_weight, validate_columns
from shoal.errors import DataError, InvalidArgumentError, ShoalError
from shoal.training.boosting.request import TrainRequest
from tests.data.conftest import Write


def test_sparse_columns_become_dense() -> None:
    frame = pd.DataFrame(
        {"d": pd.arrays.SparseArray([0.0, 1.0, np.nan]), "n": pd.arrays.SparseArray([0, 7, 0]), "x": 1}
    )
    right = frame.assign(d=frame.d.sparse.to_dense(), n=frame.n.sparse.to_dense())
    pd.testing.assert_frame_equal(DataConnector.from_dataframe(frame).to_pandas(), right)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (pd.cut([1, 5, 9], 3), "bounds"),
        (pd.arrays.IntervalArray.from_breaks([0, 1, 2]), "bounds"),
        (pd.period_range("2026-01", periods=2, freq="M"), "to_timestamp"),
        (np.array([1 + 2j]), "imaginary"),
        (np.array([1, "a"], dtype=object), "convert the values to one type"),
    ],
    ids=["cut", "interval", "period", "complex", "object"],
)
def test_columns_without_a_parquet_type_are_named(values: Any, said: str) -> None:
    with pytest.raises(DataError, match=f'column "d" of the DataFrame .*cannot be written as Parquet: .*{said}'):
        DataConnector.from_dataframe(pd.DataFrame({"d": values}))


class Snowpark:
    """A DataFrame of Snowpark's local testing: to_arrow() returns rows."""

    def to_arrow(self) -> list[tuple[int, float]]:
        return [(1, 2.0)]


class SnowparkWithPandas(Snowpark):
    def to_pandas(self) -> pd.DataFrame:
        return pd.DataFrame({"A": [1], "B": [2.0]})


def test_frames_whose_to_arrow_returns_rows() -> None:
    assert DataConnector.from_dataframe(SnowparkWithPandas()).to_arrow().to_pydict() == {"A": [1], "B": [2.0]}
    with pytest.raises(InvalidArgumentError, match="of the Snowpark returned a list instead of a pyarrow Table"):
        DataConnector.from_dataframe(Snowpark())


@pytest.mark.parametrize("kind", ["frame", "query"])
def test_empty_frames_and_queries_are_named_as_such(kind: str) -> None:
    if kind == "frame":
        connector = DataConnector.from_dataframe(pd.DataFrame({"x": [1.0], "y": [1]}).iloc[:0])
    else:
        connector = DataConnector.from_sql("SELECT 1 AS x, 2 AS y WHERE 1 = 0", "sqlite://")
    with pytest.raises(DataError, match="the query or DataFrame that it was made from is empty"):
        validate_columns(DataConnector.from_spec(connector.to_spec()).source, ["x"], "y")


def test_weights_that_are_all_zero_are_refused(write: Write) -> None:
    connector = DataConnector.from_parquet(write("a.parquet", 2, w=[0.0] * 4, some=[0, 0, 0, 1]))
    with pytest.raises(DataError, match=r'the weight "w" is 0 in every row of .*a\.parquet'):
        check_weight(connector.source, "w")
    check_weight(connector.source, "some")


@pytest.mark.parametrize(
    ("framework", "names", "said"),
    [
        ("xgboost", ["a[0]"], r"a\[0\].*xgboost accepts no feature name with one of the characters \[ \] <"),
        ("xgboost", ["a<b"], "a<b"),
        ("lightgbm", ["a:b"], "a:b.*lightgbm accepts no feature name"),
        ("lightgbm", ["a b", "a_b"], 'lightgbm changes to "a_b"'),
    ],
)
def test_names_that_a_library_refuses(framework: Any, names: list[str], said: str, write: Write) -> None:
    dataset = DataConnector.from_parquet(write("a.parquet", y=[1])).to_spec()
    with pytest.raises(ShoalError, match=said):
        TrainRequest(framework=framework, dataset=dataset, input_cols=names, label_col="y")


@pytest.mark.parametrize("framework", ["xgboost", "lightgbm"])
def test_names_that_the_libraries_accept(framework: Any, write: Write) -> None:
    """Both libraries train with these names."""
    dataset = DataConnector.from_parquet(write("a.parquet", y=[1])).to_spec()
    names = ["a b", "c", "\u00f6", "d\t", "e.f"]
    assert TrainRequest(framework=framework, dataset=dataset, input_cols=names, label_col="y").input_cols == tuple(
        names
    )
