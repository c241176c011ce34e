"""Trainings on real GPUs: `make test-gpu`. Each test is skipped, with the reason, where it cannot run.

With the two examples of `test_guides.py`, the cases are:

| part | cases |
|---|---|
| XGBoost | all GPUs by default; same bytes twice; external memory; lost worker; continued model, on CPUs too; search |
| LightGBM | CUDA; OpenCL |
| PyTorch | NCCL with DDP; FSDP2; lost worker; out of memory; two GPUs for a process; usage |
| pools | GPUs by UUID; CUDA_VISIBLE_DEVICES; none without `gpus_per_node`; two pools; a killed node; MIG |
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from shoal import ComputePool, RunConfig
from shoal.distributors import distributed
from shoal.distributors.lightgbm import LightGBMEstimator, LightGBMScalingConfig
from shoal.distributors.pytorch import (
    PyTorchDistributor,
    PyTorchScalingConfig,
    Response,
    TorchDistributor,
    WorkerResourceConfig,
    get_context,
)
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
from shoal.errors import ScaleError, TrainingError
from shoal.jobs import attach, list_jobs
from shoal.os_processes import ProcessId
from shoal.pool.backends.local.gpus import CUDA_DEVICES, Gpu
from shoal.training.lightgbm.params import gpu_problem
from shoal.training.xgboost.params import has_cuda, without_cuda
from shoal.tune import search
from tests.support.pool_processes import node_rows
from tests.support.waiting import wait_until
from tests.training.pytorch import functions

pytestmark = [pytest.mark.gpu, pytest.mark.ray]

COLUMNS = [f"x{number}" for number in range(20)]
ROUNDS = 200


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    random = np.random.default_rng(0)
    rows = pd.DataFrame(random.random((500_000, len(COLUMNS)), np.float32), columns=COLUMNS)
    return rows.assign(y=rows["x0"] * 2 + rows["x1"] * rows["x2"])


@pytest.fixture
def xgboost_gpus(alone: list[Gpu]) -> list[Gpu]:
    """The GPUs, if XGBoost can train on them."""
    if not has_cuda():
        pytest.skip(without_cuda())
    return alone


@pytest.fixture
def torch_gpus(alone: list[Gpu]) -> list[Gpu]:
    """The GPUs, if torch can use them."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} cannot use CUDA here: install a wheel of torch with CUDA")
    return alone


@pytest.fixture
def two_gpus(torch_gpus: list[Gpu]) -> list[Gpu]:
    """The first two GPUs."""
    if len(torch_gpus) < 2:
        pytest.skip("this machine has only one GPU that this process can use")
    return torch_gpus[:2]


def rmse(estimator: Any) -> float:
    """The last RMSE on the eval set."""
    value: float = estimator.get_eval_results()["eval"]["rmse"][-1]
    return value


def test_xgboost_trains_on_all_gpus_without_being_told(
    xgboost_gpus: list[Gpu], frame: pd.DataFrame, capfd: pytest.CaptureFixture[str], record_property: Any
) -> None:
    import xgboost

    params = {"max_depth": 8}
    estimator = XGBEstimator(ROUNDS, "reg:squarederror", params)
    estimator.fit(frame, COLUMNS, "y", eval_set=frame)
    assert "training on the nodes' GPUs" in capfd.readouterr().out
    result = estimator.get_result()
    assert result.num_workers == len(xgboost_gpus)
    began = time.perf_counter()
    matrix = xgboost.QuantileDMatrix(frame[COLUMNS], frame["y"])
    evaluated: dict[str, Any] = {}
    plain = {"objective": "reg:squarederror", "device": "cuda", **params}
    xgboost.train(plain, matrix, ROUNDS, [(matrix, "eval")], evals_result=evaluated, verbose_eval=False)
    ratio = result.seconds / (time.perf_counter() - began)
    record_property("seconds against the plain script", ratio)
    print(f"{result.seconds:.1f} s on {len(xgboost_gpus)} GPUs, {ratio:.2f} times the plain script on one")
    assert rmse(estimator) == pytest.approx(evaluated["eval"]["rmse"][-1], rel=0.1)


