"""The built wheel in new environments, with the oldest and the newest Airflow, without Ray and data libraries."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib

import pytest

from tests.pool.backends.foreign import ForeignCluster
from tests.support.guides import MIGRATED, ROOT
from tests.support.two_node_cluster import COLUMNS

pytestmark = [
    pytest.mark.long,
    pytest.mark.ray,
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed, which makes the environments"),
    pytest.mark.timeout(900),
]

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OLDEST = re.search(r"apache-airflow>=([\d.]+)", " ".join(EXTRAS["airflow"]))[1]

DAG = """
from airflow.sdk import dag, task
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.sensors import NodesSensor

@dag(schedule=None)
def retrain():
    @task
    def prepare() -> dict:
        return JOB

    spec = prepare()
    with pool_for_run(size=2, pool_name=POOL, is_async=True) as pool:
        nodes = NodesSensor(task_id="nodes", expected_nodes=2, pool_name=POOL)
        nodes >> DistributedTrainOperator(task_id="train", spec=spec, pool_name=POOL)
    spec >> pool.setup

found = retrain()
if __name__ == "__main__":
    print("the run ended as", found.test().state)
"""

PROVIDER = """
from importlib.util import find_spec
from airflow import __version__
from airflow.api_fastapi.app import create_app
from airflow.dag_processing.dagbag import DagBag
from airflow.providers_manager import ProvidersManager
from airflow.serialization.serialized_objects import DagSerialization

bag = DagBag(dag_folder="dags", bundle_name="dags")
for dag in bag.dags.values():
    DagSerialization.from_dict(DagSerialization.to_dict(dag))
create_app()
assert "compute_pool" in ProvidersManager().hooks
print(__version__, list(bag.dags), [name for name in ("numpy", "pandas", "pyarrow", "ray") if find_spec(name)])
"""


PAGE = """
from airflow.api_fastapi.app import create_app, get_auth_manager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from fastapi.testclient import TestClient

client = TestClient(create_app())
for role in (None, "viewer", "op"):
    headers = {"accept": "text/html"}
    if role:
        user = SimpleAuthManagerUser(username="anna", role=role)
        headers["authorization"] = f"Bearer {get_auth_manager().generate_jwt(user)}"
    answer = client.get("/shoal/", headers=headers)
    print("page:", role, answer.status_code, 'data-action="sweep"' in answer.text)
"""
"""The page in Airflow, for a stranger and for two roles: the status, and whether the user may act."""


@pytest.mark.parametrize("version", [OLDEST, None], ids=["oldest", "newest"])
def test_a_dag_trains_on_a_remote_pool(version, in_new_environment, tmp_path, rows):
    command = in_new_environment(
        sys.executable, "airflow,ui", f"apache-airflow=={version}" if version else "apache-airflow"
    )
    job = {
        "dataset": {"paths": [str(rows)]},
        "input_cols": COLUMNS,
        "label_col": "y",
        "n_estimators": 3,
        "tracking": None,
        "run_config": {"artifact_location": str(tmp_path / "artifacts")},
    }
    file = tmp_path / "dags" / "retrain.py"
    file.parent.mkdir()
    # shoal is installed on the cluster's nodes, and the store is in their environment, as the guide asks.
    home = {"SHOAL_HOME": os.environ["SHOAL_HOME"], "SHOAL_PYTHON": sys.executable}
    with ForeignCluster("static", workers=1, environment=home) as cluster:
        uri = cluster.uri(max_nodes=2, shared_folders=f"{rows.parent},{tmp_path}")
        file.write_text(f"POOL, JOB = {uri!r}, {job}\n{DAG}")
        assert command("python", "-c", PROVIDER).splitlines()[-1].endswith(" ['retrain'] []")
        assert command("shoal", "check-dags", "dags") == "1 DAG file, no problems\n"
        page = tmp_path / "page.py"
        page.write_text(PAGE)
        said = command("python", "-c", MIGRATED, file, page)
        assert "the run ended as success" in said, said
        assert "rows" in said
    shown = [line for line in said.splitlines() if line.startswith("page: ")]
    assert shown == ["page: None 401 False", "page: viewer 200 False", "page: op 200 True"]
