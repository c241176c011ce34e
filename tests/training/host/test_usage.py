"""The usage of a worker's process: CPU and memory by psutil, GPUs by a fake of NVML."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.jobs.driver.attempt_metrics import MlflowFeed
from shoal.kinds.function.driver import _Usage
from shoal.training.host.usage import Collectors, Meter, NodeMetrics, measured
from tests.support.gpu_machine import Machine


def test_a_short_block_is_measured_once_and_its_error_goes_on() -> None:
    reported: list[dict[str, float]] = []

    def work() -> None:
        # The kernel counts CPU time in steps of 10 ms.
        ends = time.process_time() + 0.1
        while time.process_time() < ends:
            pass
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), measured((), reported.append):
        work()
    [values] = reported
    assert values.keys() == {"cpu_utilization_percentage", "memory_usage_megabytes"}
    assert values["cpu_utilization_percentage"] > 0
    assert values["memory_usage_megabytes"] > 10


def test_the_workers_gpus_are_numbered_from_0_and_only_its_processes_count(
    gpu_machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_machine(2, pids={0: [os.getpid(), -1], 1: [os.getpid()]}, parts={1: ["MIG-b"]})
    import pynvml

    reported: list[dict[str, float]] = []
    with measured(("0", "MIG-b"), reported.append):
        assert pynvml._opened == 1
    assert pynvml._opened == 0
    [values] = reported
    assert {name: value for name, value in values.items() if name.startswith("gpu")} == {
        "gpu_0_utilization_percentage": 70.0,
        "gpu_0_memory_usage_megabytes": 1073.7,
        "gpu_1_memory_usage_megabytes": 1073.7,
    }
    assert "gpu_0_utilization_percentage" not in Meter(("GPU-of-another-host",)).measure()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "gpu_0_utilization_percentage" not in Meter(("0",)).measure()


class _Server:
    """Stands for the run: MLflow's server is away when it gets the usage of workers."""

    def __init__(self) -> None:
        self.logged: list[Any] = []

    def log_metrics(self, metrics: list[tuple[str, float, int, float]]) -> None:
        self.logged += metrics
        if any(name.startswith("system/") for name, *_ in metrics):
            raise ConnectionError


def test_peaks_are_the_highest_values_of_each_worker_and_no_training_fails_because_of_them() -> None:
    server = _Server()
    feed = MlflowFeed(server)  # type: ignore[arg-type]
    feed.close()
    usage = _Usage(None, feed)
    for memory in (1.0, 3.0, 2.0):
        usage.log(1, {"memory": memory})
    feed.flush()
    assert usage.peaks(2) == ({}, {"memory": 3.0})
    metrics = [(name, value, step) for name, value, step, _ in server.logged]
    assert metrics == [("system/worker-1/memory", value, step) for step, value in enumerate((1.0, 3.0, 2.0))]


def test_a_node_is_measured_with_mlflows_names() -> None:
    values = Collectors().measure()
    assert values.keys() >= {"cpu_utilization_percentage", "system_memory_usage_megabytes", "disk_usage_percentage"}
    assert values["system_memory_usage_megabytes"] > 10


def test_node_metrics_end_without_an_error_after_ray_was_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def killed(actor: object) -> None:
        raise RuntimeError("Ray has not been started yet")

    actor_class = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=SimpleNamespace))
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _: actor_class)
    monkeypatch.setattr(ray, "kill", killed)
    monkeypatch.setattr(NodeMetrics, "_collect", lambda self: None)

    NodeMetrics({"a" * 56: "node-a", "b" * 56: "node-b"}, lambda name, values: None).close()
