"""One rank by itself, without a gang."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xgboost

from shoal.data import DataConnector
from shoal.data.numpy_columns import find_categories
from shoal.data.planning import GangPosition
from shoal.errors import DataError, InvalidArgumentError, TrainingError
from shoal.training.boosting import rows as rows_module
from shoal.training.boosting import worker_fit
from shoal.training.boosting.messages import Checkpoint, Columns, Part, Segment, Task
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.rows import ShardRows, in_whole_groups
from shoal.training.reporting import GangContext, gang_context
from shoal.training.xgboost import worker
from tests.support.two_node_cluster import COLUMNS
from tests.training.custom import mean_error, softmax, squared_error


def session(rows: Path, **changes: Any) -> worker.Session:
    connector = DataConnector.from_parquet(rows)
    part = Part(connector, connector.plan(1, 0)[0])
    held_out = Part(connector, connector.plan(2, 0)[0])
    values = {
        "params": {"nthread": 1, "max_depth": 3},
        "eval_sets": {"train": part, "eval": held_out},
        "columns": Columns(tuple(COLUMNS), "y"),
        **changes,
    }
    return worker.Session(Task(train=part, **values), gang_context())


def model(of: worker.Session) -> bytes:
    checkpoint = of.boost(Segment(0, 5, True, None)).checkpoint
    assert checkpoint is not None
    return checkpoint.model


def predictions(raw: bytes, rows: Path) -> np.ndarray:
    values = DataConnector.from_parquet(rows).to_pandas()[COLUMNS].to_numpy()
    return xgboost.Booster(model_file=bytearray(raw)).inplace_predict(values)


def test_the_model_is_the_same_from_memory_and_from_disk(rows: Path, own_temp: Path) -> None:
    in_memory, on_disk = session(rows), session(rows, external_memory=True)
    assert in_memory.pages is None
    assert list(own_temp.glob("shoal-pages-*/*"))
    np.testing.assert_allclose(predictions(model(on_disk), rows), predictions(model(in_memory), rows), rtol=1e-5)
    assert (in_memory.prepared.passes, on_disk.prepared.passes) == (1, 3)
    on_disk.close()
    assert list(own_temp.iterdir()) == []


def test_the_model_is_the_same_from_tables_and_from_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for number, half in enumerate((pa.float64(), pa.float32())):
        x = rng.normal(size=(6_000, 2))
        table = pa.table({
            "a": pa.array(rng.integers(-5, 5, 6_000), pa.int64(), mask=rng.random(6_000) < 0.1),
            "b": pa.array(x[:, 0], mask=rng.random(6_000) < 0.1),
            "c": pa.array(x[:, 1].astype(half.to_pandas_dtype()), half),
            "kind": pa.array(rng.choice(["x", "y", None], 6_000)),
            "y": x[:, 0] + x[:, 1],
        })  # fmt: skip
        pq.write_table(table, tmp_path / f"{number}.parquet")
    connector = DataConnector.from_parquet(tmp_path)
    part = Part(connector, connector.plan(1, 0)[0])
    plain = Columns(("a", "b", "c"), "y")
    coded = Columns(("a", "b", "c", "kind"), "y", categories=find_categories(connector.source, ["kind"]))
    read = [type(batch.data) for batch in ShardRows(part, plain, 0, accepts_tables=True)]
    assert read == [pa.Table, pa.Table]
    monkeypatch.setattr(worker_fit, "_cache_budget", lambda *_, **__: 0)
    for columns in (plain, coded):
        task = Task(part, {"eval": part}, columns, {"nthread": 1, "max_depth": 3})
        from_tables = model(worker.Session(task, gang_context()))
        with monkeypatch.context() as patch:
            patch.setattr(rows_module, "_needs_no_copy", lambda table: False)
            assert from_tables == model(worker.Session(task, gang_context()))


@pytest.fixture
def queries(tmp_path: Path) -> Path:
    """600 rows of 60 queries, which do not end where row groups do."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3)).astype(np.float32)
    folder = tmp_path / "queries"
    folder.mkdir()
    ids = np.repeat(rng.permutation(60), rng.multinomial(600 - 60, np.ones(60) / 60) + 1)
    table = pa.table({
        **dict(zip(COLUMNS, x.T, strict=True)),
        "y": np.clip(np.round(x[:, 0] + 1), 0, 4).astype(np.float32),
        "w": (1 + ids % 3).astype(np.float32),
        "q": [f"query {one}" for one in ids],
    })  # fmt: skip
    pq.write_table(table, folder / "rows.parquet", row_group_size=70)
    return folder


RANK = {"nthread": 1, "max_depth": 3, "objective": "rank:ndcg"}


