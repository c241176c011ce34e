"""Scripts of libraries on top of PyTorch, as they are, in a real gang on two real Ray nodes."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        pytest.param("fabric_script.py", ["--devices", 1, "--num-nodes", 2], id="fabric"),
        pytest.param("accelerate_script.py", [], id="accelerate"),
    ],
)
def test_a_librarys_script_trains_on_two_nodes_what_it_trains_alone(
    driver: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, arguments: list[Any]
) -> None:
    file = Path(__file__).with_name(script)
    subprocess.run([sys.executable, file, "--out", tmp_path / "one"], check=True, timeout=120)
    capsys.readouterr()
    distributor(file, tmp_path).run(*arguments, "--out", tmp_path / "two")
    printed = capsys.readouterr().out
    for rank in (0, 1):
        assert f"[rank {rank}] process {rank} of 2, epoch 3" in printed
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one", "two"))
    assert (one["rows"], two["rows"]) == ({"0": 4 * 256}, {"0": 4 * 128, "1": 4 * 128})
    assert len(one["losses"]) == 4 * 8
    assert one["losses"][-1] < 0.1 * one["losses"][0]
    np.testing.assert_allclose(two["losses"], one["losses"], **CLOSE)
    for together, alone in zip(two["weights"], one["weights"], strict=True):
        np.testing.assert_allclose(together, alone, **CLOSE)
