"""What a DAG file imports costs it nothing: no heavy library is loaded by any public module."""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from shoal.lazy_imports import LazyLibrary

HEAVY = ("ray", "torch", "xgboost", "lightgbm", "pandas", "pyarrow", "mlflow", "sklearn", "numpy", "airflow", "httpx")


LIGHT = [
    "from shoal.data import *; DataConnector.from_parquet('x').to_spec()",
    "import shoal.cli",
    "from typer.testing import CliRunner; assert CliRunner().invoke(shoal.cli.app, ['--help']).exit_code == 0",
    "from shoal import scale_cluster, get_nodes, describe_pool, alter_pool, ComputePool, RunConfig, PoolSpec",
    "from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig",
    "XGBEstimator(10, 'reg:squarederror', {'eta': 1}, XGBScalingConfig(use_gpu=True), run_config=RunConfig(seed=1))",
    "from shoal.distributors.lightgbm import LightGBMEstimator, LightGBMScalingConfig",
    "LightGBMEstimator(10, 'regression', {'num_leaves': 3}, LightGBMScalingConfig(use_gpu=True))",
    "from shoal.distributors.pytorch import PyTorchDistributor, TorchDistributor, get_context, run_local",
    "from shoal.distributors import distributed, ray_launch, runtime",
    "from shoal.jobs import JobSpec, submit, attach, cancel",
    "from shoal import many; many.run, many.train, many.predict, many.get_context, many.PartitionResults",
    "import shoal.jobs.driver.main",
]
"""What a user's file does, one after the other in one process: what one of them loads stays, and is told with it."""

ALSO_HEAVY = {LIGHT[0]: ("sqlalchemy",), LIGHT[1]: ("sqlalchemy",)}
"""What these do not load either. They come first, because the others load it."""


@pytest.mark.processes
def test_no_heavy_import():
    code = ["import sys"]
    for light in LIGHT:
        code += [light, f"print([name for name in {HEAVY + ALSO_HEAVY.get(light, ())} if name in sys.modules])"]
    ran = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, check=True)
    assert dict(zip(LIGHT, ran.stdout.splitlines(), strict=True)) == dict.fromkeys(LIGHT, "[]")


@pytest.mark.processes
def test_a_dag_file_does_not_import_the_store_or_the_clients_of_pools(tmp_path):
    code = "import sys, shoal.airflow.pool_for_run, shoal.airflow.operators, shoal.airflow.sensors; print(*sys.modules)"
    environment = {**os.environ, "AIRFLOW_HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert {"shoal.state", "shoal.pool.api", "shoal.data.connector"} & {*ran.stdout.split()} == set()


@pytest.mark.parametrize(
    "package", ["shoal", "shoal.data", "shoal.distributors", "shoal.jobs", "shoal.models", "shoal.many"]
)
def test_the_names_that_tools_see_are_those_that_are_imported_when_used(package):
    """Type checkers read the imports as literals. Without a literal `__all__`, the names are derived from them."""
    module = import_module(package)
    block = next(node for node in ast.parse(Path(module.__file__).read_text()).body if isinstance(node, ast.If))
    imported = {(name.name, statement.module) for statement in block.body for name in statement.names}
    assert {name for name, _ in imported} | ({"__version__"} & {*module.__all__}) == {*module.__all__}
    for name, home in imported:
        assert getattr(module, name) is getattr(import_module(home), name)


def test_a_lazy_library_is_the_module_from_the_first_use_of_a_name(tmp_path, monkeypatch):
    (tmp_path / "used_late.py").write_text("def answer(): return 1")
    monkeypatch.syspath_prepend(tmp_path)
    library, copy = (pickle.loads(pickle.dumps(LazyLibrary("used_late"))) for _ in range(2))
    assert "used_late" not in sys.modules

    assert (library.answer(), copy.answer()) == (1, 1)
    module = sys.modules.pop("used_late")
    monkeypatch.setattr(module, "answer", lambda: 2)
    assert (library.answer(), copy.answer(), hasattr(library, "other")) == (2, 2, False)
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_installed'"):
        LazyLibrary("not_installed").answer  # noqa: B018


def test_every_public_name_is_there():
    import shoal

    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'scale_clutser'"):
        shoal.scale_clutser  # noqa: B018
