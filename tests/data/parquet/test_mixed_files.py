"""Files of one dataset that differ in types and nullability, and frames with the index and types that pandas stored."""

from __future__ import annotations

import pickle
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector, ShardedDataConnector
from shoal.data.checks import decimals_of, validate_columns
from shoal.data.numpy_columns import find_categories, to_matrix, to_vector
from shoal.data.parquet.schema import common_type
from shoal.errors import DataError
from tests.data.conftest import Write

BIG = 2**53 + 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([1, 2]), pa.array([1.5, None])),
        (pa.array([1, 2], pa.int32()), pa.array([2**40, None])),
        (pa.nulls(2), pa.array([1, 2])),
        (pa.array([1, 2]), pa.nulls(2)),
        (pa.array([1.5], pa.float32()), pa.array([2.5])),
        (pa.array([1], pa.uint32()), pa.array([-1], pa.int32())),
        (pa.array(["a"]), pa.array(["b"], pa.large_string())),
        (pa.array([Decimal("1.25")]), pa.array([7])),
        (pa.array([[1.5]], pa.list_(pa.field("item", pa.float32(), False))), pa.array([[2.5, None]])),
        (pa.array([{"a": 1}]), pa.array([{"a": 2.5}])),
    ],
    ids=lambda array: str(array.type),
)
def test_files_get_the_type_that_holds_the_values_of_all(
    write: Write, tmp_path: Path, one: pa.Array, other: pa.Array
) -> None:
    write("d/0.parquet", x=one, y=[0] * len(one))
    strict = pa.schema([pa.field("x", other.type, other.null_count > 0), pa.field("y", pa.int64(), False)])
    pq.write_table(pa.table([other, [0] * len(other)], schema=strict), tmp_path / "d/1.parquet")
    connector = DataConnector.from_parquet(tmp_path / "d")
    values = [*one.to_pylist(), *other.to_pylist()]
    right = pa.table({"x": values, "y": [0] * len(values)})
    table = connector.to_arrow()
    assert table.to_pylist() == right.to_pylist() and table.schema == connector.schema()
    assert pickle.loads(pickle.dumps(connector)).to_arrow() == table
    pd.testing.assert_frame_equal(connector.to_pandas(), right.to_pandas())
    shard = ShardedDataConnector.from_parquet(tmp_path / "d").get_shard()
    assert shard.to_arrow().num_rows == shard.to_pandas().shape[0] == table.num_rows


def test_text_and_categories_of_pandas_may_differ(write: Write, tmp_path: Path) -> None:
    for name, values in {
        "0": pa.array(["b", "a"]).dictionary_encode(),
        "1": pa.array(["c", None]).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.large_string())),
    }.items():
        write(f"d/{name}.parquet", c=values, n=[1, 2])
    connector = DataConnector.from_parquet(tmp_path / "d")
    frame = connector.to_pandas()
    assert frame.c.dtype == "category" and frame.c.tolist()[:3] == ["b", "a", "c"] and pd.isna(frame.c[3])
    write("d/2.parquet", c=["d"], n=[3])
    connector = DataConnector.from_parquet(tmp_path / "d")
    validate_columns(connector.source, ["c"], "n", categorical_cols=["c"])
    assert find_categories(connector.source, ["c"])["c"].to_pylist() == ["a", "b", "c", "d"]
    assert connector.to_pandas().c.tolist()[-1] == "d"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.string(), pa.int64()),
        (pa.bool_(), pa.int64()),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.decimal128(38, 2), pa.float64()),
        (pa.struct([("a", pa.int64())]), pa.struct([("b", pa.int64())])),
    ],
    ids=str,
)
def test_types_without_a_common_type_are_refused(
    write: Write, tmp_path: Path, one: pa.DataType, other: pa.DataType
) -> None:
    assert common_type(one, other) is None is common_type(other, one)
    write("d/0.parquet", x=pa.nulls(1, one), y=[1])
    write("d/1.parquet", x=pa.nulls(1, other), y=[1])
    connector = ShardedDataConnector.from_parquet(tmp_path / "d")
    for read in (connector.to_arrow, connector.to_pandas, connector.get_shard().to_arrow):
        with pytest.raises(DataError) as failed:
            read()
        assert all(text in str(failed.value) for text in ("1.parquet", 'column "x"', str(one), str(other)))
    validate_columns(connector.source, ["y"])  # Columns that are not used may differ.


