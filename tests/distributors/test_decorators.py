from __future__ import annotations

import os

import pytest

from shoal.distributors import distributed
from shoal.errors import InvalidArgumentError
from tests.training.ray_cluster import TwoNodes

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
    ],
)
def test_wrong_arguments_are_refused_by_name(wrong: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        distributed(**wrong)


def test_parentheses_are_asked_for() -> None:
    with pytest.raises(InvalidArgumentError, match=r"@distributed\(\) with parentheses"):
        distributed(len)  # type: ignore[arg-type]


@pytest.mark.ray
def test_each_worker_returns_its_own(driver: TwoNodes) -> None:
    assert place.distributed(2) == [(6, 0, 2), (6, 1, 2)]
    with pytest.raises(InvalidArgumentError, match="place: missing a required argument: 'number'"):
        place.distributed()  # type: ignore[call-arg]
