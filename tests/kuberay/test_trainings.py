"""Trainings on real Ray nodes under the real operator: the example's DAG and flow, and faults while one trains."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.pool.api import ComputePool
from tests.kuberay.accounts import make_account, smallest_role
from tests.kuberay.conftest import Cluster
from tests.kuberay.control_plane import ControlPlane
from tests.support import ROOT, postgres
from tests.support.postgres import Postgres

IMAGE = "shoal.test/shoal-node:0.1.0"
MONTH, ROUNDS = 3, 20


@dataclass
class There:
    """What a user has: a namespace with the Roles of the guide, a folder that all mount, and a store on PostgreSQL."""

    namespace: str
    kubeconfig: Path
    shared: Path

    def uri(self, name: str) -> str:
        return (
            f"kuberay://{self.namespace}/{name}?max_nodes=4&kubeconfig={self.kubeconfig}&image={IMAGE}"
            f"&memory_per_node=2Gi&shared_folders={self.shared}"
        )

    @property
    def results(self) -> str:
        return str(self.shared / "results")


@pytest.fixture
def there(
    plane: ControlPlane,
    cluster: Cluster,
    namespace: str,
    empty_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[There]:
    if not postgres.binaries():
        pytest.skip(postgres.MISSING)
    plane.add_image(IMAGE, Path(sys.prefix), [ROOT, empty_home], RAY_USAGE_STATS_ENABLED="0", PYTHONUNBUFFERED="1")
    database = Postgres(host=plane.address)
    try:
        database.run("CREATE DATABASE shoal")
        monkeypatch.setenv("SHOAL_STATE_URL", database.url("shoal"))
        with cluster.client() as api:
            role = smallest_role(namespace, "retrain", creates=True)
            yield There(namespace, make_account(api, namespace, role, tmp_path), empty_home)
    finally:
        database.remove()


def test_dag_and_flow_promote_the_model_of_every_other_pool(
    there: There, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    from examples import airflow_run, python_run
    from flows import scheduled_retraining_flow

    uri = there.uri("retrain")
    monkeypatch.setattr(airflow_run, "RUN_POOL", uri)
    monkeypatch.setenv("AIRFLOW_VAR_SHOAL_RETRAIN_ARTIFACTS", there.results)
    monkeypatch.setenv("SHOAL_RETRAIN_ARTIFACTS", there.results)

    by_dag = airflow_run.run(MONTH, ROUNDS)
    by_flow = scheduled_retraining_flow.retrain(month=MONTH, rounds=ROUNDS, pool=uri)
    ComputePool("retrain").down()
    here = python_run.retrain(MONTH, ROUNDS)

    assert (by_dag.model_version, by_dag.promoted) == ("1", True)
    assert by_dag.model_digest == by_flow["model_digest"] == here.model_digest
