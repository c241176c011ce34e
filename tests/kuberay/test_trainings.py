"""Trainings on real Ray nodes under the real operator: the example's DAG and flow, and faults while one trains."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from shoal import RunConfig
from shoal.data import DataConnector
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
from shoal.errors import JobFailedError, ScaleError
from shoal.jobs import JobHandle
from shoal.pool.api import ComputePool
from tests.jobs.test_forked_workers import forever
from tests.jobs.test_pauses import VICTIMS, below, everything, pauses_that_end, waited_for
from tests.kuberay.accounts import make_account, smallest_role
from tests.kuberay.conftest import Cluster
from tests.kuberay.control_plane import ControlPlane
from tests.kuberay.manifests import ray_cluster
from tests.kuberay.pools import Made
from tests.support import ROOT, postgres
from tests.support.pool_processes import node_rows
from tests.support.postgres import Postgres
from tests.support.waiting import wait_until

IMAGE = "shoal.test/shoal-node:0.1.0"
MONTH, ROUNDS = 3, 20


@dataclass
class Setup:
    """What a user has: a namespace with the Roles of the guide, a folder that all mount, and a store on PostgreSQL."""

    namespace: str
    kubeconfig: Path
    shared: Path
    template: Path

    @property
    def uri(self) -> str:
        return (
            f"kuberay://{self.namespace}/retrain?max_nodes=4&kubeconfig={self.kubeconfig}&template={self.template}"
            f"&shared_folders={self.shared}"
        )

    @property
    def results(self) -> str:
        return str(self.shared / "results")


def with_folder(cluster: dict[str, Any], folder: Path, store: str) -> dict[str, Any]:
    """Mount a folder of the machines in all pods, and give these the store."""
    spec = cluster["spec"]
    spec["headGroupSpec"]["rayStartParams"]["num-cpus"] = "1"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        pod["volumes"] = [{"name": "shared", "hostPath": {"path": str(folder)}}]
        pod["containers"][0]["volumeMounts"] = [{"name": "shared", "mountPath": str(folder)}]
        pod["containers"][0]["env"] = [{"name": "SHOAL_STATE_URL", "value": store}]
    return cluster


@pytest.fixture
def setup(
    plane: ControlPlane, cluster: Cluster, namespace: str, empty_home: Path, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Setup]:  # fmt: skip
    if not postgres.binaries():
        pytest.skip(postgres.MISSING)
    # The environment may have been installed from another checkout.
    variables = {"PYTHONPATH": str(ROOT / "providers"), "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
    plane.add_image(IMAGE, Path(sys.prefix), [ROOT], **variables)
    database = Postgres(host=plane.address)
    try:
        database.run("CREATE DATABASE shoal")
        store = database.url("shoal")
        monkeypatch.setenv("SHOAL_STATE_URL", store)
        template = tmp_path / "cluster.yaml"
        template.write_text(yaml.safe_dump(with_folder(ray_cluster("retrain", IMAGE, workers=0), empty_home, store)))
        with cluster.client() as api:
            role = smallest_role(namespace, "retrain", creates=True)
            yield Setup(namespace, make_account(api, namespace, role, tmp_path), empty_home, template)
    finally:
        database.remove()


def test_dag_and_flow_promote_the_model_of_every_other_pool(
    setup: Setup, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    from examples import airflow_run, python_run
    from flows import scheduled_retraining_flow

    uri = setup.uri
    monkeypatch.setattr(airflow_run, "RUN_POOL", uri)
    monkeypatch.setenv("AIRFLOW_VAR_SHOAL_RETRAIN_ARTIFACTS", setup.results)
    monkeypatch.setenv("SHOAL_RETRAIN_ARTIFACTS", setup.results)

    by_dag = airflow_run.run(MONTH, ROUNDS)
    by_flow = scheduled_retraining_flow.retrain(month=MONTH, rounds=ROUNDS, pool=uri)
    ComputePool("retrain").down()
    here = python_run.retrain(MONTH, ROUNDS)

    assert (by_dag.model_version, by_dag.promoted) == ("1", True)
    assert by_dag.model_digest == by_flow["model_digest"] == here.model_digest


class Pauses:
    """XGBoost's callback: it pauses in round 5 until there is the file `go` in a folder that all nodes mount."""

    def __new__(cls, folder: Path) -> Any:
        from xgboost.callback import TrainingCallback

        class Callback(TrainingCallback):
            def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
                (folder / f"round-{epoch}").touch()
                while epoch == 5 and not (folder / "go").exists():
                    time.sleep(0.05)
                return False

        return Callback()


@dataclass
class Training:
    """A training on three nodes, which pauses in round 5."""

    setup: Setup
    pool: ComputePool
    folder: Path
    lost: str = ""
    """A machine that was lost."""

    def begin(self) -> JobHandle:
        """Submit it, and wait until it pauses."""
        values = np.random.default_rng(0).random((3000, 3))
        pd.DataFrame(values, columns=["a", "b", "y"]).to_parquet(self.setup.shared / "rows.parquet")
        self.folder.mkdir()
        handle = self.submit()
        paused = self.folder / "round-5"
        wait_until(lambda: paused.exists() or handle.has_ended, "round 5", seconds=300, every=0.2)
        assert paused.exists(), list(handle.logs())
        return handle

    def submit(self) -> JobHandle:
        """Submit it, or its next attempt."""
        rows = DataConnector.from_parquet(str(self.setup.shared / "rows.parquet"))
        return XGBEstimator(
            10, "reg:squarederror", {"max_depth": 3},
            callbacks=[Pauses(self.folder)],
            scaling_config=XGBScalingConfig(num_workers=3, num_cpu_per_worker=1),
            run_config=RunConfig(
                pool_name="retrain", artifact_location=self.setup.results, checkpoint_every=2, max_restarts=3,
                job_id="three-nodes",
            ),
        ).submit(rows, ["a", "b"], "y").job  # fmt: skip

    def go(self) -> None:
        """Let it train on."""
        (self.folder / "go").touch()


