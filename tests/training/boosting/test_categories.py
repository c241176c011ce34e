"""Columns of categories, with either library: one encoding over all workers, which the model takes along."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector, numpy_columns
from shoal.data.numpy_columns import encoded, to_lists, to_matrix
from shoal.errors import DataError, InvalidArgumentError
from shoal.training.boosting import engine
from shoal.training.boosting.engine import train
from shoal.training.boosting.messages import Columns, Part, Segment, Task
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.reporting import gang_context
from shoal.training.xgboost import worker
from shoal.training.xgboost.library import note
from tests.support.boosting_trainings import Losses, trees
from tests.support.predictions import predict_booster
from tests.support.two_node_cluster import TwoNodes

FEATURES = ("carrier", "hour", "flight", "late")
CATEGORICAL = ("late", "carrier", "flight")
PARAMS: dict[str, dict[str, Any]] = {
    "xgboost": {"max_depth": 4, "eta": 0.5},
    "lightgbm": {"num_leaves": 15, "learning_rate": 0.5, "min_data_in_leaf": 5, "min_data_per_group": 10},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "xgboost": {"subsample": 0.7},
    "lightgbm": {"bagging_fraction": 0.7, "bagging_freq": 1},
}

each_library = pytest.mark.parametrize("framework", PARAMS)


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of one row group each, one for each of two workers; no category is in both."""
    folder = tmp_path_factory.mktemp("flights")
    for part in (0, 1):
        pq.write_table(some_flights(part), folder / f"part-{part}.parquet")
    return folder


def some_flights(part: int, rows: int = 1500) -> pa.Table:
    rng = np.random.default_rng(part)
    carrier, flight = rng.integers(0, 6, rows), rng.integers(0, 4, rows)
    hour, late = rng.integers(0, 24, rows).astype(np.float32), rng.random(rows) < 0.3
    effect = np.random.default_rng(9).normal(scale=3, size=(2, 6))[part]
    return pa.table({
        # In an order that says nothing of their effect, and not in ASCII alone.
        "carrier": pa.array([None if i % 50 == 0 else f"{'ézaQ5b'[c]}{part}" for i, c in enumerate(carrier)]),
        "flight": 10**6 - 7 * (flight + 10 * part),
        "hour": hour,
        "late": pa.array([bool(value) if part == 0 else None for value in late], pa.bool_()),
        "y": (effect[carrier] + (flight % 2) * 2 + late * (part == 0) + hour / 24).astype(np.float32),
    })  # fmt: skip


def request(framework: str, path: Path, **changes: Any) -> TrainRequest:
    values = {
        "framework": framework,
        "dataset": {"paths": (str(path),)},
        "input_cols": FEATURES,
        "label_col": "y",
        "categorical_cols": CATEGORICAL,
        "n_estimators": 12,
        "params": PARAMS[framework],
    }
    return TrainRequest(**{**values, **changes})


def library(framework: str, module: str) -> Any:
    return importlib.import_module(f"shoal.training.{framework}.{module}")


def predicted(framework: str, booster: Any, table: pa.Table, folder: Path) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "rows.parquet")
    connector = DataConnector.from_parquet(folder / "rows.parquet")
    return predict_booster(booster, connector, FEATURES)


def changed(table: pa.Table, **columns: Any) -> pa.Table:
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, [values])
    return table