def test_two_trainings_on_a_gpu_give_the_same_bytes(xgboost_gpus: list[Gpu], frame: pd.DataFrame) -> None:
    estimator = XGBEstimator(20, scaling_config=XGBScalingConfig(num_workers=1, use_gpu=True))
    first, second = (bytes(estimator.fit(frame, COLUMNS, "y").save_raw("ubj")) for _ in range(2))
    assert first == second


def test_rows_on_disk_give_as_good_a_model_as_rows_in_the_memory_of_the_gpu(
    xgboost_gpus: list[Gpu], frame: pd.DataFrame
) -> None:
    losses = {}
    for external_memory in (False, True):
        scaling = XGBScalingConfig(num_workers=1, use_gpu=True)
        estimator = XGBEstimator(20, "reg:squarederror", scaling_config=scaling)
        estimator.fit(frame, COLUMNS, "y", eval_set=frame, external_memory=external_memory)
        losses[external_memory] = rmse(estimator)
        assert [each.external_memory for each in estimator.get_result().workers] == [external_memory]
    assert losses[True] == pytest.approx(losses[False], rel=0.05)


class DiesOnce:
    """XGBoost's callback: the first worker that comes to round 12 is killed."""

    def __new__(cls, flag: Path) -> Any:
        from xgboost.callback import TrainingCallback

        class Callback(TrainingCallback):
            def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
                if epoch == 12:
                    try:
                        flag.touch(exist_ok=False)
                    except FileExistsError:
                        return False
                    os.kill(os.getpid(), signal.SIGKILL)
                return False

        return Callback()


def test_xgboost_goes_on_from_its_checkpoint_after_a_worker_was_killed(
    xgboost_gpus: list[Gpu], frame: pd.DataFrame, tmp_path: Path
) -> None:
    config = RunConfig(max_restarts=1, checkpoint_every=5)
    scaling = XGBScalingConfig(use_gpu=True)
    estimator = XGBEstimator(30, callbacks=[DiesOnce(tmp_path / "died")], scaling_config=scaling, run_config=config)
    assert estimator.fit(frame, COLUMNS, "y").num_boosted_rounds() == 30
    assert estimator.get_result().restarts == 1


def test_a_model_of_a_gpu_is_continued_there_and_predicts_the_same_on_cpus(
    xgboost_gpus: list[Gpu], frame: pd.DataFrame
) -> None:
    scaling = XGBScalingConfig(num_workers=1, use_gpu=True)
    first = XGBEstimator(10, scaling_config=scaling).fit(frame, COLUMNS, "y")
    booster = XGBEstimator(10, scaling_config=scaling).fit(frame, COLUMNS, "y", init_model=first)
    assert booster.num_boosted_rounds() == 20
    booster.set_param({"device": "cuda"})
    there = booster.inplace_predict(frame[COLUMNS])
    booster.set_param({"device": "cpu"})
    np.testing.assert_allclose(booster.inplace_predict(frame[COLUMNS]), there, rtol=1e-4, atol=1e-5)


def test_a_search_trains_its_trials_on_a_gpu(xgboost_gpus: list[Gpu], frame: pd.DataFrame) -> None:
    pytest.importorskip("optuna")
    space = {"max_depth": [2, 6]}
    found = search(
        XGBEstimator(10), space, frame, input_cols=COLUMNS, label_col="y", trials=2, sampler="grid", use_gpu=True
    )
    assert found.best_params == {"max_depth": 6}


@pytest.mark.parametrize("device", ["cuda", "gpu"])
def test_lightgbm_trains_on_a_gpu_if_its_build_allows(alone: list[Gpu], frame: pd.DataFrame, device: str) -> None:
    if (problem := gpu_problem(device)) is not None:
        pytest.skip(problem)
    scaling = LightGBMScalingConfig(num_workers=1, use_gpu=True)
    estimator = LightGBMEstimator(20, "regression", {"device": device, "metric": "rmse"}, scaling)
    estimator.fit(frame, COLUMNS, "y", eval_set=frame)
    losses = estimator.get_eval_results()["eval"]["rmse"]
    assert losses[-1] < losses[0] / 2


