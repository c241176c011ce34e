"""Trainings on real GPUs: `make test-gpu`. Each test is skipped, with the reason, where it cannot run."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pandas as pd
import pytest

from shoal.distributors import distributed
from shoal.distributors.lightgbm import LightGBMEstimator, LightGBMScalingConfig
from shoal.distributors.pytorch import TorchDistributor
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
from shoal.pool.backends.local.gpus import Gpu
from shoal.training.lightgbm.params import gpu_problem
from shoal.training.xgboost.params import has_cuda, without_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.ray]

COLUMNS = [f"x{number}" for number in range(20)]
ROUNDS = 200


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    random = np.random.default_rng(0)
    rows = pd.DataFrame(random.random((500_000, len(COLUMNS)), np.float32), columns=COLUMNS)
    return rows.assign(y=rows["x0"] * 2 + rows["x1"] * rows["x2"])


def test_xgboost_trains_on_all_gpus_without_being_told(
    alone: list[Gpu], frame: pd.DataFrame, capfd: pytest.CaptureFixture[str], record_property: Any
) -> None:
    import xgboost

    if not has_cuda():
        pytest.skip(without_cuda())
    params = {"max_depth": 8}
    estimator = XGBEstimator(ROUNDS, "reg:squarederror", params)
    estimator.fit(frame, COLUMNS, "y", eval_set=frame)
    assert "training on the nodes' GPUs" in capfd.readouterr().out
    result = estimator.get_result()
    assert result.num_workers == len(alone)
    began = time.perf_counter()
    matrix = xgboost.QuantileDMatrix(frame[COLUMNS], frame["y"])
    evaluated: dict[str, Any] = {}
    plain = {"objective": "reg:squarederror", "device": "cuda", **params}
    xgboost.train(plain, matrix, ROUNDS, [(matrix, "eval")], evals_result=evaluated, verbose_eval=False)
    ratio = result.seconds / (time.perf_counter() - began)
    record_property("seconds against the plain script", ratio)
    print(f"{result.seconds:.1f} s on {len(alone)} GPUs, {ratio:.2f} times the plain script on one")
    ours = estimator.get_eval_results()["eval"]["rmse"][-1]
    assert ours == pytest.approx(evaluated["eval"]["rmse"][-1], rel=0.1)


def test_two_trainings_on_a_gpu_give_the_same_bytes(alone: list[Gpu], frame: pd.DataFrame) -> None:
    if not has_cuda():
        pytest.skip(without_cuda())
    estimator = XGBEstimator(20, scaling_config=XGBScalingConfig(num_workers=1, use_gpu=True))
    first, second = (bytes(estimator.fit(frame, COLUMNS, "y").save_raw("ubj")) for _ in range(2))
    assert first == second


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


def test_ddp_with_nccl_on_all_gpus(alone: list[Gpu]) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} cannot use CUDA here: install a wheel of torch with CUDA")
    average = (len(alone) - 1) / 2
    gradient, _ = TorchDistributor(len(alone), local_mode=True, use_gpu=True).run(average_of_ranks)
    assert gradient == average
    results = distributed()(average_of_ranks).distributed()
    assert [each for each, _ in results] == [average] * len(alone)
    assert sorted(f"GPU-{uuid}" for _, uuid in results) == sorted(gpu.id for gpu in alone)
