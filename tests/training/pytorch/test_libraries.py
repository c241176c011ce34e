"""Programs for libraries on top of PyTorch, as they are, in a real gang on two real Ray nodes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.two_node_cluster import TwoNodes
from tests.training.pytorch.test_run import distributor

pytestmark = [pytest.mark.ray, pytest.mark.long]

# Sums in another order, in float32: the two differed by 4e-7 of a loss, and by 1.2e-7 in a weight.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}

TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]

WITH_DEEPSPEED = [
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: it has no wheels, and compiles a part of itself for minutes",
    ),
    pytest.mark.timeout(1200),  # 280 s for the part that it compiles once, on a busy machine
]


def alone(script: Path, out: Path, launcher: list[str]) -> None:
    """Run a script in one process, without shoal."""
    subprocess.run([sys.executable, *launcher, script, "--out", out], check=True, timeout=900)


def assert_trained_alike(one: Path, two: Path, printed: str) -> None:
    """Compare what two processes have trained, with half of each batch, with what one process has trained."""
    for rank in (0, 1):
        assert f"[rank {rank}] process {rank} of 2, epoch 3" in printed
    first, second = (json.loads(path.read_text()) for path in (one, two))
    assert (first["rows"], second["rows"]) == ({"0": 4 * 256}, {"0": 4 * 128, "1": 4 * 128})
    assert len(first["losses"]) == 4 * 8
    assert first["losses"][-1] < 0.1 * first["losses"][0]
    np.testing.assert_allclose(second["losses"], first["losses"], **CLOSE)
    for together, apart in zip(second["weights"], first["weights"], strict=True):
        np.testing.assert_allclose(together, apart, **CLOSE)


@pytest.mark.parametrize(
    ("name", "launcher", "arguments"),
    [
        pytest.param("fabric", [], ["--devices", 1, "--num-nodes", 2], id="fabric"),
        pytest.param("accelerate", [], [], id="accelerate"),
        pytest.param("transformers", [], [], id="transformers"),
        pytest.param("deepspeed", TORCHRUN, [], id="deepspeed", marks=WITH_DEEPSPEED),
    ],
)
def test_a_librarys_script_trains_on_two_nodes_what_it_trains_alone(
    driver: TwoNodes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    launcher: list[str],
    arguments: list[Any],
) -> None:
    script = Path(__file__).with_name(f"{name}_script.py")
    alone(script, tmp_path / "one", launcher)
    capsys.readouterr()
    distributor(script, tmp_path).run(*arguments, "--out", tmp_path / "two")
    assert_trained_alike(tmp_path / "one", tmp_path / "two", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "launcher", "arguments"),
    [
        pytest.param("transformers", [], [], id="transformers"),
        pytest.param("deepspeed", TORCHRUN, ["--stage", "1"], id="deepspeed", marks=WITH_DEEPSPEED),
    ],
)
def test_a_librarys_function_trains_on_two_nodes_what_it_trains_alone(
    driver: TwoNodes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    launcher: list[str],
    arguments: list[str],
) -> None:
    module = importlib.import_module(f"tests.training.pytorch.{name}_script")
    alone(Path(module.__file__), tmp_path / "one", launcher)
    capsys.readouterr()
    distributor(module.main, tmp_path).run([*arguments, "--out", str(tmp_path / "two")])
    assert_trained_alike(tmp_path / "one", tmp_path / "two", capsys.readouterr().out)
