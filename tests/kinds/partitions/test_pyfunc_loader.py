"""The version of all partitions: each row gets the prediction of its key's model, in tables and in MLflow's frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.errors import DataError
from shoal.kinds.partitions import logged_model
from tests.support.partition_models import model_of

HOURS = pd.to_datetime(["2024-10-27 00:30", "2024-10-27 01:30"], utc=True).tz_convert("Europe/Berlin")
KEYS: list[tuple[pa.DataType, list[Any], list[Any]]] = [
    (pa.int64(), [1, 2**53 + 1], [1.0, np.int8(1)]),
    (pa.bool_(), [True, False], [np.bool_(True)]),
    (pa.string(), ["a", "b"], []),
    (pa.date32(), [*HOURS.date[:1], (HOURS + pd.Timedelta(days=1)).date[0]], []),
    (pa.timestamp("us", "Europe/Berlin"), [*HOURS], [HOURS[0].tz_convert("UTC")]),
    (pa.timestamp("us"), [*HOURS.tz_localize(None), pd.Timestamp("2024-01-01")][1:], []),
]


@pytest.mark.parametrize(("type_", "keys", "others"), KEYS, ids=lambda value: str(value))
def test_a_null_is_a_key_of_its_own_in_tables_and_in_mlflow(
    type_: pa.DataType, keys: list[Any], others: list[Any], tmp_path: Path
) -> None:
    model = model_of(tmp_path / "data", {keys[0]: 2.0, keys[1]: 3.0, None: 5.0}, type_)
    table = pa.table({"key": pa.array([keys[1], None, keys[0]], type_), "a": pa.array([1, 10, 100])})

    assert model.predict_table(table).tolist() == [3.0, 50.0, 200.0]
    signature = logged_model.signature_of(table.schema, ["key"], ["a"])
    mlflow.pyfunc.save_model(
        tmp_path / "model",
        loader_module=logged_model.__name__,
        data_path=str(tmp_path / "data"),
        signature=signature,
        pip_requirements=[],
    )
    loaded = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    as_objects = pd.DataFrame({"key": pd.Series([keys[1], None, keys[0]], dtype=object), "a": [1, 10, 100]})
    if type_ == pa.int64():
        frames = [table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)]
        for rounded in (as_objects, table.to_pandas()):
            with pytest.raises(DataError, match="may be a rounded integer, but the keys of the models are integers"):
                loaded.predict(rounded)
    else:
        frames = [as_objects, table.to_pandas()]
    for frame in frames:
        assert loaded.predict(frame).tolist() == [3.0, 50.0, 200.0]
    for other in others:
        assert loaded.predict(pd.DataFrame({"key": [other], "a": [1]})).tolist() == [2.0]


@pytest.mark.parametrize(("type_", "rounded"), [(pa.float64(), 2**53), (pa.float32(), 2**24)], ids=str)
def test_a_float_that_may_be_a_rounded_integer_gets_no_model_of_another_integer(
    type_: pa.DataType, rounded: int, tmp_path: Path
) -> None:
    table = pa.table({"key": pa.array([float(rounded), None, 7.0], type_), "a": [1, 1, 1]})
    model = model_of(tmp_path / "integers", {rounded: 2.0, 7: 3.0}, pa.int64())
    for reads in (model.predict_table, model.unknown):
        with pytest.raises(DataError, match=f'"key" are floats, and {float(rounded)} may be a rounded integer'):
            reads(table)
    floats = model_of(tmp_path / "floats", {float(rounded): 2.0, 7.0: 3.0}, pa.float64())
    assert floats.predict_table(table.slice(2)).tolist() == [3.0]
    assert floats.predict_table(table.slice(0, 1)).tolist() == [2.0]


def test_features_of_mlflow_may_be_nullable_integers(tmp_path: Path) -> None:
    frame = pd.DataFrame({"key": ["x", "x", "y"], "a": pd.Series([1, None, 3], dtype=object)})
    model = model_of(tmp_path / "data", {"x": 2.0, "y": 3.0}, pa.string())
    np.testing.assert_array_equal(model.predict(frame), [2.0, np.nan, 9.0])


def test_keys_of_another_kind_are_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path, {1: 2.0}, pa.int64(), ["store"])
    pq.write_table(pa.table({"store": ["1"], "a": [1.0]}), tmp_path / "rows.parquet")
    said = r'"store" are of type .*string \(text\), but those of the models are of type int64 \(number\)'
    with pytest.raises(DataError, match=said):
        model.check(DataConnector.from_parquet(tmp_path / "rows.parquet").source)
    with pytest.raises(DataError, match=said):
        model.predict(pd.DataFrame({"store": ["1"], "a": [1.0]}))
    with pytest.raises(DataError, match="the rows lack columns that the model needs: store"):
        model.predict(pd.DataFrame({"a": [1.0]}))


def test_rows_without_a_model_are_nan_in_each_output_and_named(tmp_path: Path) -> None:
    key_type = pa.struct([("s", pa.string()), ("n", pa.int8())])
    model = model_of(tmp_path, {("x", 1): (1.0, 2.0), ("y", 1): None}, key_type, ["s", "n"])
    table = pa.table({"s": ["x", "y", "x", "x"], "n": [1, 1, 2, 2], "a": [10.0, 1.0, 1.0, 1.0]})

    np.testing.assert_array_equal(model.predict_table(table), [[10, 20], *[[np.nan, np.nan]] * 3])
    assert model.predict_table(table.slice(1)).shape == (3, 2)
    unknown, rows = model.unknown(table)
    assert (unknown.tolist(), rows) == ([False, True, True, True], {"('y', 1)": 1, "('x', 2)": 2})


def test_models_with_unequal_outputs_are_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path, {1: 2.0, 2: (1.0, 2.0)}, pa.int64())
    with pytest.raises(DataError, match="train models with equal outputs"):
        model.predict(pd.DataFrame({"key": [1, 2], "a": [1.0, 1.0]}))


def test_a_feature_that_mlflow_cannot_take_is_refused() -> None:
    schema = pa.schema([("day", pa.date32()), ("a", pa.int32())])
    with pytest.raises(DataError, match='the column "day" is of type date32'):
        logged_model.signature_of(schema, ["a"], ["day"])
    logged_model.signature_of(schema, ["day"], ["a"])
