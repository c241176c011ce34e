"""Predictions of partitions: the rows keep the types of the dataset, in all files."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.data.output_tables import described
from shoal.errors import DataError
from shoal.kinds.partitions import partition_messages
from shoal.kinds.partitions.keys import key_text
from shoal.kinds.partitions.partition_messages import ModelBytes
from shoal.kinds.partitions.partition_results import PartitionResults
from shoal.kinds.partitions.predictions import PartitionPrediction, report_unknown
from tests.support.partition_models import model_of, written

ROWS = 30
KEY = [position % 3 for position in range(ROWS)]
BIG = 2**53 + 1


def only(key: int, value: Any) -> list[Any]:
    """A column that has a value only for one key."""
    return [value if each == key else None for each in KEY]


TABLE = pa.table(
    {
        "key": pa.array(KEY, pa.int32()),
        "a": pa.array(range(ROWS), pa.float64()),
        "day": pa.array(only(0, datetime.date(2024, 1, 1)), pa.date32()),
        "open": pa.array(only(0, True), pa.bool_()),
        "price": pa.array([Decimal(10 ** (2 * key)) / 100 for key in KEY], pa.decimal128(12, 2)),
        "id": pa.array([None if key == 2 else BIG + key for key in KEY], pa.int64()),
        "kind": pa.array(only(1, "x"), pa.string()).dictionary_encode().cast(pa.dictionary(pa.int16(), pa.string())),
        "tags": pa.array(only(1, ["x", None]), pa.list_(pa.string())),
        "at": pa.array([position * 10**9 + 1 for position in range(ROWS)], pa.timestamp("ns", "Europe/Berlin")),
    }
)


@pytest.fixture
def data(tmp_path: Path) -> DataConnector:
    pq.write_table(TABLE, tmp_path / "rows.parquet")
    return DataConnector.from_parquet(tmp_path / "rows.parquet")


def predicted(data: DataConnector, folder: Path, factors: dict[Any, Any], **options: Any) -> PartitionResults:
    """Predict each partition, as a worker does."""
    model = model_of(folder / "models", factors, pa.int64())
    given = {"input_cols": ("a",), "keep_cols": None, "prediction_col": "prediction", "predict_fn": None, **options}
    function = PartitionPrediction(model.results.manifest, model.results.digest, missing="null", **given)
    function.prepare(pa.int32(), ["key"])
    values: dict[Any, ModelBytes | None] = {}
    for key in range(3):
        rows = described(data.to_arrow().filter(pa.compute.field("key") == key), data.source)
        values[key] = function(rows, key)
    return written(folder / "predictions", values, pa.int32())


def test_all_files_have_the_types_of_the_dataset_and_the_predictions(data: DataConnector, tmp_path: Path) -> None:
    results = predicted(data, tmp_path, {0.0: 2.0, 1.0: np.float32(3), 7.0: 1.0})

    results.write_parquet(tmp_path / "out")
    schemas = [pq.read_schema(path) for path in sorted((tmp_path / "out").glob("*.parquet"))]
    expected = TABLE.schema.append(pa.field("prediction", pa.float64()))
    assert [each.remove_metadata() for each in schemas] == [expected, expected]
    found = pq.read_table(tmp_path / "out").sort_by("at")
    assert found.select(TABLE.column_names).equals(TABLE)
    factors = {0: 2.0, 1: 3.0, 2: None}
    right = [None if factors[key] is None else factors[key] * a for a, key in enumerate(KEY)]
    assert found["prediction"].to_pylist() == right

    frame = pd.concat(results.rows()).sort_values("at")
    assert [None if each is pd.NA else each for each in frame["id"]] == TABLE["id"].to_pylist()
    assert [None if np.isnan(each) else each for each in frame["prediction"]] == right
    assert pd.read_parquet(tmp_path / "out")["prediction"].notna().sum() == 20
    assert results[0].value["id"].tolist() == [BIG] * 10


def test_a_key_without_a_model_adds_no_column(data: DataConnector, tmp_path: Path) -> None:
    results = predicted(data, tmp_path, {0: (1.0, 2.0), 1: (1.0, 3.0)}, keep_cols=("a",))

    results.write_parquet(tmp_path / "out")
    found = pq.read_table(tmp_path / "out").sort_by("a").to_pydict()
    assert [*found] == ["a", "prediction_0", "prediction_1"]
    right = [None if key == 2 else a * (key + 2) for a, key in enumerate(KEY)]
    assert found["prediction_1"] == right
    assert [*pd.concat(results.rows()).columns] == [*found]


def test_the_types_of_pandas_are_kept(tmp_path: Path) -> None:
    index = pd.Index([*"abcdefghij"] * 3, name="row")
    frame = pd.DataFrame({"key": KEY, "a": np.arange(ROWS, dtype=float)}, index=index)
    frame["count"] = pd.array(only(0, 1), "Int8")
    frame.to_parquet(tmp_path / "rows.parquet")
    results = predicted(DataConnector.from_parquet(tmp_path / "rows.parquet"), tmp_path, dict.fromkeys(range(3), 1.0))

    results.write_parquet(tmp_path / "out")
    expected = frame.assign(prediction=frame["a"])
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out").sort_values("a"), expected)
    pd.testing.assert_frame_equal(pd.concat(results.rows()).sort_values("a"), expected)


def test_an_index_that_counts_the_rows_is_not_given_to_other_rows(tmp_path: Path) -> None:
    pd.DataFrame({"key": KEY, "a": np.arange(ROWS, dtype=float)}).to_parquet(tmp_path / "rows.parquet")
    results = predicted(DataConnector.from_parquet(tmp_path / "rows.parquet"), tmp_path, dict.fromkeys(range(3), 1.0))
    results.write_parquet(tmp_path / "out")
    stored = pq.read_schema(tmp_path / "out" / "part-00000.parquet").metadata[b"pandas"]
    assert json.loads(stored)["index_columns"] == []


def test_models_that_predict_texts_and_numbers_are_refused(data: DataConnector, tmp_path: Path) -> None:
    def predict(model: Any, rows: pd.DataFrame, key: int) -> Any:
        return ["x"] * len(rows) if key else [1.0] * len(rows)

    results = predicted(data, tmp_path, dict.fromkeys(range(3), 1.0), predict_fn=predict)
    with pytest.raises(DataError, match='column "prediction" is of type double in some rows and of type string'):
        results.write_parquet(tmp_path / "out")


def test_a_column_of_the_dataset_is_not_replaced(data: DataConnector, tmp_path: Path) -> None:
    with pytest.raises(DataError, match='already has a column "price": choose another prediction_col'):
        predicted(data, tmp_path, {0: 1.0}, prediction_col="price")


def test_frames_of_a_function_are_written_with_one_schema(tmp_path: Path) -> None:
    frames = [
        pd.DataFrame({"day": [None, None], "n": [1, 2]}),
        pd.DataFrame({"day": [datetime.date(2024, 1, 1)], "n": [0.5], "more": ["x"]}),
    ]
    results = written(tmp_path, {key: partition_messages.stored(frame) for key, frame in enumerate(frames)}, pa.int64())

    results.write_parquet(tmp_path / "out")
    found = pq.read_table(tmp_path / "out")
    assert found.schema.field("day").type == pa.date32()
    assert found.to_pydict() == {
        "day": [None, None, datetime.date(2024, 1, 1)],
        "n": [1.0, 2.0, 0.5],
        "more": [None, None, "x"],
    }


def test_keys_of_another_kind_are_refused_by_the_worker_too(tmp_path: Path) -> None:
    model = model_of(tmp_path, {1: 1.0}, pa.int64())
    options: Any = {"input_cols": (), "keep_cols": None, "prediction_col": "p", "predict_fn": None, "missing": "null"}
    function = PartitionPrediction(model.results.manifest, model.results.digest, **options)
    with pytest.raises(DataError, match=r'"store" are of type string \(text\), but .* of type int64 \(number\)'):
        function.prepare(pa.string(), ["store"])


def test_rows_without_a_model_are_counted_and_a_prediction_without_any_model_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report_unknown({}, 10)
    assert capsys.readouterr().out == ""
    report_unknown({str(key): 2 for key in range(7)}, 100)
    keys = "0 (2 rows), 1 (2 rows), 2 (2 rows), 3 (2 rows), 4 (2 rows) and 2 more"
    said = f"14 of 100 rows have null predictions, because these keys have no model: {keys}"
    assert said in capsys.readouterr().out
    with pytest.raises(DataError, match=r"none of the 5 rows has a key with a model; their keys are 1 \(2 rows\), 2"):
        report_unknown({"1": 2, "2": 3}, 5)


def test_a_result_names_both_types_if_there_is_no_such_key(tmp_path: Path) -> None:
    results = model_of(tmp_path, {1: 1.0, 2: None}, pa.int64()).results
    assert results[np.float32(1)].text == key_text(1)
    assert (1.0 in results, "1" in results, results.get(True)) == (True, False, None)
    assert [results.predicts(key) for key in (1.0, 2, 3)] == [True, False, False]
    with pytest.raises(
        KeyError, match=r"no partition '1' \(str\) among the keys of type int64; the first keys are 1, 2"
    ):
        results["1"]
