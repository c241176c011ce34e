from __future__ import annotations

import re
from typing import Any

import pytest

from shoal.errors import CapacityError, InvalidArgumentError
from shoal.training.cluster import Node
from shoal.training.demand import XGBScalingConfig, gpu_wish, wider_workers
from shoal.training.gang.placement import GangShape


def nodes(*sizes: tuple[int, int]) -> list[Node]:
    return [Node(name=f"n{i}", cpus=cpus, gpus=gpus) for i, (cpus, gpus) in enumerate(sizes)]


def sized(config: dict, active: list[Node], device: str | None = None, **options: Any) -> GangShape:
    scaling = XGBScalingConfig(**config)
    return scaling.gang(use_gpu=gpu_wish(scaling, device)).size(active, **options)


def size(workers: int, cpus: float, gpus: int = 0) -> GangShape:
    return GangShape(workers, cpus, gpus, trim_memory=True)


@pytest.mark.parametrize(
    ("config", "active", "expected"),
    [
        ({}, nodes((4, 0), (4, 0)), size(2, 4)),
        ({}, nodes((8, 0), (2, 0)), size(2, 2)),
        ({"num_workers": 3}, nodes((4, 0), (2, 0)), size(3, 2)),
        ({"num_workers": 4}, nodes((4, 0)), size(4, 1)),
        ({"num_workers": 1}, nodes((2, 0), (8, 0)), size(1, 8)),
        ({"num_cpu_per_worker": 1}, nodes((4, 0), (4, 0)), size(2, 1)),
        ({"num_workers": 8, "num_cpu_per_worker": 1}, nodes((4, 0), (4, 0)), size(8, 1)),
        # A head without CPUs holds no worker.
        ({}, nodes((0, 0), (4, 0)), size(1, 4)),
        ({}, nodes((8, 2), (8, 2)), size(4, 4, 1)),
        ({"use_gpu": False}, nodes((8, 2), (8, 2)), size(2, 8)),
        # Not every node has a GPU: CPUs, unless GPUs are asked for.
        ({}, nodes((8, 2), (8, 0)), size(2, 8)),
        ({"use_gpu": True}, nodes((8, 2), (8, 0)), size(2, 4, 1)),
        ({"use_gpu": True, "num_workers": 1}, nodes((8, 2), (8, 2)), size(1, 8, 1)),
    ],
)
def test_size_of_the_gang(config: dict, active: list[Node], expected: GangShape) -> None:
    assert sized(config, active) == expected


@pytest.mark.parametrize(
    ("config", "active", "clamped"),
    [
        ({"num_workers": 3}, nodes((1, 0), (1, 0)), size(2, 1)),
        ({"num_cpu_per_worker": 4}, nodes((2, 0), (2, 0)), size(2, 2)),
        ({"num_workers": 5, "num_cpu_per_worker": 2}, nodes((4, 0), (3, 0)), size(3, 2)),
        ({"num_workers": 3, "use_gpu": True}, nodes((8, 1), (8, 1)), size(2, 8, 1)),
    ],
)
def test_too_much_is_refused_or_clamped_with_a_warning(config: dict, active: list[Node], clamped: GangShape) -> None:
    with pytest.raises(CapacityError, match="scale_cluster"):
        sized(config, active)
    with pytest.warns(UserWarning, match="reduced to"):
        assert sized(config, active, clamp=True) == clamped


def test_no_node_can_hold_a_worker() -> None:
    with pytest.raises(CapacityError, match="no node is active"):
        sized({}, [])
    with pytest.raises(CapacityError, match="a GPU and a CPU"):
        sized({"use_gpu": True}, nodes((4, 0)), clamp=True)


def test_readers_keep_their_share_of_the_cpus() -> None:
    for cpus, kept in ((4, 2.0), (1, 0.5)):
        found = sized({}, nodes((cpus, 0)), ray_streams=1)
        assert (found, found.reading_cpus) == (GangShape(1, kept, trim_memory=True), kept)


def test_device_decides_where_use_gpu_does_not() -> None:
    active = nodes((4, 1), (4, 1))
    assert sized({}, active, device="cpu").gpus_per_worker == 0
    assert sized({}, active, device="cuda").gpus_per_worker == 1


@pytest.mark.parametrize(("use_gpu", "device"), [(True, "cpu"), (False, "cuda"), (False, "gpu")])
def test_device_and_use_gpu_contradict_each_other(use_gpu: bool, device: str) -> None:
    with pytest.raises(InvalidArgumentError, match="use_gpu"):
        sized({"use_gpu": use_gpu}, nodes((4, 1)), device=device)


@pytest.mark.parametrize(
    "wrong", [{"num_workers": 0}, {"num_workers": -2}, {"num_cpu_per_worker": 1.5}, {"workers": 2}]
)
def test_config_is_checked_when_it_is_made(wrong: dict) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        XGBScalingConfig(**wrong)


@pytest.mark.parametrize(
    ("nodes", "rows", "gpus", "advice"),
    [
        (["a", "a", "b", "b"], 400_000, 0, r"about 100,000 rows each: .*\(num_workers=2, num_cpu_per_worker=4\)"),
        (["a", "b"], 200_000, 0, None),
        (["a", "a"], 400_000, 0, None),
        (["a", "a"], 10_000, 0, None),
        (["a", "a"], 200_000, 1, None),
    ],
    ids=["few rows", "one worker per node", "many rows", "a short training", "GPUs"],
)
def test_fewer_workers_are_advised_if_they_would_be_faster(
    nodes: list[str], rows: int, gpus: int, advice: str | None
) -> None:
    said = wider_workers(GangShape(len(nodes), 2, gpus), nodes, rows)
    assert said is None if advice is None else re.search(advice, said or "")
