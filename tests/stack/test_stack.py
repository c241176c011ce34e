"""The stack, for real: built, started, a DAG run to a promoted champion, a node's container killed, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid

import httpx
import pytest

from tests.support import podman
from tests.support.guides import ROOT
from tests.support.waiting import wait_until

DAG = "/api/v2/dags/scheduled_retraining"


def free_port() -> str:
    """A port of loopback on which nothing listens."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        return str(server.getsockname()[1])


class Airflow:
    """The API of the stack's Airflow."""

    def __init__(self, port: str, password: str) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
        login = self.http.post("/auth/token", json={"username": "admin", "password": password}).raise_for_status()
        self.http.headers["Authorization"] = f"Bearer {login.json()['access_token']}"

    def trigger(self, **conf: int) -> str:
        """Start a run of the DAG, and return its path in the API."""
        wait_until(lambda: self.http.get(DAG).is_success, "the DAG", 300, every=2)
        self.http.patch(DAG, json={"is_paused": False}).raise_for_status()
        run = self.http.post(f"{DAG}/dagRuns", json={"logical_date": None, "conf": conf}).raise_for_status().json()
        return f"{DAG}/dagRuns/{run['dag_run_id']}"

    def tasks(self, run: str) -> dict[str, dict]:
        """The tasks of a run by id."""
        found = self.http.get(f"{run}/taskInstances").raise_for_status().json()["task_instances"]
        return {task["task_id"]: task for task in found}

    def report(self, run: str) -> dict:
        """What the task `evaluate` returned, when the run has succeeded."""

        def ended() -> str | None:
            state = self.http.get(run).raise_for_status().json()["state"]
            return state if state in ("success", "failed") else None

        assert wait_until(ended, f"the end of {run}", 900, every=2) == "success", self.tasks(run)
        return (
            self.http.get(f"{run}/taskInstances/evaluate/xcomEntries/return_value").raise_for_status().json()["value"]
        )


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of a stack beside any other on this machine, which is gone afterwards."""
    folder = tmp_path_factory.mktemp("stack")
    name = f"shoal-test-{uuid.uuid4().hex[:8]}"
    ports = {f"{service}_PORT": free_port() for service in ("AIRFLOW", "MLFLOW", "RAY", "PREFECT")}
    found = {"ENGINE": "podman", "BASE": podman.BASE, **os.environ, **podman.settings(folder)}
    if reason := podman.refusal(found):
        pytest.skip(reason)
    found |= {"STACK_NAME": name, "SECRETS": str(folder / "secrets"), **ports}
    yield found
    stack(found, "down", "--everything")
    for kind in ("ps --all", "volume ls", "network ls"):
        left = podman.podman(found, *kind.split(), "--quiet", "--filter", f"name={name}").stdout
        assert not left, f"{kind}: {left}"


def stack(environment: dict[str, str], *arguments: str) -> None:
    """Run `docker/stack.py`."""
    subprocess.run([sys.executable, str(ROOT / "docker" / "stack.py"), *arguments], env=environment, check=True)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(5400)
def test_the_stack_retrains_to_a_champion_and_survives_a_killed_node(environment):
    stack(environment, "up")
    with open(f"{environment['SECRETS']}/airflow_passwords") as file:
        airflow = Airflow(environment["AIRFLOW_PORT"], json.load(file)["admin"])

    first = airflow.report(airflow.trigger(month=3, rounds=20))

    assert first["promoted"]
    assert first["champion"] is None

    run = airflow.trigger(month=6, rounds=500)
    worker = f"{environment['STACK_NAME']}_ray-worker_2"

    def trains() -> bool:
        processes = podman.podman(environment, "exec", worker, "sh", "-c", "cat /proc/[0-9]*/cmdline").stdout
        return "ray::Worker.run" in processes

    wait_until(trains, "a training on the second worker", 300, every=1)
    pid = podman.podman(environment, "inspect", "--format", "{{.State.Pid}}", worker).stdout
    os.kill(int(pid), signal.SIGKILL)
    second = airflow.report(run)

    assert airflow.tasks(run)["train"]["try_number"] == 2
    assert second["champion"]["version"] == first["version"]
    assert podman.podman(environment, "inspect", "--format", "{{.State.Status}}", worker).stdout.strip() == "running"
