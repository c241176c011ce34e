"""LightGBM on two real nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightgbm
import pytest

from shoal.errors import DataError
from shoal.training.boosting import engine
from shoal.training.boosting.engine import train
from shoal.training.boosting.params import UserCode
from tests.support.boosting_trainings import request, resumable, spec
from tests.support.two_node_cluster import ROWS, TwoNodes

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("call", ["bin_sample", "finish"])
def test_a_loss_with_the_sample_or_after_the_last_round_changes_nothing(
    driver: TwoNodes, rows: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = resumable(rows, 1, "lightgbm", n_estimators=8)
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


def test_callbacks_may_stop(driver: TwoNodes, rows: Path) -> None:
    asked = resumable(rows, 0, "lightgbm", eval_set={"eval": spec(rows)})

    def stop(env: Any) -> None:
        if env.iteration == 5:
            raise lightgbm.callback.EarlyStopException(3, env.evaluation_result_list)

    slow_down = lightgbm.reset_parameter(learning_rate=lambda round: 0.3 * 0.9**round)
    result = train(asked, user_code=UserCode(callbacks=(stop, slow_down)))
    assert (result.rounds, result.best_iteration) == (6, 3)
    assert result.best_score == result.eval_results["eval"]["l2"][5]


def test_eval_sets_that_are_too_long_are_refused_before_anything_starts(
    driver: TwoNodes, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "shared_gang", None)
    monkeypatch.setattr("shoal.training.boosting.rows.MAX_EVAL_ROWS", ROWS - 1)
    with pytest.raises(DataError, match=r'eval_set "eval" has 6,000 rows.*random_split'):
        train(request(rows, "lightgbm", eval_set={"eval": spec(rows)}))