def test_groups_and_their_weights_arrive(queries: Path) -> None:
    columns = Columns(tuple(COLUMNS), "y", weight="w", group="q")
    of = session(queries, columns=columns, params=RANK, eval_sets={})
    table = DataConnector.from_parquet(queries).to_pandas()
    codes = (table["q"] != table["q"].shift()).cumsum()
    assert np.array_equal(np.diff(of.matrix.get_uint_info("group_ptr")), codes.value_counts().sort_index())
    assert np.array_equal(of.matrix.get_weight(), table.groupby(codes)["w"].first())
    ranked = predictions(model(of), queries)
    assert np.corrcoef(ranked, table["a"])[0, 1] > 0.8  # what the labels were made of


def test_no_batch_ends_within_a_group(queries: Path) -> None:
    connector = DataConnector.from_parquet(queries)
    rows = ShardRows(Part(connector, connector.plan(1, 0)[0]), Columns(tuple(COLUMNS), "y", group="q"), 2**20)
    for _ in range(2):
        groups = [batch.group for batch in in_whole_groups(rows)]
        assert len(groups) > 1
        assert all(before[-1] < after[0] for before, after in pairwise(groups))
        assert np.array_equal(np.unique(np.concatenate(groups)), np.arange(60))
    assert rows.passes == 1


def test_a_weight_is_a_groups(queries: Path) -> None:
    columns = Columns(tuple(COLUMNS), "y", weight="b", group="q")
    with pytest.raises(DataError, match='different values in the weight column "b"'):
        session(queries, columns=columns, params=RANK, eval_sets={})


@pytest.mark.parametrize(
    ("params", "objective", "columns"),
    [
        pytest.param({"max_depth": 3}, squared_error, {"label": "y"}, id="one"),
        pytest.param({"max_depth": 3}, squared_error, {"label": "y", "weight": "w"}, id="weights"),
        pytest.param({"max_depth": 3, "num_class": 3}, softmax, {"label": "k"}, id="classes"),
        pytest.param({"max_depth": 3, "subsample": 0.5}, squared_error, {"label": "y"}, id="sampled"),
    ],
)
def test_a_function_as_objective_interrupted_or_not(
    rows: Path, params: dict[str, Any], objective: Any, columns: dict[str, str]
) -> None:
    params = {**params, "nthread": 1}
    user_code = UserCode(objective=objective, metrics=(mean_error,) if columns["label"] == "y" else ())
    changes = {"params": params, "user_code": user_code, "columns": Columns(tuple(COLUMNS), **columns)}
    models = []
    for lost in (False, True):
        of = session(rows, **changes)
        first = of.boost(Segment(0, 4, False, Checkpoint())).checkpoint
        of = session(rows, **changes) if lost else of
        models.append(of.boost(Segment(1, 8, True, first if lost else None)).checkpoint)
    assert models[0] == models[1]
    assert models[0] is not None
    if "subsample" in params:
        return
    table = DataConnector.from_parquet(rows).to_pandas()
    weight = table[columns["weight"]] if "weight" in columns else None
    matrix = xgboost.QuantileDMatrix(table[COLUMNS], table[columns["label"]], weight=weight, nthread=1)
    told: dict[str, Any] = {}
    alone = xgboost.train(
        params, matrix, 8, obj=objective, evals=[(matrix, "train")], evals_result=told, verbose_eval=False,
        custom_metric=user_code.metrics[0] if user_code.metrics else None,
    )  # fmt: skip
    ours = xgboost.Booster(model_file=bytearray(models[0].model))
    assert ours.get_dump(with_stats=True) == alone.get_dump(with_stats=True)
    assert models[0].history["train"] == told["train"]


def test_a_metric_with_the_name_of_another(rows: Path) -> None:
    of = session(rows, user_code=UserCode(metrics=(lambda *_: ("rmse", 1.0),)))
    with pytest.raises(InvalidArgumentError, match='two metrics have the name "rmse"'):
        model(of)


@pytest.mark.parametrize(("tracker", "tied"), [("127.0.0.1", [True]), ("10.0.0.1", [])])
def test_listeners_are_tied_to_loopback_only_where_the_tracker_is_there(
    monkeypatch: pytest.MonkeyPatch, tracker: str, tied: list[bool]
) -> None:
    ties: list[bool] = []
    monkeypatch.setattr(xgboost.collective, "CommunicatorContext", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(worker, "tie_to_loopback", lambda: ties.append(True))
    with worker._communicator({"dmlc_tracker_uri": tracker}, GangContext(GangPosition(rank=0, world_size=2))):
        assert ties == tied


def test_a_rank_that_xgboost_gives_otherwise_fails_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgboost.collective, "CommunicatorContext", lambda **_: contextlib.nullcontext())
    with (
        pytest.raises(TrainingError, match="assigned rank 0 to the worker with rank 1"),
        worker._communicator({"dmlc_tracker_uri": "10.0.0.1"}, GangContext(GangPosition(rank=1, world_size=2))),
    ):
        pytest.fail("the training went on")