@pytest.mark.ray
@each_library
def test_two_workers_know_the_categories_of_both(
    driver: TwoNodes, flights: Path, framework: str, tmp_path: Path
) -> None:
    held_out = changed(some_flights(0, 200), carrier=pa.array(["é0", "unseen"] * 100).dictionary_encode())
    pq.write_table(held_out, tmp_path / "held-out.parquet")
    asked = request(framework, flights, eval_set={"eval": {"paths": (str(tmp_path / "held-out.parquet"),)}})
    result = train(asked)
    assert [worker.rows for worker in result.workers] == [1500, 1500]
    assert result.model == train(asked).model

    booster = result.booster()
    assert to_lists(library(framework, "library").categories_of(booster)) == {
        "carrier": sorted(f"{letter}{part}" for letter in "ézaQ5b" for part in (0, 1)),
        "flight": sorted(10**6 - 7 * (flight + 10 * part) for flight in range(4) for part in (0, 1)),
        "late": [False, True],
    }
    for part in (0, 1):
        table = some_flights(part, 300)
        said = predicted(framework, booster, table, tmp_path / "a")
        known = table["carrier"].is_valid().to_numpy()
        assert np.sqrt(np.mean((said - table["y"].to_numpy())[known] ** 2)) < 0.5, part
        nothing = predicted(framework, booster, changed(table, carrier=pa.nulls(300)), tmp_path / "a")
        unseen = predicted(framework, booster, changed(table, carrier=pa.array(["Q"] * 300)), tmp_path / "a")
        np.testing.assert_array_equal(unseen, nothing)
        assert not np.allclose(said, nothing)
    # What the workers evaluated is what the model predicts.
    squared = (predicted(framework, booster, held_out, tmp_path / "a") - held_out["y"].to_numpy()) ** 2
    (metric,) = result.eval_results["eval"].values()
    assert metric[-1] == pytest.approx(np.mean(squared) ** (0.5 if framework == "xgboost" else 1), rel=1e-4)


def plain_xgboost(features: np.ndarray, label: np.ndarray) -> Any:
    import xgboost

    types = ["c", "float", "c", "c"]
    rows = xgboost.QuantileDMatrix(
        features, label, feature_names=FEATURES, feature_types=types, enable_categorical=True, nthread=1
    )
    return xgboost.train({**PARAMS["xgboost"], "nthread": 1}, rows, 12)


def plain_lightgbm(features: np.ndarray, label: np.ndarray) -> Any:
    import lightgbm

    rows = lightgbm.Dataset(features, label, feature_name=list(FEATURES), categorical_feature=list(CATEGORICAL))
    settings = {"verbosity": -1, "deterministic": True, "force_col_wise": True, "num_threads": 1}
    return lightgbm.train({**PARAMS["lightgbm"], **settings}, rows, 12)


@pytest.mark.ray
@pytest.mark.parametrize(("framework", "plain"), [("xgboost", plain_xgboost), ("lightgbm", plain_lightgbm)], ids=PARAMS)
def test_one_worker_grows_the_trees_of_the_plain_library(
    driver: TwoNodes, flights: Path, framework: str, plain: Callable[..., Any]
) -> None:
    booster = train(request(framework, flights, scaling_config={"num_workers": 1})).booster()
    table = DataConnector.from_parquet(flights).to_arrow()
    known = library(framework, "library").categories_of(booster)
    alone = plain(to_matrix(encoded(table, known), FEATURES), table["y"].to_numpy())
    assert trees(booster) == trees(alone)


