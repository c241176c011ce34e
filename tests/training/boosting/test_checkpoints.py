"""Segments, and going on after a loss: the model is, byte for byte, the one of a training that lost nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import CapacityError, WorkerLostError
from shoal.training import run_config
from shoal.training.boosting import engine
from shoal.training.boosting.engine import train
from shoal.training.boosting.messages import Segment, next_segment
from shoal.training.boosting.request import TrainRequest
from shoal.training.gang.gang import Gang
from tests.support.two_node_cluster import TwoNodes, assert_ended, write_rows
from tests.training.xgboost.test_xgboost import request, spec

SAMPLED = {"max_depth": 3, "subsample": 0.5, "colsample_bynode": 0.7}
PLAIN = {"max_depth": 3}
DART = {"max_depth": 3, "booster": "dart", "rate_drop": 0.2}


def test_the_length_of_a_segment() -> None:
    assert [next_segment(0, rounds, None, None).stop for rounds in (1, 100, 200, 1001)] == [1, 50, 50, 251]
    assert next_segment(0, 100, 7, None) == Segment(0, 7, False, None)
    assert next_segment(98, 100, 7, None) == Segment(14, 100, True, None)


class Losses:
    """Kills a worker, or does something else, before certain segments, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *segments: int, deed: Any = None) -> None:
        self.left = list(segments)
        self.seen: list[Segment] = []
        self.lost: list[int] = []
        on_all = engine.Training._on_all

        def act(training: Any, gang: Gang, name: str, args: Sequence[tuple[Any, ...]], **how: Any) -> list[Any]:
            if name == "boost":
                [segment] = args[0]
                self.seen.append(segment)
                if self.left and segment.index == self.left[0]:
                    self.left.pop(0)
                    self.lost.append(gang.workers[1].pid)
                    (deed or (lambda: os.kill(gang.workers[1].pid, signal.SIGKILL)))()
            return on_all(training, gang, name, args, **how)

        monkeypatch.setattr(engine.Training, "_on_all", act)


def asked(rows: Path, max_restarts: int = 0, **changes: Any) -> TrainRequest:
    wanted = request(rows, **changes)
    changed = wanted.run_config.model_copy(update={"checkpoint_every": 4, "max_restarts": max_restarts})
    return wanted.model_copy(update={"run_config": changed})


@pytest.mark.ray
@pytest.mark.parametrize(
    "params",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.long),
        pytest.param(SAMPLED, id="sampled"),
        pytest.param(DART, id="dart", marks=pytest.mark.long),
    ],
)
def test_interrupted_and_resumed_it_is_the_same_model(
    driver: TwoNodes, rows: Path, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(asked(rows, params=params))
    losses = Losses(monkeypatch, 1)
    resumed = train(asked(rows, 1, params=params))
    assert resumed.model == whole.model
    assert (whole.restarts, resumed.restarts) == (0, 1)
    assert [segment.index for segment in losses.seen] == [0, 1, 1, 2]
    assert_ended(losses.lost)


@pytest.mark.ray
def test_early_stopping_knows_what_was_before_the_loss(
    driver: TwoNodes, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "eval_set": {"eval": spec(write_rows(tmp_path / "noise", rows=300, seed=2)), "train": spec(rows)},
        "early_stopping_rounds": 6,
        "n_estimators": 100,
        "params": {"max_depth": 8, "eta": 0.8, "eval_metric": ["mae", "rmse"]},
    }
    changes["eval_set"] = dict(reversed(changes["eval_set"].items()))  # the last one decides
    whole = train(asked(rows, **changes))
    best = whole.best_iteration
    assert best is not None
    Losses(monkeypatch, (best + 3) // 4)  # between the best round and the last
    resumed = train(asked(rows, 1, **changes))
    assert resumed.restarts == 1
    assert resumed.model == whole.model
    assert resumed.eval_results == whole.eval_results
    assert (resumed.best_iteration, resumed.rounds) == (best, whole.rounds)


@pytest.mark.ray
def test_one_loss_too_many(
    driver: TwoNodes, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Losses(monkeypatch, 1, 1)  # before it is trained for the first time, and for the second
    with pytest.raises(WorkerLostError, match=r"rank 1 .* was lost"):
        train(asked(rows, 1))
    assert "continuing from round 4 of 10 (restart 1 of 1)" in capsys.readouterr().out


@pytest.mark.ray
def test_a_lost_node_is_waited_for(driver: TwoNodes, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(asked(rows, params=SAMPLED))
    Losses(monkeypatch, 1, deed=driver.kill_second)
    attempt, attempts = engine.Training._attempt, []

    def attempted(training: Any) -> Any:
        attempts.append(training)
        if len(attempts) == 3:  # the second found no room; in this thread, because Ray's nodes end with theirs
            driver.replace_second()
        return attempt(training)

    monkeypatch.setattr(engine.Training, "_attempt", attempted)
    resumed = train(asked(rows, 1, params=SAMPLED))
    assert (resumed.model, resumed.restarts, len(attempts)) == (whole.model, 1, 3)


@pytest.mark.ray
@pytest.mark.long
def test_without_another_node_fewer_go_on_only_where_that_is_allowed(
    driver: TwoNodes, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_config, "REPLACE_NODE_S", 1.0)
    monkeypatch.setattr(run_config, "RESOURCES_WAIT_S", 20.0)
    Losses(monkeypatch, 1, 1, deed=driver.kill_second)
    try:
        with pytest.raises(CapacityError, match="do not fit on this pool"):
            train(asked(rows, 1))
        driver.replace_second()
        wanted = asked(rows, 1)
        with_fewer = wanted.run_config.model_copy(update={"min_workers": 1})
        result = train(wanted.model_copy(update={"run_config": with_fewer}))
    finally:
        driver.replace_second()
    assert (result.num_workers, result.restarts, result.rounds) == (1, 1, 10)
    assert "continuing with 1 workers" in capsys.readouterr().out