@pytest.mark.parametrize("statistics", [True, False])
def test_ids_that_a_common_float_would_round_are_refused(write: Write, tmp_path: Path, statistics: bool) -> None:
    write("d/0.parquet", x=[1.5])
    pq.write_table(pa.table({"x": [1, BIG]}), tmp_path / "d/1.parquet", write_statistics=statistics)
    connector = DataConnector.from_parquet(tmp_path / "d")
    with pytest.raises(DataError, match=rf'1\.parquet: column "x" is of type int64, .*double.*{BIG}'):
        connector.to_arrow()
    if statistics:
        with pytest.raises(DataError, match=r"1\.parquet"):
            validate_columns(connector.source, ["x"])


def test_frames_are_those_of_read_parquet(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "id": pd.array([BIG, None], dtype="Int64"),
            "flag": pd.array([True, None], dtype="boolean"),
            "text": pd.array(["a", None], dtype="string"),
            "kind": pd.Categorical(["b", "a"]),
            "when": pd.to_datetime(["2026-01-01", "2026-01-02"]).tz_localize("Europe/Berlin"),
        },
        index=pd.Index(["r", "s"], name="key"),
    )
    path = tmp_path / "a.parquet"
    frame.to_parquet(path)
    connector = ShardedDataConnector.from_parquet(path)
    pd.testing.assert_frame_equal(connector.to_pandas(), pd.read_parquet(path))
    pd.testing.assert_frame_equal(connector.to_pandas(limit=1), pd.read_parquet(path).head(1))
    pd.testing.assert_frame_equal(pickle.loads(pickle.dumps(connector)).get_shard().to_pandas(), pd.read_parquet(path))
    back = DataConnector.from_dataframe(frame).to_pandas()
    pd.testing.assert_frame_equal(back, frame.reset_index(drop=True))


def test_ids_are_not_rounded_without_the_types_of_pandas(write: Write) -> None:
    frame = DataConnector.from_parquet(write("a.parquet", id=[BIG, None], small=[1, None])).to_pandas()
    assert frame["id"].tolist() == [BIG, pd.NA] and frame["small"].dtype == "float64"
    other = DataConnector.from_parquet(write("b.parquet", id=pa.array([2**64 - 1, None], pa.uint64()))).to_pandas()
    assert other["id"].tolist() == [2**64 - 1, pd.NA]


def test_types_of_pandas_do_not_apply_to_wider_types(tmp_path: Path) -> None:
    pd.DataFrame({"x": pd.array([1, None], dtype="Int64")}).to_parquet(tmp_path / "0.parquet")
    pd.DataFrame({"x": [0.5]}).to_parquet(tmp_path / "1.parquet")
    assert DataConnector.from_parquet(tmp_path).to_pandas()["x"].tolist()[::2] == [1.0, 0.5]


def test_decimals_are_read_as_float64(write: Write) -> None:
    values = [Decimal("1.25"), None, Decimal("12345678901234567.75")]
    connector = DataConnector.from_parquet(write("a.parquet", x=values, y=[Decimal(1)] * 3, n=[1, 2, 3]))
    validate_columns(connector.source, ["x"], "y")
    assert decimals_of(connector.source, ["x", "y", "n"]) == ["x", "y"]
    right = np.array([1.25, np.nan, 12345678901234567.75])
    np.testing.assert_array_equal(to_vector(connector.to_arrow(), "x"), right)
    np.testing.assert_array_equal(to_matrix(connector.to_arrow(), ["x"])[:, 0], right.astype("float32"))
    with pytest.raises(DataError, match=r'"x" is of type decimal.* cannot be categorical: .*CAST'):
        validate_columns(connector.source, ["x"], "y", categorical_cols=["x"])
