from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.distributors import distributed, ray_launch
from shoal.errors import CapacityError, InvalidArgumentError, TrainingError
from shoal.pool.api import list_pools
from shoal.training.gang.gang import shared_gang
from shoal.training.gang.placement import GangShape
from tests.support.two_node_cluster import TwoNodes

FACTOR = 3


@distributed(num_workers=2, num_cpus=0)
def place(number: int) -> tuple[int, int, int]:
    """Uses its module's globals."""
    return number * FACTOR, int(os.environ.get("RANK", "-1")), int(os.environ.get("WORLD_SIZE", "-1"))


def test_it_is_called_here_as_ever() -> None:
    assert place(2) == (6, -1, -1)
    assert place.__name__ == "place"
    assert place.__doc__ == "Uses its module's globals."


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"gpus": 3, "num_workers": 2}, "gpus=3 cannot be divided among num_workers=2"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"gpus": -1}, "gpus=-1"),
        ({"num_cpus": -1}, "num_cpus"),
        ({"gpu_type": "H100"}, 'gpu_type="H100" requires GPUs'),
    ],
)
def test_wrong_arguments_are_refused_by_name(wrong: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        distributed(**wrong)
    with pytest.raises(InvalidArgumentError, match=says):
        ray_launch(**wrong)


@pytest.mark.parametrize("decorator", [distributed, ray_launch])
def test_more_gpus_than_this_machine_has_are_refused_before_anything_starts(
    decorator: Callable[..., Any], outside: None, fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.pool.backends.local.gpus.visible_gpus", lambda environment: [])
    with pytest.raises(InvalidArgumentError, match="needs 8 GPUs of this machine, but 0 can be used: pass remote=True"):
        decorator(gpus=8)(abs).distributed(1)
    assert list_pools() == []


def test_parentheses_are_asked_for() -> None:
    with pytest.raises(InvalidArgumentError, match=r"write @distributed\(\)"):
        distributed(len)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"write @ray_launch\(\)"):
        ray_launch(len)  # type: ignore[arg-type]


@ray_launch(num_workers=2)
def total(numbers: list[int]) -> tuple[int, bool, bool]:
    """Uses Ray as it likes, and its module's globals."""
    import ray

    @ray.remote
    def tripled(number: int) -> int:
        return number * FACTOR

    found = sum(ray.get([tripled.remote(number) for number in numbers]))
    return found, ray.is_initialized(), "torch" in sys.modules


@pytest.mark.ray
def test_a_function_is_launched_once_as_a_driver(driver: TwoNodes) -> None:
    with shared_gang(GangShape(2, 1.0)):
        pass  # as after a `fit`, it stays idle and reserves both CPUs, which the function's tasks need
    assert total.distributed([1, 2, 3]) == (18, True, False)  # PyTorch need not be installed
    with pytest.raises(TrainingError, match="unsupported operand"):
        total.distributed(["x", None])  # type: ignore[list-item]


@pytest.mark.ray
def test_gpus_of_a_type_that_no_node_has_are_refused(driver: TwoNodes) -> None:
    @distributed(gpus=2, gpu_type="H100", remote=True)
    def train() -> None: ...

    launched = ray_launch(gpus=2, gpu_type="H100")(lambda: None)
    for refused in (train, launched):
        with pytest.raises(CapacityError, match="num_workers=2 of 1 CPU and 1 H100 GPU"):
            refused.distributed()


@pytest.mark.ray
def test_each_worker_returns_its_own(driver: TwoNodes) -> None:
    assert place.distributed(2) == [(6, 0, 2), (6, 1, 2)]
    with pytest.raises(
        InvalidArgumentError,
        match="place cannot be called with the given arguments: missing a required argument: 'number'",
    ):
        place.distributed()  # type: ignore[call-arg]