def average_of_ranks() -> tuple[float, str]:
    import os

    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False).to(device), device_ids=[device.index])
    rank = torch.distributed.get_rank()
    model(torch.full((1, 1), float(rank), device=device)).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    torch.distributed.destroy_process_group()
    return float(gradient), str(torch.cuda.get_device_properties(device).uuid)


def test_ddp_with_nccl_on_all_gpus(torch_gpus: list[Gpu]) -> None:
    average = (len(torch_gpus) - 1) / 2
    gradient, _ = TorchDistributor(len(torch_gpus), local_mode=True, use_gpu=True).run(average_of_ranks)
    assert gradient == average
    results = distributed()(average_of_ranks).distributed()
    assert [each for each, _ in results] == [average] * len(torch_gpus)
    assert sorted(f"GPU-{uuid}" for _, uuid in results) == sorted(gpu.id for gpu in torch_gpus)


def run_on(gpus: list[Gpu], function: Any, *args: Any, config: RunConfig | None = None, **kwargs: Any) -> Response:
    """Run a function in a rank for each GPU."""
    each = WorkerResourceConfig(num_cpus=0, num_gpus=1)
    scaling = PyTorchScalingConfig(num_workers_per_node=len(gpus), resource_requirements_per_worker=each)
    return PyTorchDistributor(function, scaling, config).run(*args, **kwargs)


def test_fsdp2_shards_over_all_gpus(torch_gpus: list[Gpu]) -> None:
    results = run_on(torch_gpus, functions.shard_fully, "nccl").get_results()
    assert results[0]["losses"][-1] < 0.5 * results[0]["losses"][0]
    assert sum(each["local"] for each in results) == 4 * 16 + 16 + 16 + 1
    assert results[0]["whole"]["0.weight"] == (16, 4)


def test_ddp_goes_on_from_its_checkpoint_after_a_rank_was_killed(torch_gpus: list[Gpu], tmp_path: Path) -> None:
    plain = run_on(torch_gpus, functions.train, 8, 64, backend="nccl").get_results()[0]
    run = run_on(
        torch_gpus, functions.train, 8, 64, backend="nccl", deed="kill", at=4, folder=str(tmp_path),
        config=RunConfig(max_restarts=1),
    )  # fmt: skip
    assert run.result.restarts == 1
    np.testing.assert_allclose(run.get_results()[0], plain, rtol=1e-4)


