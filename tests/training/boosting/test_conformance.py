"""What a training on two real nodes does, with either library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.errors import CapacityError, DataError, InvalidArgumentError, TrainingError
from shoal.training.boosting import engine
from shoal.training.boosting.engine import train
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.demand import ScalingConfig
from tests.support.boosting_trainings import (
    DART,
    LIBRARIES,
    PLAIN,
    SAMPLED,
    Losses,
    alone,
    frame,
    predicted,
    request,
    resumable,
    rmse,
    spec,
    trees,
    without_statistics,
)
from tests.support.two_node_cluster import COLUMNS, ROWS, TwoNodes, assert_ended, write_rows
from tests.training.custom import squared_error

pytestmark = pytest.mark.ray

each_library = pytest.mark.parametrize("framework", LIBRARIES)

FOREST = {"lightgbm": {**PLAIN["lightgbm"], "boosting": "rf", "bagging_fraction": 0.5, "bagging_freq": 1}}


@pytest.mark.parametrize("objective", [None, squared_error])
@each_library
def test_one_worker_grows_the_trees_of_the_plain_library(
    driver: TwoNodes, rows: Path, framework: str, objective: Any
) -> None:
    asked = request(rows, framework, scaling_config={"num_workers": 1})
    result = train(asked, user_code=UserCode(objective=objective))
    assert (result.num_workers, result.rows) == (1, ROWS)
    assert trees(result.booster()) == trees(alone(framework, rows, 10, objective))


@each_library
def test_two_learn_as_well_as_one_on_sorted_rows_too(
    driver: TwoNodes, rows: Path, tmp_path: Path, framework: str
) -> None:
    (tmp_path / "sorted").mkdir()
    # So that each worker sees one half of the values of what matters most.
    table = pa.Table.from_pandas(frame(rows).sort_values("a"), preserve_index=False)
    pq.write_table(table, tmp_path / "sorted" / "rows.parquet", row_group_size=ROWS // 2)
    theirs = rmse(alone(framework, rows, 30), rows)
    for path in (rows, tmp_path / "sorted"):
        booster = train(request(path, framework, n_estimators=30)).booster()
        assert rmse(booster, rows) == pytest.approx(theirs, rel=0.05)


@each_library
def test_two_trainings_are_byte_for_byte_the_same(driver: TwoNodes, rows: Path, framework: str) -> None:
    sampled = request(rows, framework, params=SAMPLED[framework])
    first, second = train(sampled), train(sampled)
    assert first.model == second.model
    other = train(sampled.model_copy(update={"run_config": sampled.run_config.model_copy(update={"seed": 1})}))
    assert other.model != first.model


INTERRUPTED = {
    "xgboost": [(SAMPLED, None), (PLAIN, None), (DART, None)],
    "lightgbm": [(SAMPLED, "m"), (PLAIN, None), (PLAIN, "m"), (DART, None), (FOREST, None)],
}
"""Parameters and margin; all but the first of a library are for the long tests."""


@pytest.mark.parametrize(
    ("framework", "params", "margin"),
    [
        pytest.param(framework, params[framework], margin, marks=[pytest.mark.long] if number else [])
        for framework, cases in INTERRUPTED.items()
        for number, (params, margin) in enumerate(cases)
    ],
)
def test_interrupted_and_resumed_it_is_the_same_model(
    driver: TwoNodes,
    rows: Path,
    framework: str,
    params: dict[str, Any],
    margin: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = resumable(rows, 1, framework, params=params, base_margin_col=margin, eval_set={"eval": spec(rows)})
    whole = train(asked)
    assert (whole.rows, whole.num_workers, whole.rounds, whole.restarts) == (ROWS, 2, 10, 0)
    losses = Losses(monkeypatch, 1)
    resumed = train(asked)
    assert [segment.index for segment in losses.seen] == [0, 1, 1, 2]
    assert resumed.restarts == 1
    assert (resumed.model, resumed.eval_results) == (whole.model, whole.eval_results)
    assert_ended(losses.lost)


@pytest.mark.parametrize(
    ("framework", "params", "counted_from"),
    [
        ("xgboost", {"max_depth": 8, "eta": 0.8, "eval_metric": ["mae", "rmse"]}, 0),
        ("lightgbm", {"learning_rate": 0.9, "metric": ["l1", "rmse"]}, 1),
    ],
)
def test_early_stopping_is_agreed_and_remembered(
    driver: TwoNodes,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    framework: str,
    params: dict[str, Any],
    counted_from: int,
) -> None:
    noise = write_rows(tmp_path / "noise", rows=300, seed=2)
    asked = resumable(
        rows,
        1,
        framework,
        eval_set={"train": spec(rows), "eval": spec(noise)},
        n_estimators=200,
        early_stopping_rounds=4,
        params=params,
    )
    result = train(asked)
    values = result.eval_results["eval"]["rmse"]
    best = int(np.argmin(values))
    assert (result.best_iteration, result.rounds, len(values)) == (best, best + 5, best + 5)
    assert result.best_score == pytest.approx(min(values))
    assert result.booster().best_iteration == best + counted_from
    # What it predicts, all rows of the eval set and no others counted, is what the workers saw in the best round.
    precision = 1e-6 if framework == "lightgbm" else 1e-3  # XGBoost computes with 32 bits
    assert rmse(result.booster(), noise) == pytest.approx(min(values), rel=precision)
    Losses(monkeypatch, (best + 2) // 4)  # between the best round and the last
    resumed = train(asked)
    assert resumed.restarts == 1
    assert (resumed.model, resumed.eval_results) == (result.model, result.eval_results)
    assert (resumed.best_iteration, resumed.rounds) == (best, result.rounds)
    assert TrainResult.model_validate_json(resumed.model_dump_json()) == resumed
    assert TrainRequest.model_validate_json(asked.model_dump_json()) == asked


@pytest.mark.parametrize(("framework", "told"), [("xgboost", "eval-rmse"), ("lightgbm", "eval-l2:")])
def test_metrics_are_printed_here_as_often_as_asked(
    driver: TwoNodes, rows: Path, capsys: pytest.CaptureFixture[str], framework: str, told: str
) -> None:
    asked = resumable(rows, 0, framework, eval_set={"eval": spec(rows)})
    train(asked.model_copy(update={"verbose_eval": 4}))
    printed = [line for line in capsys.readouterr().out.splitlines() if told in line]
    assert [line.split("\t")[0] for line in printed] == ["[0]", "[4]", "[8]", "[9]"]
    train(asked)
    assert told not in capsys.readouterr().out


@pytest.mark.parametrize(("framework", "params"), [("xgboost", {"eta": 1}), ("lightgbm", PLAIN["lightgbm"])])
def test_weights_and_margins_count(driver: TwoNodes, rows: Path, framework: str, params: dict[str, Any]) -> None:
    assert train(request(rows, framework, weight_col="w")).model != train(request(rows, framework)).model
    # The margin, 5 everywhere, is what boosting starts from.
    margined = train(request(rows, framework, base_margin_col="m", n_estimators=50, params=params)).booster()
    table = frame(rows)
    assert np.mean(np.abs(predicted(margined, table, "m") - table["y"])) < 0.5


@pytest.mark.parametrize(
    ("framework", "objective", "metric_param", "metrics", "most"),
    [
        ("xgboost", "multi:softprob", "eval_metric", ["mlogloss", "merror"], 0.2),
        ("lightgbm", "multiclass", "metric", ["multi_logloss", "multi_error"], 0.1),
    ],
)
def test_several_classes(
    driver: TwoNodes, rows: Path, framework: str, objective: str, metric_param: str, metrics: list[str], most: float
) -> None:
    params = {**PLAIN[framework], "objective": objective, "num_class": 3, metric_param: metrics}
    result = train(resumable(rows, 0, framework, label_col="k", params=params, eval_set={"eval": spec(rows)}))
    assert list(result.eval_results["eval"]) == metrics
    table = frame(rows)
    wrong = np.mean(np.argmax(predicted(result.booster(), table), axis=1) != table["k"])
    assert wrong == pytest.approx(result.eval_results["eval"][metrics[1]][-1], abs=1e-3) and wrong < most


def ranked_alone(framework: str, params: dict[str, Any], table: pa.Table) -> tuple[Any, float]:
    """The plain library's booster and its metric on the rows on which it was trained."""
    x, label, ids = table.select(COLUMNS).to_pandas().to_numpy(), table["y"].to_numpy(), table["q"].to_numpy()
    history: dict[str, Any] = {}
    if framework == "xgboost":
        import xgboost

        matrix = xgboost.QuantileDMatrix(x, label, qid=ids)
        booster = xgboost.train(params, matrix, 10, evals=[(matrix, "train")], evals_result=history, verbose_eval=False)
        return booster, history["train"]["ndcg@5"][-1]
    import lightgbm

    data = lightgbm.Dataset(x, label, weight=table["w"].to_numpy(), group=np.unique(ids, return_counts=True)[1])
    fixed = {"verbosity": -1, "deterministic": True, "force_col_wise": True, "num_threads": 1}
    calls = [lightgbm.record_evaluation(history)]
    booster = lightgbm.train({**params, **fixed}, data, 10, valid_sets=[data], callbacks=calls)
    return booster, history["training"]["ndcg@5"][-1]