@pytest.fixture
def training(setup: Setup, cluster: Cluster, plane: ControlPlane) -> Iterator[Training]:
    from kubernetes.client import CoreV1Api

    pool = ComputePool(setup.uri).up()
    pool.scale(3)
    yield (made := Training(setup, pool, setup.shared / "rounds"))
    if made.lost:
        # As an administrator does: nobody else confirms the end of pods on a machine that is gone.
        with cluster.client() as api:
            core = CoreV1Api(api)
            for pod in core.list_namespaced_pod(setup.namespace, field_selector=f"spec.nodeName={made.lost}").items:
                core.delete_namespaced_pod(pod.metadata.name, setup.namespace, grace_period_seconds=0)
            core.delete_node(made.lost)
        plane.add_node(f"{made.lost}-new")
    # Controllers that have lost the API server may act again only a minute after it is back.
    with suppress(ScaleError):
        pool.down()
    pool.down()


def worker_pod(training: Training) -> str:
    """The pod of a node that is not the head."""
    return str(next(node for node in node_rows() if not node.is_head).endpoint["pod"])


def delete_a_pod(training: Training, plane: ControlPlane, core: Any) -> None:
    core.delete_namespaced_pod(worker_pod(training), training.setup.namespace, grace_period_seconds=0)


def lose_a_machine(training: Training, plane: ControlPlane, core: Any) -> None:
    """The machine of a worker loses its power. That of the head stays, because a job ends with the head."""
    pods = core.list_namespaced_pod(training.setup.namespace).items
    [head] = [pod.spec.node_name for pod in pods if pod.metadata.labels["ray.io/node-type"] == "head"]
    lost = next(pod.spec.node_name for pod in pods if pod.spec.node_name != head)
    plane.remove_node(lost)
    training.lost = lost


def restart_the_operator(training: Training, plane: ControlPlane, core: Any) -> None:
    plane.services["ray-operator"].stop()
    plane.services["ray-operator"].start()


def lose_the_api_server(training: Training, plane: ControlPlane, core: Any) -> None:
    plane.services["kube-apiserver"].stop()
    until = time.monotonic() + 60
    wait_until(lambda: time.monotonic() > until, "a minute", seconds=90, every=1)
    plane.services["kube-apiserver"].start()
    plane.wait_for_server()


@pytest.mark.parametrize(
    ("fault", "restarts"),
    [(delete_a_pod, 1), (restart_the_operator, 0), (lose_the_api_server, 0), (lose_a_machine, 1)],
)
def test_a_training_survives(
    training: Training,
    cluster: Cluster,
    plane: ControlPlane,
    fault: Callable[[Training, ControlPlane, Any], None],
    restarts: int,
):
    from kubernetes.client import CoreV1Api

    handle = training.begin()
    with cluster.client() as api:
        fault(training, plane, CoreV1Api(api))
    training.go()
    result = handle.wait(on_log=None)
    assert result.restarts == restarts
    assert (result.rows, result.num_workers) == (3000, 3)


def test_a_training_fails_with_its_head_and_the_next_attempt_runs_on_the_pods_that_stay(
    training: Training, cluster: Cluster, plane: ControlPlane
):
    """Nothing keeps the state of Ray's head: afterwards all of Ray's ids are new, and the rows of all nodes."""
    from kubernetes.client import CoreV1Api

    handle = training.begin()
    with cluster.client() as api:
        kube = Made(plane, training.setup.namespace, training.setup.kubeconfig, CoreV1Api(api), None, "retrain")
        workers = kube.pods()
        head = next(node for node in node_rows() if node.is_head).endpoint["pod"]
        kube.core.delete_namespaced_pod(head, kube.namespace, grace_period_seconds=0)
        with pytest.raises(JobFailedError, match=r"got a new head while the job was running|has not answered for 45 s"):
            handle.wait(on_log=None)

        training.go()
        training.pool.wait_for_nodes(3)  # as a task does by its `retry_delay`
        result = training.submit().wait(on_log=None)

        assert (result.rows, result.num_workers) == (3000, 3)
        assert kube.pods() == workers
        training.pool.down()
        left = {each for each in kube.everything() if each.startswith(("pods", "rayclusters", "leases", "services/"))}
        assert left == set()


@pytest.mark.timeout(3600)
def test_a_training_goes_on_after_every_pause(setup: Setup):
    """With `SHOAL_PAUSE_S` and `SHOAL_PAUSED` as in the test of the other pools."""
    rows = setup.shared / "rows.parquet"
    frame = pd.DataFrame(np.random.default_rng(0).random((4000, 2)), columns=["a", "b"])
    frame.assign(y=frame["a"] * 3 + frame["b"]).to_parquet(rows, row_group_size=500)
    pool = ComputePool(f"{setup.uri}&min_nodes=2").up()
    try:
        handle = waited_for(forever(pool, rows, "xgboost", 2, artifact_location=setup.results))
        machine = {"all, with Kubernetes": lambda _: {*everything(), *below([os.getpid()])}}
        assert not pauses_that_end(handle, "xgboost kuberay://", {**VICTIMS, **machine})
    finally:
        pool.down()
