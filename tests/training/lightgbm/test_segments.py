"""Boosting in segments in one process, without a gang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.errors import InvalidArgumentError
from shoal.training.boosting.messages import Checkpoint, Columns, Part, Segment, Task
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.request import TrainRequest
from shoal.training.boosting.rows import ShardRows
from shoal.training.gang.placement import GangShape
from shoal.training.lightgbm.dataset import Binned, find_bins, sample
from shoal.training.lightgbm.library import LightGBM, shares
from shoal.training.lightgbm.params import worker_params
from shoal.training.lightgbm.segments import Trainer
from shoal.training.reporting import gang_context
from tests.support.two_node_cluster import COLUMNS, write_rows
from tests.training.custom import softmax, squared_error, worst_error

FOREST = {"boosting": "rf", "bagging_fraction": 0.6, "bagging_freq": 1, "metric": "l2"}
ROUNDS = 10
FIXED = {
    "deterministic": True, "force_col_wise": True, "num_threads": 1, "seed": 3, "feature_pre_filter": False,
    "verbosity": -1,
}  # fmt: skip


@pytest.fixture
def queries(tmp_path: Path) -> Path:
    """3,000 rows of 300 queries, which do not end where row groups do."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3_000, 3)).astype(np.float32)
    sizes = rng.multinomial(3_000 - 300, np.ones(300) / 300) + 1
    table = pa.table({
        **dict(zip(COLUMNS, x.T, strict=True)),
        "y": np.clip(np.round(x[:, 0] + rng.normal(scale=0.3, size=3_000) + 1), 0, 4).astype(np.float32),
        "w": rng.uniform(0.5, 2, size=3_000).astype(np.float32),
        "q": np.repeat(rng.permutation(300), sizes),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "queries.parquet", row_group_size=700)
    return tmp_path


def trainer(rows: Path, params: dict[str, Any], user_code: UserCode, **columns: Any) -> Trainer:
    connector = DataConnector.from_parquet(rows)
    asked = TrainRequest(framework="lightgbm", dataset=connector.to_spec(), input_cols=tuple(COLUMNS), label_col="y")
    merged = LightGBM().merge_params(params, user_code.objective, ROUNDS)
    given = worker_params(merged, asked, GangShape(1, 1), custom_objective=user_code.objective is not None)
    meant = Columns(tuple(COLUMNS), columns.pop("label", "y"), **columns)
    part = Part(connector, connector.plan(1, 0, meant.group)[0])
    others = replace(part, connector=DataConnector.from_parquet(rows))  # the training set stops no training
    shard, evaluated = (
        ShardRows(each, meant, budget, keep_types=True) for each, budget in ((part, 0), (others, 2**30))
    )
    (share,) = shares([part.shard.rows])
    reference = find_bins(sample(shard, share, given, 0), COLUMNS, given, threads=1).reference({})
    task = Task(part, {"eval": others}, meant, given, seed=3, user_code=user_code)
    return Trainer(task, gang_context(), Binned(shard, reference), {"eval": Binned(evaluated, reference)})


def boosted(rows: Path, params: dict[str, Any], user_code: UserCode, *, lost: bool, **columns: Any) -> Checkpoint:
    """A model of three segments; the second one begins in another process, if the first was lost."""
    training = trainer(rows, params, user_code, **columns)
    state = None
    for index, stop in enumerate((4, 8, ROUNDS)):
        resume = state if lost and index == 1 else Checkpoint() if index == 0 else None
        if resume is state is not None:
            training = trainer(rows, params, user_code, **columns)
        state = training.boost(Segment(index, stop, stop == ROUNDS, resume)).checkpoint
    assert state is not None
    return state


def trees(model: str) -> str:
    return model[model.index("Tree=0") : model.index("end of trees")]


def alone(rows: Path, params: dict[str, Any], objective: Any, label: str = "y", **columns: str) -> str:
    """The trees of plain LightGBM."""
    table = DataConnector.from_parquet(rows).to_pandas()
    weight, group = (table[columns[what]] if what in columns else None for what in ("weight", "group"))
    sizes = None if group is None else np.bincount((group != group.shift()).cumsum())[1:]
    fixed = {"deterministic": True, "force_col_wise": True, "num_threads": 1, "seed": 3, "feature_pre_filter": False}
    params = {**params, **fixed, "verbosity": -1, **({} if objective is None else {"objective": objective})}
    data = lightgbm.Dataset(table[COLUMNS].to_numpy(), table[label].to_numpy(), weight=weight, group=sizes)
    return trees(lightgbm.train(params, data, ROUNDS).model_to_string())


@pytest.mark.parametrize(
    ("params", "objective", "columns"),
    [
        pytest.param({"metric": "l2"}, squared_error, {}, id="function"),
        pytest.param({"metric": "l2"}, squared_error, {"weight": "w"}, id="function-weights"),
        pytest.param({"num_class": 3}, softmax, {"label": "k"}, id="function-classes"),
        pytest.param({"objective": "lambdarank"}, None, {"group": "q"}, id="lambdarank"),
        pytest.param({"objective": "lambdarank"}, None, {"group": "q", "weight": "w"}, id="lambdarank-weights"),
    ],
)
def test_the_trees_of_plain_lightgbm_interrupted_or_not(
    rows: Path, queries: Path, params: dict[str, Any], objective: Any, columns: dict[str, str]
) -> None:
    path = queries if "group" in columns else rows
    user_code = UserCode(objective=objective)
    whole, resumed = (boosted(path, params, user_code, lost=lost, **columns) for lost in (False, True))
    assert resumed == whole
    assert trees(whole.model.decode()) == alone(path, params, objective, **columns)


@pytest.mark.parametrize(
    ("params", "columns"),
    [
        pytest.param({"objective": "rank_xendcg", "metric": "ndcg"}, {"group": "q"}, id="rank_xendcg"),
        pytest.param(FOREST, {}, id="forest"),
    ],
)
def test_what_draws_lots_is_the_same_interrupted_or_not(
    rows: Path, queries: Path, params: dict[str, Any], columns: dict[str, str]
) -> None:
    path = queries if columns else rows
    whole, resumed = (boosted(path, params, UserCode(), lost=lost, **columns) for lost in (False, True))
    assert resumed == whole
    # In its first segment it is what it would be anywhere.
    assert trees(whole.model.decode()).split("Tree=4")[0] == alone(path, params, None, **columns).split("Tree=4")[0]


def test_a_forest_is_the_mean_of_all_its_trees(rows: Path) -> None:
    whole = boosted(rows, FOREST, UserCode(), lost=False)
    table = DataConnector.from_parquet(rows).to_pandas()
    predicted = lightgbm.Booster(model_str=whole.model.decode()).predict(table[COLUMNS])
    assert whole.history["eval"]["l2"][-1] == pytest.approx(np.mean((predicted - table["y"]) ** 2), rel=1e-6)
    assert whole.history["eval"]["l2"][-1] < 0.5 * table["y"].var()


def test_metrics_of_ones_own_come_after_lightgbms(rows: Path) -> None:
    user_code = UserCode(metrics=(worst_error, lambda *_: ("constant", 1.0, False)))
    whole = boosted(rows, {"metric": "l1"}, user_code, lost=True)
    assert list(whole.history["eval"]) == ["l1", "worst", "hits", "constant"]
    assert {len(values) for values in whole.history["eval"].values()} == {ROUNDS}
    with pytest.raises(InvalidArgumentError, match='two metrics have the name "l1"'):
        boosted(rows, {"metric": "l1"}, UserCode(metrics=(lambda *_: ("l1", 1.0, False),)), lost=False)


@pytest.mark.parametrize("names", [("eval", "train"), ("train", "eval")])
def test_early_stopping_skips_the_training_set_as_lightgbm_does(rows: Path, tmp_path: Path, names: tuple) -> None:
    write_rows(tmp_path / "other", rows=300, seed=2)
    connectors = {"train": DataConnector.from_parquet(rows), "eval": DataConnector.from_parquet(tmp_path / "other")}
    frames = {name: connector.to_pandas() for name, connector in connectors.items()}
    given = {**FIXED, "learning_rate": 0.9, "metric": "l2"}
    data = lightgbm.Dataset(frames["train"][COLUMNS], frames["train"]["y"], params={"verbosity": -1})
    other = lightgbm.Dataset(frames["eval"][COLUMNS], frames["eval"]["y"], reference=data)
    sets = [{"train": data, "eval": other}[name] for name in names]
    plain = lightgbm.train(
        given, data, 200, valid_sets=sets, valid_names=list(names),
        callbacks=[lightgbm.early_stopping(3, verbose=False)],
    )  # fmt: skip

    meant = Columns(tuple(COLUMNS), "y")
    parts = {name: Part(connector, connector.plan(1, 0)[0]) for name, connector in connectors.items()}
    shards = {name: ShardRows(part, meant, 0, keep_types=True) for name, part in parts.items()}
    (share,) = shares([parts["train"].shard.rows])
    reference = find_bins(sample(shards["train"], share, given, 0), COLUMNS, given, threads=1).reference({})
    binned = {name: Binned(shards[name], reference) for name in names}
    task = Task(
        parts["train"], {name: parts[name] for name in names}, meant, given, seed=3, early_stopping_rounds=3
    )  # fmt: skip
    training = Trainer(task, gang_context(), Binned(shards["train"], reference), binned)
    result = training.boost(Segment(0, 200, True, Checkpoint()))
    assert result.stopped
    assert result.best_iteration == plain.best_iteration - 1