@pytest.mark.ray
@each_library
def test_interrupted_and_resumed_it_is_the_same_model(
    driver: TwoNodes, flights: Path, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(
        framework,
        flights,
        params={**PARAMS[framework], **SAMPLING[framework]},
        run_config={"checkpoint_every": 4, "max_restarts": 1},
    )
    whole = train(asked)
    losses = Losses(monkeypatch, 1)
    resumed = train(asked)
    assert [segment.index for segment in losses.seen] == [0, 1, 1, 2]
    assert (resumed.restarts, resumed.model) == (1, whole.model)


@pytest.mark.ray
@each_library
def test_what_is_refused_before_anything_starts(
    driver: TwoNodes, flights: Path, framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "shared_gang", None)
    with pytest.raises(InvalidArgumentError, match='categorical_cols names "tail"'):
        train(request(framework, flights, categorical_cols=("carrier", "tail")))
    with pytest.raises(DataError, match='"hour" is of type float, which cannot be categorical'):
        train(request(framework, flights, categorical_cols=("carrier", "hour")))
    with pytest.raises(DataError, match=r'"carrier" is of type string, which cannot be .* to categorical_cols'):
        train(request(framework, flights, categorical_cols=("flight",)))
    pq.write_table(changed(some_flights(0), carrier=pa.array([3] * 1500)), tmp_path / "numbers.parquet")
    numbers = {"paths": (str(tmp_path / "numbers.parquet"),)}
    with pytest.raises(DataError, match=r'eval_set "eval": .*"carrier" is of type int64, but its .*string'):
        train(request(framework, flights, eval_set={"eval": numbers}))
    monkeypatch.setattr(numpy_columns, "MOST_CATEGORIES", 11)
    with pytest.raises(DataError, match='"carrier" has more than 11 categories'):
        train(request(framework, flights))


def session(path: Path, **changes: Any) -> worker.Session:
    connector = DataConnector.from_parquet(path)
    part = Part(connector, connector.plan(1, 0)[0])
    known = numpy_columns.find_categories(connector.source, ["carrier", "flight", "late"])
    columns = Columns(FEATURES, "y", categories=known)
    return worker.Session(Task(part, {}, columns, {"nthread": 1, "max_depth": 4}, **changes), gang_context())


def test_from_disk_as_from_memory(flights: Path, tmp_path: Path) -> None:
    on_disk = session(flights, external_memory=True)
    assert on_disk.matrix.feature_types == ["c", "float", "c", "c"]
    models = []
    for of in (session(flights), on_disk):
        checkpoint = of.boost(Segment(0, 5, True, None)).checkpoint
        assert checkpoint is not None
        models.append(booster_of(checkpoint.model))
    on_disk.close()
    table = some_flights(1, 200)
    one, other = (predicted("xgboost", booster, table, tmp_path / "a") for booster in models)
    np.testing.assert_allclose(one, other, rtol=1e-5)


def booster_of(model: bytes, framework: str = "xgboost") -> Any:
    return TrainResult(
        framework=framework,
        model=model,
        eval_results={},
        rounds=5,
        rows=1,
        num_workers=1,
        threads_per_worker=1,
        seconds=0,
        workers=(),
    ).booster()


def frame(table: pa.Table, **lists: list[Any]) -> Any:
    """As pandas holds categories: these, in this order."""
    rows = table.to_pandas()[list(FEATURES)]
    return rows.assign(**{name: rows[name].astype("category").cat.set_categories(lists[name]) for name in lists})


def test_plain_xgboost_predicts_frames_with_the_categories_noted_in_the_model(flights: Path, tmp_path: Path) -> None:
    table = DataConnector.from_parquet(flights).to_arrow()
    known = numpy_columns.find_categories(DataConnector.from_parquet(flights).source, ["carrier", "flight", "late"])
    booster = plain_xgboost(to_matrix(encoded(table, known), FEATURES), table["y"].to_numpy())
    note(booster, known)
    booster = booster_of(bytes(booster[:3].save_raw("ubj")))
    lists = json.loads(booster.attr("shoal.categories"))
    assert list(lists) == ["carrier", "flight", "late"]
    rows = frame(table, carrier=lists["carrier"], flight=lists["flight"])
    rows["late"] = rows["late"].astype(float)  # it takes no categories that are booleans; 0 and 1 are their codes
    np.testing.assert_array_equal(booster.inplace_predict(rows), predicted("xgboost", booster, table, tmp_path / "a"))


def test_plain_lightgbm_encodes_frames_by_itself(flights: Path, tmp_path: Path) -> None:
    import lightgbm

    table = DataConnector.from_parquet(flights).to_arrow()
    lists = {"carrier": ["z0", "é1", "a0"], "flight": [10**6, 10**6 - 7], "late": [True, False]}
    rows = frame(table, **lists)
    trained = lightgbm.train({"verbosity": -1, "num_threads": 1}, lightgbm.Dataset(rows, table["y"].to_numpy()), 5)
    # A model that pandas encoded is understood, too.
    booster = booster_of(trained.model_to_string().encode(), "lightgbm")
    assert to_lists(library("lightgbm", "library").categories_of(booster)) == lists
    other = frame(table, carrier=["a0", "Q0", "z0", "é1"], flight=[10**6 - 7, 10**6], late=[False, True])
    np.testing.assert_array_equal(booster.predict(other), predicted("lightgbm", booster, table, tmp_path / "a"))
