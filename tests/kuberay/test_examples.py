"""The files in docker/kubernetes/ that users apply, on a real control plane.

Tasks of Airflow's Kubernetes executor and a flow run of Prefect's Kubernetes work pool are pods that train, and the
reaper runs as a CronJob.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest
import yaml
from cryptography.fernet import Fernet

from shoal.pool.spec import PoolSpec
from shoal.state import Store
from tests.kuberay.accounts import FILES
from tests.kuberay.conftest import Cluster
from tests.kuberay.control_plane import ControlPlane
from tests.kuberay.manifests import ray_cluster
from tests.kuberay.test_trainings import IMAGE, with_folder
from tests.support import ROOT, postgres
from tests.support.postgres import Postgres
from tests.support.waiting import wait_until

DAGS = Path(__file__).with_name("dags")
NAMESPACE = "ml"
TASK = "trained-in-pods-train-"


def objects(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FILES / file).read_text()))


def commands(file: str) -> list[list[str]]:
    """The commands of all containers in a file."""
    found: list[list[str]] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            found.extend([value["command"]] if isinstance(value.get("command"), list) else [])
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            look(each)

    look(objects(file))
    return found


def test_the_files_name_commands_and_pools_that_exist():
    [reaper] = commands("shoal.yaml")
    assert reaper[:3] == ["python", "-P", "-m"] and importlib.util.find_spec(reaper[3])
    settings = next(made["data"] for made in objects("airflow.yaml") if made["kind"] == "ConfigMap")
    given = json.loads(settings["AIRFLOW_CONN_RETRAIN"])
    options = "&".join(f"{name}={value}" for name, value in given["extra"].items() if name != "namespace")
    assert PoolSpec.parse(f"kuberay://{given['extra']['namespace']}/{given['host']}?{options}").namespace == NAMESPACE
    assert [command[:2] for command in commands("airflow.yaml")] == [
        ["airflow", name] for name in ("db", "scheduler", "dag-processor", "api-server")
    ]
    template = next(made["data"] for made in objects("prefect.yaml") if made["kind"] == "ConfigMap")["template.json"]
    assert json.loads(template)["variables"]["properties"]["service_account_name"]["default"] == "shoal"


@dataclass
class Applied:
    """A namespace with shoal.yaml, a RayCluster `retrain`, the Secret `shoal`, and a folder that all pods mount."""

    api: Any
    core: Any
    store: Postgres
    shared: Path

    def apply(self, made: dict[str, Any]) -> None:
        """Apply an object on the server, which refuses fields that it does not know."""
        path = {
            "ConfigMap": "api/v1", "Deployment": "apis/apps/v1", "CronJob": "apis/batch/v1", "Secret": "api/v1",
            "Role": "apis/rbac.authorization.k8s.io/v1", "RoleBinding": "apis/rbac.authorization.k8s.io/v1",
            "Service": "api/v1", "ServiceAccount": "api/v1", "RayCluster": "apis/ray.io/v1", "Pod": "api/v1",
        }[made["kind"]]  # fmt: skip
        self.api.request(
            "PATCH",
            f"/{path}/namespaces/{NAMESPACE}/{made['kind'].lower()}s/{made['metadata']['name']}"
            "?fieldManager=kubectl&fieldValidation=Strict",
            json.dumps(made).encode(),
            "application/apply-patch+yaml",
        )

    def secret(self, name: str, **entries: str) -> None:
        self.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": entries})

    def pods(self, starts: str) -> dict[str, Any]:
        """The pods whose names start so."""
        found = self.core.list_namespaced_pod(NAMESPACE).items
        return {pod.metadata.name: pod for pod in found if pod.metadata.name.startswith(starts)}

    def address(self, starts: str) -> str:
        """The address of a pod that is ready."""

        def ready() -> str | None:
            for pod in self.pods(starts).values():
                if any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ()):
                    return str(pod.status.pod_ip)
            return None

        return wait_until(ready, f"pod {starts} to be ready", seconds=300, every=0.5)

    def jobs(self) -> list[tuple]:
        return self.store.run("SELECT state, attempt, task_try FROM jobs", "shoal")

    def nothing_is_left(self) -> bool:
        return not self.pods("retrain-workers") and self.store.run("SELECT 1 FROM leases", "shoal") == []


@pytest.fixture
def applied(plane: ControlPlane, cluster: Cluster, empty_home: Path) -> Iterator[Applied]:
    from kubernetes.client import ApiException, CoreV1Api

    if not postgres.binaries():
        pytest.skip(postgres.MISSING)
    images = ("shoal-airflow", "shoal-orchestrator", "shoal-prefect")
    settings = {
        "AIRFLOW_HOME": "/opt/airflow", "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS), "PYTHONUNBUFFERED": "1",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "true", "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "false", "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1", "SHOAL_HOME": "/var/lib/shoal",
        "PREFECT_HOME": "/var/lib/prefect", "PYTHONPATH": f"{ROOT}/providers:{ROOT}", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    for name in (IMAGE, *(f"registry.example/{image}:0.1.0" for image in images)):
        plane.add_image(name, Path(sys.prefix), [ROOT], **settings)
    database = Postgres(host=plane.address)
    values = np.random.default_rng(0).random((3000, 3))
    pd.DataFrame(values, columns=["a", "b", "y"]).to_parquet(empty_home / "rows.parquet")
    with cluster.client() as client:
        core = CoreV1Api(client)
        made = Applied(plane, core, database, empty_home)
        try:
            for name in ("shoal", "airflow"):
                database.run(f"CREATE DATABASE {name}")
            Store(database.url("shoal"))
            core.create_namespace({"metadata": {"name": NAMESPACE}})
            made.secret("shoal", SHOAL_STATE_URL=database.url("shoal"))
            made.apply(with_folder(ray_cluster("retrain", IMAGE, workers=0), empty_home, database.url("shoal")))
            for each in objects("shoal.yaml"):
                if each["kind"] == "CronJob":
                    each["spec"]["schedule"] = "* * * * *"
                made.apply(each)
            yield made
        finally:
            with suppress(ApiException):
                core.delete_namespace(NAMESPACE, grace_period_seconds=0)
            wait_until(lambda: not made.pods(""), "the end of all pods", seconds=120, every=0.5)
            wait_until(
                lambda: NAMESPACE not in {each.metadata.name for each in core.list_namespace().items},
                "the end of the namespace",
                seconds=120,
                every=0.5,
            )
            database.remove()


@pytest.fixture
def airflow(applied: Applied) -> Iterator[Callable[..., Any]]:
    """Requests to the API of the Airflow in airflow.yaml, whose pods mount the folder."""
    pytest.importorskip(
        "airflow.providers.cncf.kubernetes",
        reason="the executor is not installed: `pip install 'apache-airflow-providers-cncf-kubernetes>=10'`",
    )
    url = applied.store.url("airflow")
    applied.secret(
        "airflow", AIRFLOW__DATABASE__SQL_ALCHEMY_CONN=url, AIRFLOW__CORE__FERNET_KEY=Fernet.generate_key().decode(),
        AIRFLOW__API_AUTH__JWT_SECRET="1" * 64, AIRFLOW__API__SECRET_KEY="2" * 32,
    )  # fmt: skip
    for made in objects("airflow.yaml"):
        if "pod.yaml" in (data := made.get("data", {})):
            pod = yaml.safe_load(data["pod.yaml"])
            pod["spec"]["volumes"] = [{"name": "shared", "hostPath": {"path": str(applied.shared)}}]
            pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "shared", "mountPath": str(applied.shared)}]
            data["pod.yaml"] = yaml.safe_dump(pod)
        elif "AIRFLOW_CONN_RETRAIN" in data:
            connection = json.loads(data["AIRFLOW_CONN_RETRAIN"])
            connection["extra"] |= {"cpus_per_node": 1, "max_nodes": 4, "shared_folders": str(applied.shared)}
            data["AIRFLOW_CONN_RETRAIN"] = json.dumps(connection)
        applied.apply(made)
    with httpx.Client(base_url=f"http://{applied.address('airflow')}:8080", trust_env=False, timeout=60) as http:
        http.headers["Authorization"] = f"Bearer {http.get('/auth/token').json()['access_token']}"

        def call(method: str, path: str, **body: Any) -> Any:
            answer = http.request(method, f"/api/v2{path}", json=body or None)
            return answer.raise_for_status().json()

        yield call


def test_a_task_of_airflow_whose_pod_is_killed_attaches_to_its_job_from_a_new_pod(
    applied: Applied, airflow: Callable[..., Any]
):
    runs = "/dags/trained_in_pods/dagRuns"
    wait_until(lambda: airflow("GET", "/dags")["dags"], "the DAG", seconds=120, every=0.5)
    run = airflow("POST", runs, logical_date=None, conf={"folder": str(applied.shared)})["dag_run_id"]

    def state() -> str:
        return str(airflow("GET", f"{runs}/{run}")["state"])

    trains = lambda: ("running", 1, 1) in applied.jobs()  # noqa: E731
    wait_until(lambda: trains() or state() == "failed", "the training", seconds=300, every=0.2)
    [task] = applied.pods(TASK)
    order = {"metadata": {"annotations": {"shoal.test/order": "oom"}}}
    applied.core.patch_namespaced_pod(task, NAMESPACE, order)
    wait_until(lambda: state() in ("success", "failed"), "the end of the run", seconds=300, every=0.5)
    assert state() == "success"
    assert applied.jobs() == [("succeeded", 1, 2)]
    wait_until(applied.nothing_is_left, "the end of the workers", seconds=60)


def test_a_flow_run_of_prefect_trains_in_a_pod(applied: Applied, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("prefect_kubernetes", reason="the worker is not installed: `pip install prefect-kubernetes`")
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from tests.kuberay.dags.pod_flow import trained_in_a_pod

    name, image = {"name": "prefect", "labels": {"app": "prefect"}}, "registry.example/shoal-prefect:0.1.0"
    command = ["prefect", "server", "start", "--host", "0.0.0.0"]
    probe = {"httpGet": {"path": "/api/health", "port": 4200}}
    server = {"containers": [{"name": "server", "image": image, "command": command, "readinessProbe": probe}]}
    applied.apply({"apiVersion": "v1", "kind": "Pod", "metadata": name, "spec": server})
    spec = {"selector": {"app": "prefect"}, "ports": [{"port": 4200}]}
    applied.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "prefect"}, "spec": spec})
    url = f"http://{applied.address('prefect')}:4200/api"
    for made in objects("prefect.yaml"):
        applied.apply(made)
    uri = f"kuberay://{NAMESPACE}/retrain?max_nodes=4&cpus_per_node=1&shared_folders={applied.shared}"
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        wait_until(lambda: [pool.name for pool in client.read_work_pools()], "the work pool", seconds=120, every=0.5)
        deployed = client.create_deployment(
            flow_id=client.create_flow(trained_in_a_pod),
            name="kubernetes",
            work_pool_name="kubernetes",
            path=str(ROOT),
            entrypoint="tests/kuberay/dags/pod_flow.py:trained_in_a_pod",
        )
        run = client.create_flow_run_from_deployment(
            deployed, parameters={"folder": str(applied.shared), "pool": uri}
        ).id
        final = wait_until(
            lambda: (state := client.read_flow_run(run).state) and state.is_final() and state,
            "the end of the flow run",
            seconds=300,
            every=0.5,
        )
    assert final.is_completed(), final
    assert applied.jobs() == [("succeeded", 1, None)]
    wait_until(applied.nothing_is_left, "the end of the workers", seconds=60)


def test_the_reaper_runs_as_a_cron_job(applied: Applied):
    def ran() -> bool:
        return any(pod.status.phase == "Succeeded" for pod in applied.pods("shoal-reaper").values())

    wait_until(ran, "a pod of the reaper to succeed", seconds=150, every=0.5)
