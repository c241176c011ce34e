"""Segments, and going on after a loss: the model is, byte for byte, the one of a training that lost nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.errors import CapacityError, WorkerLostError
from shoal.training import run_config
from shoal.training.boosting import engine
from shoal.training.boosting.engine import train
from shoal.training.boosting.messages import Segment, next_segment
from tests.support.boosting_trainings import SAMPLED, Losses, resumable
from tests.support.two_node_cluster import TwoNodes


def test_the_length_of_a_segment() -> None:
    assert [next_segment(0, rounds, None, None).stop for rounds in (1, 100, 200, 1001)] == [1, 50, 50, 251]
    assert next_segment(0, 100, 7, None) == Segment(0, 7, False, None)
    assert next_segment(98, 100, 7, None) == Segment(14, 100, True, None)


@pytest.mark.ray
def test_one_loss_too_many(
    driver: TwoNodes, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Losses(monkeypatch, 1, 1)  # before it is trained for the first time, and for the second
    with pytest.raises(WorkerLostError, match=r"rank 1 .* was lost"):
        train(resumable(rows, 1))
    assert "continuing from round 4 of 10 (restart 1 of 1)" in capsys.readouterr().out


@pytest.mark.ray
def test_a_lost_node_is_waited_for(driver: TwoNodes, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(resumable(rows, params=SAMPLED["xgboost"]))
    Losses(monkeypatch, 1, deed=driver.kill_second)
    attempt, attempts = engine.Training._attempt, []

    def attempted(training: Any) -> Any:
        attempts.append(training)
        if len(attempts) == 3:  # the second found no room; in this thread, because Ray's nodes end with theirs
            driver.replace_second()
        return attempt(training)

    monkeypatch.setattr(engine.Training, "_attempt", attempted)
    resumed = train(resumable(rows, 1, params=SAMPLED["xgboost"]))
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
            train(resumable(rows, 1))
        driver.replace_second()
        wanted = resumable(rows, 1)
        with_fewer = wanted.run_config.model_copy(update={"min_workers": 1})
        result = train(wanted.model_copy(update={"run_config": with_fewer}))
    finally:
        driver.replace_second()
    assert (result.num_workers, result.restarts, result.rounds) == (1, 1, 10)
    assert "continuing with 1 workers" in capsys.readouterr().out
