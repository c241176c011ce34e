from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.params import UserCode, refuse_namesakes


def loss(*_: Any) -> tuple[float, float]:
    return 0.0, 1.0


def test_what_is_the_users_own() -> None:
    assert UserCode.of(None, "reg:squarederror", None) == UserCode()
    assert not UserCode()
    assert UserCode.of([1], loss, loss) == UserCode((1,), loss, (loss,))
    assert UserCode.of(None, None, [loss, sum]).metrics == (loss, sum)
    assert UserCode(objective=loss) and UserCode(metrics=(loss,)) and UserCode(callbacks=(1,))
    assert UserCode((1,), loss, (sum,)).parts() == (1, sum, loss)


def test_what_it_is_called() -> None:
    assert UserCode((1,)).names() == {}
    assert UserCode((), partial(loss), (loss, sum)).names() == {
        "objective": "partial",
        "custom_metric": "loss, sum",
    }


def fork(*_: Any) -> int:
    return os.fork()


@pytest.mark.processes
def test_functions_in_a_worker_end_forks_when_they_return() -> None:
    code = UserCode((1,), fork, (fork, fork)).ending_forks()
    assert code.callbacks == (1,)
    assert code.objective
    for function in (code.objective, *code.metrics):
        assert os.waitpid(function(), 0)[1]
    assert UserCode().ending_forks() == UserCode()


@pytest.mark.parametrize("metric", ["rmse", ["rmse"], [loss, None], 3])
def test_a_metric_is_a_function(metric: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="custom_metric must be a function or a list of functions"):
        UserCode.of(None, None, metric)


def test_two_metrics_of_one_name() -> None:
    refuse_namesakes({"eval": {"rmse": [1.0, 2.0]}, "train": {"rmse": [1.0, 2.0]}}, 2)
    with pytest.raises(InvalidArgumentError, match='two metrics have the name "rmse"'):
        refuse_namesakes({"eval": {"mae": [1.0], "rmse": [1.0, 2.0]}}, 1)
