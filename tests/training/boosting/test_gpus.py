"""Whether a boosting training uses GPUs, and the check that its library can use them. No GPU is needed here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import xgboost

from shoal.errors import CapacityError, InvalidArgumentError
from shoal.training.boosting import engine
from shoal.training.boosting.request import TrainRequest
from shoal.training.cluster import Node
from shoal.training.lightgbm.library import LightGBM
from shoal.training.xgboost.library import XGBoost
from tests.support.two_node_cluster import COLUMNS, TwoNodes

LIBRARIES = {"xgboost": XGBoost(), "lightgbm": LightGBM()}


def request(rows: Path = Path("rows.parquet"), **changes: Any) -> TrainRequest:
    values = {"dataset": {"paths": (str(rows),)}, "input_cols": tuple(COLUMNS), "label_col": "y", "n_estimators": 2}
    return TrainRequest(**{**values, **changes})


def test_a_gpu_chosen_by_number_is_refused() -> None:
    assert XGBoost().device_of({"device": "cuda"}) == "cuda"
    with pytest.raises(InvalidArgumentError, match="cuda:1"):
        XGBoost().device_of({"device": "cuda:1"})


@pytest.mark.parametrize(
    ("framework", "has_cuda", "gpus", "uses_them", "said"),
    [
        ("xgboost", True, (1, 2), True, "training on the nodes' GPUs"),
        ("xgboost", True, (1, 0), False, ""),
        ("xgboost", False, (1, 1), False, r"training on CPUs, .* xgboost-cpu"),
        ("lightgbm", True, (1, 1), False, "training on CPUs, .* only with use_gpu=True"),
    ],
)
def test_gpus_are_used_by_default_where_hardware_and_build_allow(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    framework: str,
    has_cuda: bool,
    gpus: tuple[int, ...],
    uses_them: bool,
    said: str,
) -> None:
    nodes = [Node(name=f"n{i}", cpus=1, gpus=each) for i, each in enumerate(gpus)]
    monkeypatch.setattr(engine.cluster, "active_nodes", lambda: nodes)
    monkeypatch.setattr(xgboost, "build_info", lambda: {"USE_CUDA": has_cuda})

    assert engine._uses_gpus(request(framework=framework), LIBRARIES[framework], bool) is uses_them
    assert re.fullmatch(said + ".*\n?", capsys.readouterr().out)
    # The job's first attempt decides; a spec that decides itself is not recorded.
    kept = engine._uses_gpus(request(framework=framework), LIBRARIES[framework], lambda choice: not choice)
    assert kept is not uses_them
    for explicit in (True, False):
        asked = request(framework=framework, scaling_config={"use_gpu": explicit})
        assert engine._uses_gpus(asked, LIBRARIES[framework], pytest.fail) is explicit


def test_xgboost_says_which_wheel_or_that_it_finds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgboost, "build_info", lambda: {"USE_CUDA": False})
    assert 'pip install "shoal[xgboost-gpu]"' in str(XGBoost().gpu_problem({}))
    monkeypatch.setattr(xgboost, "build_info", lambda: {"USE_CUDA": True})
    configured = '{"learner": {"generic_param": {"device": "%s"}}}'
    monkeypatch.setattr(xgboost.Booster, "save_config", lambda _: configured % "cpu")
    assert "finds no NVIDIA GPU" in str(XGBoost().gpu_problem({}))
    monkeypatch.setattr(xgboost.Booster, "save_config", lambda _: configured % "cuda:0")
    assert XGBoost().gpu_problem({}) is None


@pytest.mark.ray
def test_a_gpu_that_the_library_cannot_use_is_refused_before_any_row_is_read(driver: TwoNodes, rows: Path) -> None:
    """A node may claim more GPUs than its machine has, and the library may be built without CUDA."""
    pretender = driver.cluster.add_node(
        num_cpus=1, num_gpus=1, node_name="c", node_ip_address="127.0.0.1", object_store_memory=80 * 2**20
    )
    try:
        for framework, params, said in (
            ("xgboost", {}, r'GPU of node c: .* has no CUDA.*pip install "shoal\[xgboost-gpu\]"'),
            ("lightgbm", {}, r"GPU of node c: .*CUDA Tree Learner was not enabled.*conda-forge"),
            ("lightgbm", {"device": "gpu"}, r"GPU of node c: .*No OpenCL device found"),
        ):
            scaling = {"use_gpu": True, "num_workers": 1}
            with pytest.raises(CapacityError, match=said):
                engine.train(request(rows, framework=framework, params=params, scaling_config=scaling))
    finally:
        driver.cluster.remove_node(pretender)
