"""Feeding a shard to XGBoost, without a gang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xgboost

from shoal.data import DataConnector
from shoal.data.planning import Shard
from shoal.errors import DataError
from shoal.training.boosting.messages import Columns, Part
from shoal.training.boosting.rows import ShardRows
from shoal.training.xgboost.worker import ShardIter
from tests.support.predictions import predict_booster
from tests.support.two_node_cluster import COLUMNS, ROWS


def shard_rows(connector: DataConnector, budget: int = 0, shard: Shard | None = None, **columns: Any) -> ShardRows:
    part = Part(connector, connector.plan(1, 0)[0] if shard is None else shard)
    return ShardRows(part, Columns(tuple(COLUMNS), "y", **columns), budget)


def train(shard: ShardRows) -> bytes:
    matrix = xgboost.QuantileDMatrix(ShardIter(shard), nthread=1)
    return bytes(xgboost.train({"nthread": 1}, matrix, 5).save_raw("ubj"))


def test_rows_that_fit_are_decoded_once_and_others_in_each_pass_to_the_same_model(rows: Path) -> None:
    connector = DataConnector.from_parquet(rows)
    kept, streamed = shard_rows(connector, 2**30), shard_rows(connector)
    assert train(kept) == train(streamed)
    assert kept.passes == 1
    assert streamed.passes == 4


def test_the_model_does_not_depend_on_streaming_at_all(rows: Path) -> None:
    connector = DataConnector.from_parquet(rows)
    table = connector.to_pandas()
    matrix = xgboost.QuantileDMatrix(table[COLUMNS], table["y"], nthread=1)
    whole = xgboost.train({"nthread": 1}, matrix, 5)
    streamed = xgboost.Booster(model_file=bytearray(train(shard_rows(connector))))
    values = table[COLUMNS].to_numpy()
    np.testing.assert_allclose(streamed.inplace_predict(values), whole.inplace_predict(values), rtol=0.05, atol=0.05)


def test_every_row_with_its_label_weight_and_margin(rows: Path) -> None:
    connector = DataConnector.from_parquet(rows)
    matrix = xgboost.QuantileDMatrix(ShardIter(shard_rows(connector, weight="w", base_margin=("m",))))
    table = connector.to_pandas()
    assert matrix.num_row() == ROWS
    assert matrix.feature_names == COLUMNS
    np.testing.assert_array_equal(matrix.get_label(), table["y"])
    np.testing.assert_array_equal(matrix.get_weight(), table["w"])
    np.testing.assert_array_equal(matrix.get_base_margin(), table["m"])


def test_a_shard_of_no_rows_is_one_empty_batch(rows: Path) -> None:
    connector = DataConnector.from_parquet(rows)
    train_rows = xgboost.QuantileDMatrix(ShardIter(shard_rows(connector)))
    nothing = ShardIter(shard_rows(connector, shard=Shard(())))
    assert xgboost.QuantileDMatrix(nothing, ref=train_rows).num_row() == 0


def test_a_worker_that_reads_other_columns_says_so(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = DataConnector.from_parquet(rows)
    read = connector.source.read_pieces
    monkeypatch.setattr(connector.source, "read_pieces", lambda ranges, columns: read(ranges, columns[1:]))
    with pytest.raises(DataError, match=r"part-\d.parquet, row group 0: the columns"):
        xgboost.QuantileDMatrix(ShardIter(shard_rows(connector)))


def test_a_worker_that_reads_too_few_rows_says_so(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = DataConnector.from_parquet(rows)
    read = connector.source.read_pieces
    shorter = lambda *args: ((part, table.slice(1)) for part, table in read(*args))  # noqa: E731
    monkeypatch.setattr(connector.source, "read_pieces", shorter)
    with pytest.raises(DataError, match="999 rows were read instead of 1000"):
        xgboost.QuantileDMatrix(ShardIter(shard_rows(connector)))


def test_margins_per_class_train_and_predict_as_in_xgboost(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    names = ("m0", "m1", "m2")
    frame = pd.DataFrame({name: rng.normal(size=900).astype("float32") for name in ("a", *names)})
    frame["y"] = np.digitize(frame["a"] + frame["m0"], [-0.5, 0.5])
    frame.to_parquet(tmp_path / "rows.parquet", row_group_size=300)
    connector = DataConnector.from_parquet(tmp_path)
    part = Part(connector, connector.plan(1, 0)[0])
    rows = ShardRows(part, Columns(("a",), "y", base_margin=names), 0)
    params = {"objective": "multi:softprob", "num_class": 3, "nthread": 1}
    booster = xgboost.train(params, xgboost.QuantileDMatrix(ShardIter(rows), nthread=1), 5)
    whole = xgboost.QuantileDMatrix(frame[["a"]], frame["y"], base_margin=frame[[*names]].to_numpy(), nthread=1)
    expected = xgboost.train(params, whole, 5).predict(whole)
    predicted = predict_booster(booster, connector, ["a"], base_margin_cols=names)
    np.testing.assert_allclose(predicted, expected, rtol=0.05, atol=0.05)
    np.testing.assert_allclose(booster.predict(whole), predicted, rtol=1e-6)
