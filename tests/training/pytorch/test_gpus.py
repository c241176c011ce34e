"""Ranks on a pool with GPUs, on a machine that NVML's fake makes up, with gloo in place of NCCL."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal import RunConfig
from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig, WorkerResourceConfig, get_context
from shoal.jobs import attach, list_jobs
from tests.support.gloo_for_nccl import as_on_gpus
from tests.support.gpu_machine import Machine
from tests.training.pytorch import functions

pytestmark = pytest.mark.ray


def train_with_default_backend() -> tuple[str, str, list[float]]:
    """The backend, the GPUs that this rank sees, and the losses of DDP."""
    backend = get_context().get_default_backend()
    return backend, os.environ["CUDA_VISIBLE_DEVICES"], functions.train(3, 16, backend=backend)


def test_each_rank_has_a_claimed_gpu_and_joins_with_nccl(
    gpu_machine: Machine, fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.distributors.call.is_connected", lambda: False)
    gpus = gpu_machine(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    scaling = PyTorchScalingConfig(
        num_workers_per_node=2, resource_requirements_per_worker=WorkerResourceConfig(num_cpus=0, num_gpus=1)
    )
    run = PyTorchDistributor(as_on_gpus, scaling, RunConfig(tracking=None)).run(train_with_default_backend)
    first, second = run.get_results()
    assert first == second
    assert first[:2] == ("nccl", f"{gpus[2]},{gpus[0]}")
    usages = attach(list_jobs()[0].job_id).wait().peak_usage_per_worker
    assert [usage["gpu_0_utilization_percentage"] for usage in usages] == [70.0, 70.0]
