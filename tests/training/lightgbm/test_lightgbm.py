"""LightGBM on two real nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.errors import DataError, InvalidArgumentError, TrainingError
from shoal.training.boosting import engine
from shoal.training.boosting.engine import train
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.demand import ScalingConfig
from tests.support.two_node_cluster import COLUMNS, ROWS, TwoNodes, write_rows
from tests.training.boosting.test_checkpoints import Losses
from tests.training.xgboost.test_xgboost import spec, without_statistics

pytestmark = pytest.mark.ray

PLAIN = {"num_leaves": 15, "learning_rate": 0.3}
SAMPLED = {**PLAIN, "bagging_fraction": 0.5, "bagging_freq": 1, "feature_fraction": 0.7}
DART = {**PLAIN, "boosting": "dart", "drop_rate": 0.5}
FOREST = {**PLAIN, "boosting": "rf", "bagging_fraction": 0.5, "bagging_freq": 1}


def request(rows: Path, **changes: Any) -> TrainRequest:
    values = {
        "framework": "lightgbm",
        "dataset": {"paths": (str(rows),)},
        "input_cols": tuple(COLUMNS),
        "label_col": "y",
        "n_estimators": 10,
        "params": PLAIN,
    }
    return TrainRequest(**{**values, **changes})


def rmse(booster: lightgbm.Booster, rows: Path) -> float:
    table = DataConnector.from_parquet(rows).to_pandas()
    return float(np.sqrt(np.mean((booster.predict(table[COLUMNS]) - table["y"]) ** 2)))


def alone(rows: Path, rounds: int, **params: Any) -> lightgbm.Booster:
    """What plain LightGBM makes of the rows."""
    table = DataConnector.from_parquet(rows).to_pandas()
    params = {**PLAIN, "verbosity": -1, "deterministic": True, "force_col_wise": True, "num_threads": 1, **params}
    data = lightgbm.Dataset(table[COLUMNS].to_numpy(), table["y"].to_numpy(), feature_name=COLUMNS)
    return lightgbm.train(params, data, rounds)


def trees(booster: lightgbm.Booster) -> str:
    text = booster.model_to_string()
    return text[text.index("Tree=0") : text.index("end of trees")]


def test_one_worker_grows_the_trees_of_plain_lightgbm(driver: TwoNodes, rows: Path) -> None:
    result = train(request(rows, scaling_config={"num_workers": 1}))
    assert trees(result.booster()) == trees(alone(rows, 10))


def test_two_learn_as_well_as_one_on_sorted_rows_too(driver: TwoNodes, rows: Path, tmp_path: Path) -> None:
    table = DataConnector.from_parquet(rows).to_arrow()
    (tmp_path / "sorted").mkdir()
    # So that each worker sees one half of the values of what matters most.
    pq.write_table(table.sort_by("a"), tmp_path / "sorted" / "rows.parquet", row_group_size=ROWS // 2)
    theirs = rmse(alone(rows, 30), rows)
    for path in (rows, tmp_path / "sorted"):
        assert rmse(train(request(path, n_estimators=30)).booster(), rows) == pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize(
    ("params", "margin"),
    [
        pytest.param(PLAIN, None, id="plain", marks=pytest.mark.long),
        pytest.param(PLAIN, "m", id="margin", marks=pytest.mark.long),
        pytest.param(SAMPLED, "m", id="sampled"),
        pytest.param(DART, None, id="dart", marks=pytest.mark.long),
        pytest.param(FOREST, None, id="forest", marks=pytest.mark.long),
    ],
)
def test_interrupted_and_resumed_it_is_the_same_model(
    driver: TwoNodes, rows: Path, params: dict, margin: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(
        rows,
        params=params,
        base_margin_col=margin,
        eval_set={"eval": spec(rows)},
        run_config={"checkpoint_every": 4, "max_restarts": 1},
    )
    whole = train(asked)
    assert (whole.rows, whole.num_workers, whole.rounds) == (ROWS, 2, 10)
    assert whole.booster().feature_name() == COLUMNS
    losses = Losses(monkeypatch, 1)
    resumed = train(asked)
    assert [segment.index for segment in losses.seen] == [0, 1, 1, 2]
    assert resumed.restarts == 1
    assert resumed.model == whole.model
    assert resumed.eval_results == whole.eval_results


@pytest.mark.parametrize("call", ["bin_sample", "finish"])
def test_a_loss_with_the_sample_or_after_the_last_round_changes_nothing(
    driver: TwoNodes, rows: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(rows, n_estimators=8, run_config={"checkpoint_every": 4, "max_restarts": 1})
    whole = train(asked)
    on_all, killed = engine.Training._on_all, []

    def lose(training: Any, gang: Any, name: str, *args: Any, **how: Any) -> Any:
        if name == call and not killed:
            killed.append(gang.workers[1].pid)
            os.kill(killed[0], signal.SIGKILL)
        return on_all(training, gang, name, *args, **how)

    monkeypatch.setattr(engine.Training, "_on_all", lose)
    resumed = train(asked)
    assert (resumed.restarts, resumed.rounds) == (1, 8)
    assert resumed.model == whole.model


def test_early_stopping_is_agreed_and_remembered(
    driver: TwoNodes, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(
        rows,
        eval_set={"train": spec(rows), "eval": spec(write_rows(tmp_path / "noise", rows=300, seed=2))},
        n_estimators=200,
        early_stopping_rounds=4,
        params={"learning_rate": 0.9, "metric": ["l1", "rmse"]},
        run_config={"checkpoint_every": 7, "max_restarts": 1},
    )
    result = train(asked)
    values = result.eval_results["eval"]["rmse"]
    best = int(np.argmin(values))
    assert (result.best_iteration, result.rounds, len(values)) == (best, best + 5, best + 5)
    assert result.best_score == min(values)
    # What it predicts, all rows of the eval set and no others counted, is what the workers saw in the best round.
    assert rmse(result.booster(), tmp_path / "noise") == pytest.approx(min(values), rel=1e-6)
    Losses(monkeypatch, (best + 2) // 7)
    resumed = train(asked)
    assert resumed.restarts == 1
    assert (resumed.model, resumed.best_iteration) == (result.model, best)
    assert TrainResult.model_validate_json(resumed.model_dump_json()) == resumed


def test_metrics_are_printed_once_and_callbacks_may_stop(
    driver: TwoNodes, rows: Path, capsys: pytest.CaptureFixture
) -> None:
    asked = request(rows, eval_set={"eval": spec(rows)}, verbose_eval=4, run_config={"checkpoint_every": 4})
    train(asked)
    printed = [line for line in capsys.readouterr().out.splitlines() if "eval-l2:" in line]
    assert [line.split("\t")[0] for line in printed] == ["[0]", "[4]", "[8]", "[9]"]

    def stop(env: Any) -> None:
        if env.iteration == 5:
            raise lightgbm.callback.EarlyStopException(3, env.evaluation_result_list)

    slow_down = lightgbm.reset_parameter(learning_rate=lambda round: 0.3 * 0.9**round)
    result = train(asked, user_code=UserCode(callbacks=(stop, slow_down)))
    assert (result.rounds, result.best_iteration) == (6, 3)
    assert result.best_score == result.eval_results["eval"]["l2"][5]


def test_weights_margins_and_several_classes(driver: TwoNodes, rows: Path) -> None:
    assert train(request(rows, weight_col="w")).model != train(request(rows)).model
    table = DataConnector.from_parquet(rows).to_pandas()
    # The margin, 5 everywhere, is what boosting starts from.
    margined = train(request(rows, base_margin_col="m", n_estimators=30)).booster()
    assert np.mean(np.abs(margined.predict(table[COLUMNS]) + table["m"] - table["y"])) < 0.5
    classes = request(
        rows, label_col="k", params={**PLAIN, "objective": "multiclass", "num_class": 3},
        run_config={"checkpoint_every": 4},
    )  # fmt: skip
    predicted = train(classes).booster().predict(table[COLUMNS])
    assert np.mean(np.argmax(predicted, axis=1) == table["k"]) > 0.9


def test_ranking(driver: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers rank as well as one process, which needs every query's rows on one of them, and side by side."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4000, 3)).astype(np.float32)
    ids = np.sort(rng.integers(0, 300, 4000))
    relevance = np.clip(np.round(x[:, 0] + rng.normal(scale=0.3, size=4000) + 1), 0, 4).astype(np.float32)
    weight = rng.uniform(0.5, 2, size=4000).astype(np.float32)
    table = pa.table({**dict(zip(COLUMNS, x.T, strict=True)), "y": relevance, "w": weight, "q": ids})
    pq.write_table(table, tmp_path / "queries.parquet", row_group_size=700)
    params = {**PLAIN, "objective": "lambdarank", "metric": "ndcg", "eval_at": 5}
    asked = request(
        tmp_path,
        dataset=spec(tmp_path),
        params=params,
        group_col="q",
        weight_col="w",
        eval_set={"train": spec(tmp_path)},
        run_config={"checkpoint_every": 4, "max_restarts": 1},
    )
    result = train(asked)

    alone: dict[str, Any] = {}
    data = lightgbm.Dataset(x, relevance, weight=weight, group=np.unique(ids, return_counts=True)[1])
    theirs = lightgbm.train(
        {**params, "verbosity": -1, "deterministic": True, "force_col_wise": True, "num_threads": 1}, data, 10,
        valid_sets=[data], callbacks=[lightgbm.record_evaluation(alone)],
    )  # fmt: skip
    assert result.eval_results["train"]["ndcg@5"][-1] == pytest.approx(alone["training"]["ndcg@5"][-1], abs=0.02)
    assert sum(worker.rows for worker in result.workers) == 4000
    assert trees(train(asked.model_copy(update={"scaling_config": ScalingConfig(num_workers=1)})).booster()) == trees(
        theirs
    )
    Losses(monkeypatch, 1)
    resumed = train(asked)
    assert (resumed.restarts, resumed.model) == (1, result.model)
    assert resumed.eval_results == result.eval_results
    with pytest.raises(InvalidArgumentError, match="set group_col to the column"):
        train(asked.model_copy(update={"group_col": None}))


def test_nulls_found_while_reading(driver: TwoNodes, tmp_path: Path) -> None:
    bad = without_statistics(tmp_path, "w", [1.0, None])
    with pytest.raises(DataError, match=r'rows.parquet, row group 0.*"w".*row 1.*\[rank \d'):
        train(request(bad, weight_col="w"))


def test_what_is_refused_before_anything_starts(driver: TwoNodes, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "shared_gang", None)
    with pytest.raises(InvalidArgumentError, match="did you mean num_leaves"):
        train(request(rows, params={"num_leavs": 3}))
    with pytest.raises(TrainingError, match="LightGBM refuses the parameters"):
        train(request(rows, params={"objective": "regresion"}))
    with pytest.raises(InvalidArgumentError, match="dart"):
        train(request(rows, params=DART, eval_set={"eval": spec(rows)}, early_stopping_rounds=2))
    with pytest.raises(InvalidArgumentError, match="needs an eval set that is not the training set"):
        train(request(rows, eval_set={"train": spec(rows)}, early_stopping_rounds=2))
    monkeypatch.setattr("shoal.training.boosting.rows.MAX_EVAL_ROWS", ROWS - 1)
    with pytest.raises(DataError, match=r'eval_set "eval" has 6,000 rows.*random_split'):
        train(request(rows, eval_set={"eval": spec(rows)}))


def test_what_lightgbm_says_itself(driver: TwoNodes, rows: Path) -> None:
    with pytest.raises(TrainingError, match=r"LightGBM: Label must be in \[0, 2\).*rank \d"):
        train(request(rows, label_col="k", params={"objective": "multiclass", "num_class": 2}))