@pytest.mark.parametrize(
    ("framework", "params", "weight"),
    [
        # A weight is a group's for XGBoost, and a row's for LightGBM.
        ("xgboost", {"objective": "rank:ndcg", "max_depth": 3, "eval_metric": "ndcg@5"}, None),
        ("lightgbm", {**PLAIN["lightgbm"], "objective": "lambdarank", "metric": "ndcg", "eval_at": 5}, "w"),
    ],
)
def test_ranking(
    driver: TwoNodes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    framework: str,
    params: dict[str, Any],
    weight: str | None,
) -> None:
    """Two workers rank as well as one process, which needs every query's rows on one of them, and side by side."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4000, 3)).astype(np.float32)
    ids = np.sort(rng.integers(0, 300, 4000))
    relevance = np.clip(np.round(x[:, 0] + rng.normal(scale=0.3, size=4000) + 1), 0, 4).astype(np.float32)
    weights = rng.uniform(0.5, 2, size=4000).astype(np.float32)
    table = pa.table({**dict(zip(COLUMNS, x.T, strict=True)), "y": relevance, "w": weights, "q": ids})
    pq.write_table(table, tmp_path / "queries.parquet", row_group_size=700)
    eval_set = {"train": spec(tmp_path)}
    asked = resumable(tmp_path, 1, framework, params=params, group_col="q", weight_col=weight, eval_set=eval_set)
    result = train(asked)
    booster, metric = ranked_alone(framework, params, table)
    assert result.eval_results["train"]["ndcg@5"][-1] == pytest.approx(metric, abs=0.02)
    assert sum(worker.rows for worker in result.workers) == 4000
    if framework == "lightgbm":
        one = asked.model_copy(update={"scaling_config": ScalingConfig(num_workers=1)})
        assert trees(train(one).booster()) == trees(booster)
    Losses(monkeypatch, 1)
    resumed = train(asked)
    assert (resumed.restarts, resumed.model) == (1, result.model)
    assert resumed.eval_results == result.eval_results
    with pytest.raises(InvalidArgumentError, match="set group_col to the column"):
        train(asked.model_copy(update={"group_col": None}))


@pytest.mark.parametrize(
    ("framework", "column", "argument", "value"),
    [
        ("xgboost", "y", {}, None),
        ("xgboost", "w", {"weight_col": "w"}, float("inf")),
        ("lightgbm", "w", {"weight_col": "w"}, None),
        pytest.param("xgboost", "y", {}, float("inf"), marks=pytest.mark.long),
        pytest.param("xgboost", "w", {"weight_col": "w"}, None, marks=pytest.mark.long),
    ],
)
def test_nulls_found_while_reading(
    driver: TwoNodes, tmp_path: Path, framework: str, column: str, argument: dict[str, Any], value: float | None
) -> None:
    rows = without_statistics(tmp_path, column, [1.0, value])
    with pytest.raises(DataError, match=rf'rows.parquet, row group 0.*"{column}".*row 1.*\[rank \d'):
        train(request(rows, framework, **argument))


@pytest.mark.parametrize(
    ("framework", "params", "said"),
    [
        ("xgboost", {"objective": "multi:softprob", "num_class": 2}, r"XGBoost: .*label must be .*rank \d"),
        ("lightgbm", {"objective": "multiclass", "num_class": 2}, r"LightGBM: Label must be in \[0, 2\).*rank \d"),
    ],
)
def test_what_the_library_says_itself(
    driver: TwoNodes, rows: Path, framework: str, params: dict[str, Any], said: str
) -> None:
    with pytest.raises(TrainingError, match=said):
        train(request(rows, framework, label_col="k", params=params))


REFUSED: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "either": [
        ({"input_cols": ("a", "bb")}, DataError, '"bb"'),
        ({"label_col": "z"}, DataError, '"z"'),
        ({"weight_col": "z"}, DataError, '"z"'),
        ({"params": {"nthread": 7}}, InvalidArgumentError, "num_cpu_per_worker"),
        ({"params": {"num_boost_round": 7}}, InvalidArgumentError, "num_boost_round"),
        ({"params": {"device": "cpu"}, "scaling_config": {"use_gpu": True}}, InvalidArgumentError, "use_gpu"),
        ({"scaling_config": {"use_gpu": True}}, CapacityError, "scale_cluster"),
        ({"scaling_config": {"num_workers": 3}}, CapacityError, "scale_cluster"),
        ({"eval_set": {"eval": {"paths": ("/nowhere",)}}}, DataError, "/nowhere"),
    ],
    "xgboost": [
        ({"params": {"max_depth": "deep"}}, TrainingError, "max_depth"),
        ({"params": {"maxdepth": 3}}, InvalidArgumentError, "max_depth"),
    ],
    "lightgbm": [
        ({"params": {"num_leavs": 3}}, InvalidArgumentError, "did you mean num_leaves"),
        ({"params": {"objective": "regresion"}}, TrainingError, "LightGBM refuses the parameters"),
        ({"params": DART["lightgbm"], "early_stopping_rounds": 2}, InvalidArgumentError, "dart"),
        ({"early_stopping_rounds": 2}, InvalidArgumentError, "needs an eval set that is not the training set"),
    ],
}
"""What is refused: options, error and a part of its message. Early stopping asks for an eval set: the training set."""


@each_library
def test_what_is_refused_before_anything_starts(
    driver: TwoNodes, rows: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    monkeypatch.setattr(engine, "shared_gang", None)
    for change, error, named in REFUSED["either"] + REFUSED[framework]:
        watched = {"eval_set": {"train": spec(rows)}} if "early_stopping_rounds" in change else {}
        with pytest.raises(error, match=named):
            train(request(rows, framework, **watched, **change))
