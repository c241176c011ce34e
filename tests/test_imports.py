"""What a DAG file imports costs it nothing: no heavy library is loaded by any public module."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("ray", "torch", "xgboost", "lightgbm", "pandas", "pyarrow", "mlflow", "sklearn")


@pytest.mark.parametrize(
    "statement",
    [
        "from shoal import scale_cluster, get_nodes, describe_pool, alter_pool, ComputePool, RunConfig, PoolSpec",
        "from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig",
        "from shoal.distributors.lightgbm import LightGBMEstimator, LightGBMScalingConfig",
        "from shoal.distributors.pytorch import PyTorchDistributor, TorchDistributor, get_context, run_local",
        "from shoal.distributors import distributed, ray_launch, runtime",
        "from shoal.data import DataConnector, ShardedDataConnector, RayDataIngester, ArrowIngester",
        "from shoal.jobs import JobSpec, submit, attach, cancel",
        "import shoal.cli",
    ],
)
@pytest.mark.processes
def test_no_heavy_import(statement):
    check = f"import sys; {statement}; print([name for name in {HEAVY} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_every_public_name_is_there():
    import shoal

    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'scale_clutser'"):
        shoal.scale_clutser  # noqa: B018
