"""The guides' examples that need a GPU: `make test-gpu`. Each is skipped, with the reason, where it cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.pool.backends.local.gpus import Gpu
from shoal.training.xgboost.params import has_cuda, without_cuda
from tests.support.guides import examples, run

pytestmark = [pytest.mark.gpu, pytest.mark.ray]

FOUND = examples(of_gpus=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FOUND)
def test_an_example_runs_on_the_gpus_of_its_reader(
    name: str, gpus: list[Gpu], flights: Path, fresh_home: Path, tmp_path: Path
) -> None:
    if "XGBEstimator" in FOUND[name] and not has_cuda():
        pytest.skip(without_cuda())
    if "import torch" in FOUND[name]:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip(f"torch {torch.__version__} cannot use CUDA here: install a wheel of torch with CUDA")
    (tmp_path / "flights").symlink_to(flights)
    (tmp_path / "example.py").write_text(FOUND[name])
    run(tmp_path, "example.py")