def allocate(share: float) -> str:
    """Use this share of the GPU's memory, compute for a while, and return the worker's default backend."""
    import torch

    _, total = torch.cuda.mem_get_info()
    rows = torch.ones(int(total * share) // 4, device="cuda")
    began = time.monotonic()
    while time.monotonic() - began < 5:
        rows.mul_(1.0)
        torch.cuda.synchronize()
    return get_context().get_default_backend()


def test_a_rank_without_memory_says_so_and_leaves_the_gpu_to_the_next(torch_gpus: list[Gpu]) -> None:
    with pytest.raises(TrainingError, match="CUDA out of memory"):
        run_on(torch_gpus[:1], allocate, 2.0)
    assert run_on(torch_gpus[:1], allocate, 0.5).get_results() == ["nccl"]


def test_the_usage_of_a_rank_contains_its_gpu(torch_gpus: list[Gpu]) -> None:
    run_on(torch_gpus[:1], allocate, 0.1)
    [usage] = attach(list_jobs()[0].job_id).wait().peak_usage_per_worker
    assert usage["gpu_0_utilization_percentage"] > 0
    if Path("/.dockerenv").exists() and "gpu_0_memory_usage_megabytes" not in usage:
        pytest.skip("NVML has other process ids than this container, so the memory of a worker is not known")
    assert usage["gpu_0_memory_usage_megabytes"] > 1000


def uuids() -> tuple[str, list[str]]:
    """This process's CUDA_VISIBLE_DEVICES, and the GPUs that CUDA shows it, after a computation on each."""
    import torch

    numbers = range(torch.cuda.device_count())
    assert all(float(torch.ones(2, device=f"cuda:{number}").sum()) == 2 for number in numbers)
    properties = [torch.cuda.get_device_properties(number) for number in numbers]
    return os.environ.get(CUDA_DEVICES, ""), [f"GPU-{each.uuid}" for each in properties]


def seen_on(pool: ComputePool, gpus: int) -> list[tuple[str, list[str]]]:
    """`uuids` in a worker for each GPU, or without GPUs in one."""
    config = RunConfig(pool_name=pool.name)
    return distributed(gpus=gpus, num_workers=gpus or 1, remote=True, run_config=config)(uuids).distributed()


def test_a_process_sees_the_gpus_of_all_ranks_of_its_node(two_gpus: list[Gpu]) -> None:
    ranks = TorchDistributor(1, local_mode=False, gpus_per_process=2).run(uuids)
    assert ranks[1] == [gpu.id for gpu in two_gpus]


def test_nodes_of_two_pools_see_only_the_gpus_that_they_claimed(two_gpus: list[Gpu]) -> None:
    first = ComputePool("local://first?gpus_per_node=1").up()
    second = ComputePool("local://second?gpus_per_node=1").up()
    assert [seen_on(pool, 1) for pool in (first, second)] == [[(gpu.id, [gpu.id])] for gpu in two_gpus]
    first.down()
    second.down()


def test_a_pool_uses_the_gpus_that_its_starter_sees(torch_gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA_DEVICES, torch_gpus[-1].id)
    pool = ComputePool("local://limited?gpus_per_node=-1").up()
    assert seen_on(pool, 1) == [(torch_gpus[-1].id, [torch_gpus[-1].id])]
    pool.down()


def test_a_pool_without_gpus_sees_none(torch_gpus: list[Gpu]) -> None:
    pool = ComputePool("local://plain").up()
    assert seen_on(pool, 0) == [("", [])]
    pool.down()


def test_a_pool_gets_the_gpus_when_another_has_gone_down(torch_gpus: list[Gpu]) -> None:
    first = ComputePool("local://first?gpus_per_node=-1").up()
    second = ComputePool("local://second?gpus_per_node=1")
    with pytest.raises(ScaleError, match="by first-0"):
        second.up()
    first.down()
    assert seen_on(second.up(), 1)[0][1] == [torch_gpus[0].id]
    second.down()


def test_a_node_that_replaces_a_killed_one_gets_its_gpus_with_all_their_memory(torch_gpus: list[Gpu]) -> None:
    pool = ComputePool("local://killed?gpus_per_node=-1").up()
    supervisor = ProcessId.from_json(node_rows()[0].supervisor or {})
    supervisor.signal(signal.SIGKILL)
    wait_until(lambda: not supervisor.alive(), "its end")
    pool.scale(1)
    config = RunConfig(pool_name=pool.name)
    assert distributed(gpus=1, remote=True, run_config=config)(allocate).distributed(0.8) == ["nccl"]
    pool.down()


def test_each_node_has_a_part_of_a_divided_gpu(torch_gpus: list[Gpu]) -> None:
    parts = [gpu.id for gpu in torch_gpus if gpu.id.startswith("MIG-")][:2]
    if not parts:
        pytest.skip(
            "no GPU of this machine is divided: as root, `nvidia-smi -mig 1` and `nvidia-smi mig -cgi 19,19 -C`"
        )
    pool = ComputePool(f"local://parts?gpus_per_node=1&max_nodes={len(parts)}").up()
    pool.scale(len(parts))
    seen = sorted(seen_on(pool, len(parts)))
    assert [visible for visible, _ in seen] == sorted(parts)
    assert [len(gpus) for _, gpus in seen] == [1] * len(parts)
    pool.down()
