"""LightGBM reads features as float64: times, ids and close numbers keep the values that plain LightGBM sees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.training.boosting import rows as boosting_rows
from shoal.training.boosting import worker_fit
from shoal.training.boosting.messages import Checkpoint, Columns, Part, Segment, Task
from shoal.training.boosting.request import TrainRequest
from shoal.training.boosting.worker_load import stored_row_bytes
from shoal.training.gang.placement import GangShape
from shoal.training.lightgbm import library as of_lightgbm
from shoal.training.lightgbm import worker
from shoal.training.lightgbm.library import LightGBM
from shoal.training.lightgbm.params import worker_params
from tests.support.predictions import predict_booster

FEATURES = ["epoch_s", "epoch_ms", "id", "close", "small"]
ROUNDS = 8
PARAMS = {"num_leaves": 15, "learning_rate": 0.3, "min_data_in_leaf": 5}


def write(folder: Path) -> pd.DataFrame:
    """Columns whose values are all alike as float32, and one that is float32; the label is made of each."""
    rng = np.random.default_rng(3)
    count = 2_000
    step = rng.integers(0, 300, (4, count))
    ids = pa.array(2**53 - 4 * step[2], mask=rng.random(count) < 0.05)
    table = pa.table({
        "epoch_s": 1_756_000_000 + step[0],
        "epoch_ms": 1_756_000_000_000 + step[1],
        "id": ids,
        "close": 1 + step[3] * 1e-12,
        "small": rng.normal(size=count).astype(np.float32),
        "y": (step % 60).sum(axis=0) + rng.normal(size=count),
        "m": 1e8 + step[1] / 7,
    })  # fmt: skip
    pq.write_table(table, folder / "rows.parquet", row_group_size=700)
    return table.to_pandas()


def train(
    connector: DataConnector, columns: Columns, stops: Sequence[int] = (ROUNDS,), **more: Any
) -> lightgbm.Booster:
    """Train in this process, with the functions of the driver and of one worker."""
    asked = TrainRequest(
        framework="lightgbm", dataset=connector.to_spec(), input_cols=columns.features, label_col=columns.label
    )
    params = worker_params(LightGBM().merge_params({**PARAMS, **more}, None, ROUNDS), asked, GangShape(1, 1))
    part = Part(connector, connector.plan(1, 0)[0])
    library = LightGBM()

    def on_all(name: str, arguments: Sequence[Any]) -> list[Any]:
        return [getattr(worker, name)(*each) for each in arguments]

    library.prepare(on_all, [Task(part, {}, columns, params)])
    for index, stop in enumerate(stops):
        segment = Segment(index, stop, stop == stops[-1], None if index else Checkpoint())
        state = worker.boost(segment).checkpoint
    worker.finish()
    assert state is not None
    return lightgbm.Booster(model_str=state.model.decode())


def alone(frame: pd.DataFrame, features: Sequence[str], margin: Any = None, **more: Any) -> lightgbm.Booster:
    fixed = {"deterministic": True, "force_col_wise": True, "num_threads": 1, "verbosity": -1}
    data = lightgbm.Dataset(frame[[*features]], frame["y"], init_score=None if margin is None else frame[margin])
    return lightgbm.train({**PARAMS, **more, **fixed, "feature_pre_filter": False}, data, ROUNDS)


@pytest.mark.parametrize("budget", [0, 2**30])
@pytest.mark.parametrize("feature", FEATURES)
def test_bins_training_and_predictions_are_those_of_plain_lightgbm(
    feature: str, budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = write(tmp_path)
    monkeypatch.setattr(worker_fit, "_cache_budget", lambda *_, **__: budget)
    monkeypatch.setattr(of_lightgbm, "_SLICE_VALUES", 100)
    monkeypatch.setattr(of_lightgbm, "_SLICE_ROWS", 100)
    connector = DataConnector.from_parquet(tmp_path)
    booster, plain = train(connector, Columns((feature,), "y")), alone(frame, [feature])
    expected = plain.predict(frame[[feature]])
    assert len(np.unique(expected)) > 10
    np.testing.assert_allclose(booster.predict(frame[[feature]]), expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    np.testing.assert_array_equal(predict_booster(booster, connector, [feature]), booster.predict(frame[[feature]]))


def test_a_continued_training_predicts_and_adds_margins_in_float64(tmp_path: Path) -> None:
    frame = write(tmp_path)
    # With margins each segment begins with the scores of the checkpoint's model.
    booster = train(
        DataConnector.from_parquet(tmp_path), Columns(tuple(FEATURES), "y", base_margin=("m",)), (3, ROUNDS)
    )
    expected = alone(frame, FEATURES, "m").predict(frame[FEATURES])
    np.testing.assert_allclose(booster.predict(frame[FEATURES]), expected, rtol=1e-9)


def test_rows_in_memory_are_counted_in_the_types_of_the_files(tmp_path: Path) -> None:
    write(tmp_path)
    connector = DataConnector.from_parquet(tmp_path)
    part = Part(connector, connector.plan(1, 0)[0])
    # Four columns of 8 bytes, one of 4, and the label as float32.
    assert stored_row_bytes(part, Columns(tuple(FEATURES), "y")) == 40
    need = 2_000 * 40
    for budget, passes in ((need, 1), (need - 1, 2)):
        rows = boosting_rows.ShardRows(part, Columns(tuple(FEATURES), "y"), budget, keep_types=True)
        for _ in range(2):
            assert sum(len(batch.data) for batch in rows) == 2_000
        assert rows.passes == passes


def test_slices_are_of_about_equal_size() -> None:
    assert of_lightgbm.slice_rows(50_000, 28) == 16_667
    assert of_lightgbm.slice_rows(1_400, 1_000) == 700
    assert of_lightgbm.slice_rows(0, 3) == 1


def test_margins_per_class_train_and_predict_as_in_lightgbm(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    names = ("m0", "m1", "m2")
    frame = pd.DataFrame({"a": rng.normal(size=900), **{name: rng.normal(size=900) for name in names}})
    frame["y"] = np.digitize(frame["a"] + frame["m0"], [-0.5, 0.5])
    frame.to_parquet(tmp_path / "rows.parquet", row_group_size=300)
    connector = DataConnector.from_parquet(tmp_path)
    classes = {"objective": "multiclass", "num_class": 3}
    booster = train(connector, Columns(("a",), "y", base_margin=names), (3, ROUNDS), **classes)
    plain = alone(frame, ["a"], list(names), **classes)
    score = plain.predict(frame[["a"]], raw_score=True)
    np.testing.assert_allclose(booster.predict(frame[["a"]], raw_score=True), score, rtol=1e-9)
    likely = np.exp(score + frame[[*names]].to_numpy())
    np.testing.assert_allclose(
        predict_booster(booster, connector, ["a"], base_margin_cols=names),
        likely / likely.sum(axis=1, keepdims=True),
        rtol=1e-9,
    )
