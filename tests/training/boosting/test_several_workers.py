"""Several workers of a boosting training on one node: where they are placed, what they get, and what they train."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import CapacityError
from shoal.training.boosting.engine import train
from shoal.training.gang import placement
from shoal.training.gang.gang import end_gangs, shared_gang
from shoal.training.gang.placement import GangShape
from tests.support.two_node_cluster import TwoNodes
from tests.training.boosting.test_gpus import request

pytestmark = pytest.mark.ray


def test_workers_are_spread_evenly_over_the_nodes(driver: TwoNodes) -> None:
    shape = GangShape(6, 0.25)
    end_gangs()
    group = placement.reserve(shape, time.monotonic() + 60)
    try:
        seats = placement.seats(shape, group)
    finally:
        placement.release(group)
    assert [(seat.node, seat.local_world_size) for seat in seats] == [("a-head", 3)] * 3 + [("b", 3)] * 3


@pytest.fixture(scope="module")
def large_node(driver: TwoNodes) -> Iterator[str]:
    """A third node, with four CPUs, and two GPUs that only Ray believes in."""
    node = driver.cluster.add_node(
        num_cpus=4, num_gpus=2, node_name="large", node_ip_address="127.0.0.1", object_store_memory=80 * 2**20
    )
    yield "large"
    end_gangs()
    driver.cluster.remove_node(node)


@contextmanager
def one_cpu_of_each_node_is_busy() -> Iterator[None]:
    import ray

    end_gangs()
    busy = ray.util.placement_group([{"CPU": 1.0}] * 3, strategy="STRICT_SPREAD")
    assert busy.wait(timeout_seconds=60)
    try:
        yield
    finally:
        end_gangs()
        ray.util.remove_placement_group(busy)


@pytest.mark.parametrize("framework", ["xgboost", pytest.param("lightgbm", marks=pytest.mark.long)])
def test_two_workers_of_one_node_train_the_model_of_two_nodes(
    driver: TwoNodes, large_node: str, rows: Path, framework: str
) -> None:
    two: dict[str, Any] = {"num_workers": 2, "num_cpu_per_worker": 1, "use_gpu": False}
    asked = request(rows, framework=framework, n_estimators=10, scaling_config=two)
    apart = train(asked)
    with one_cpu_of_each_node_is_busy():
        together = train(asked)
    assert len({worker.node for worker in apart.workers}) == 2
    assert [worker.node for worker in together.workers] == [large_node] * 2
    assert (together.threads_per_worker, together.rows) == (1, apart.rows)
    assert together.model == apart.model


def test_workers_of_one_node_get_different_gpus(driver: TwoNodes, large_node: str) -> None:
    with shared_gang(GangShape(2, 1.0, 1)) as gang:
        devices = gang.run(os.getenv, [("CUDA_VISIBLE_DEVICES",)] * 2)
    assert Counter(devices) == {"0": 1, "1": 1}


def test_more_workers_than_the_cpus_or_gpus_allow_are_refused(driver: TwoNodes, large_node: str, rows: Path) -> None:
    for scaling, said in (
        (
            {"num_workers": 7, "use_gpu": False},
            r"num_workers=7 of 1 CPU for each worker .* room for only 6 .*large: 4 CPUs",
        ),
        ({"num_workers": 3, "num_cpu_per_worker": 2, "use_gpu": False}, r"num_workers=3 of 2 CPUs .* room for only 2 "),
        ({"num_workers": 3, "use_gpu": True}, r"num_workers=3 of 1 CPU and 1 GPU .* room for only 2 "),
    ):
        with pytest.raises(CapacityError, match=said):
            train(request(rows, scaling_config=scaling))
