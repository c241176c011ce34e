"""Objectives and metrics that are the user's own functions, on two real nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data import DataConnector
from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.boosting import engine
from shoal.training.boosting.engine import train
from shoal.training.boosting.params import UserCode
from shoal.training.reporting import gang_context
from tests.support.boosting_trainings import LIBRARIES, Losses, request, spec
from tests.support.two_node_cluster import COLUMNS, TwoNodes, write_rows
from tests.training.custom import mean_error, squared_error, worst_error

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("framework", "name", "metrics", "best_of", "params", "direction"),
    [
        ("xgboost", "mean-error", (mean_error,), np.argmin, {"max_depth": 8, "eta": 0.8}, "minimize"),
        ("lightgbm", "hits", (worst_error,), np.argmax, {"learning_rate": 0.9}, None),
    ],
)
def test_all_stop_at_the_same_round_interrupted_or_not(
    driver: TwoNodes,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    framework: str,
    name: str,
    metrics: tuple[Any, ...],
    best_of: Any,
    params: dict[str, Any],
    direction: str | None,
) -> None:
    noise = write_rows(tmp_path / "noise", rows=300, seed=2)
    asked = request(
        rows,
        framework,
        eval_set={"train": spec(rows), "eval": spec(noise)},
        n_estimators=200,
        early_stopping_rounds=4,
        direction=direction,
        params=params,
        run_config={"checkpoint_every": 4, "max_restarts": 1},
    )
    user_code = UserCode(objective=squared_error, metrics=metrics)
    whole = train(asked, user_code=user_code)
    values = whole.eval_results["eval"][name]
    best = int(best_of(values))
    assert (whole.best_iteration, whole.rounds, len(values)) == (best, best + 5, best + 5)
    Losses(monkeypatch, (best + 2) // 4)
    resumed = train(asked, user_code=user_code)
    assert resumed.restarts == 1
    assert (resumed.model, resumed.eval_results) == (whole.model, whole.eval_results)
    table = DataConnector.from_parquet(noise).to_pandas()
    booster = resumed.booster()
    if framework == "xgboost":
        error = np.abs(booster.inplace_predict(table[COLUMNS].to_numpy(), iteration_range=(0, best + 1)) - table["y"])
        assert values[best] == pytest.approx(error.mean(), rel=1e-5)
    else:
        assert values[best] == np.mean(np.abs(booster.predict(table[COLUMNS]) - table["y"]) < 0.5)


@pytest.mark.parametrize(
    ("framework", "part"),
    [
        ("xgboost", "objective"),
        ("lightgbm", "metric"),
        pytest.param("xgboost", "metric", marks=pytest.mark.long),
        pytest.param("lightgbm", "objective", marks=pytest.mark.long),
    ],
)
def test_what_a_function_raises_on_one_rank_is_told(driver: TwoNodes, rows: Path, framework: str, part: str) -> None:
    def fails(predictions: np.ndarray, data: Any) -> Any:
        if gang_context().rank == 1:
            raise ZeroDivisionError("no rows of class 7")
        if part == "objective":
            return squared_error(predictions, data)
        return ("mine", 0.0) if framework == "xgboost" else ("mine", 0.0, True)

    user_code = UserCode(objective=fails) if part == "objective" else UserCode(metrics=(fails,))
    with pytest.raises(TrainingError, match=r"rank 1 .* failed: ZeroDivisionError: no rows of class 7") as caught:
        train(request(rows, framework, n_estimators=1000, eval_set={"eval": spec(rows)}), user_code=user_code)
    assert "in fails" in "".join(caught.value.__notes__)


def test_what_is_refused_before_anything_starts(driver: TwoNodes, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "shared_gang", None)
    for framework in LIBRARIES:
        asked = request(rows, framework, params={"objective": "binary"})
        with pytest.raises(InvalidArgumentError, match=r'is a function, but params contain objective="binary"'):
            train(asked, user_code=UserCode(objective=squared_error))
    other = spec(rows) | {"filters": [["a", ">", 0]]}
    asked = request(rows, "lightgbm", eval_set={"eval": other}, early_stopping_rounds=2)
    with pytest.raises(InvalidArgumentError, match="early_stopping_rounds needs a metric: set the parameter"):
        train(asked, user_code=UserCode(objective=squared_error))
    forest = {"boosting": "rf", "bagging_fraction": 0.5, "bagging_freq": 1}
    with pytest.raises(InvalidArgumentError, match='boosting="rf"'):
        train(request(rows, "lightgbm", params=forest), user_code=UserCode(objective=squared_error))
    with pytest.raises(InvalidArgumentError, match='boosting="rf"'):
        train(request(rows, "lightgbm", params=forest, base_margin_col="m"))
