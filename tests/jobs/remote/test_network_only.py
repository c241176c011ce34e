"""Three trainings as Airflow tasks on a Ray cluster with which the orchestrator shares nothing but the network."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from shoal.state.schema import Job, JobState
from tests.support.remote_airflow import DAGS, RemoteAirflow, TaskTrainings
from tests.support.remote_cluster import ROWS, RemoteCluster, alive, missing, remote_cluster
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]

PIN = secrets.token_hex(8)
"""The secret of the tasks."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RemoteCluster]:
    if why := missing():
        pytest.skip(why)
    with remote_cluster() as there:
        yield there


@pytest.fixture(scope="module")
def airflow(cluster: RemoteCluster) -> RemoteAirflow:
    """Airflow with its database; its components do not run."""
    cluster.database.run("CREATE DATABASE airflow")
    there = RemoteAirflow.of(cluster, PIN)
    there.run("-m", "airflow", "db", "migrate")
    return there


@pytest.fixture(scope="module")
def running(airflow: RemoteAirflow) -> Iterator[RemoteAirflow]:
    with airflow.running():
        yield airflow


@pytest.fixture(scope="module")
def undisturbed(running: RemoteAirflow) -> dict[str, Any]:
    """The values of tasks to which nothing happens."""
    trainings = begin(running, "undisturbed")
    trainings.hurry()
    return values(trainings)


def begin(airflow: RemoteAirflow, run: str, **config: int) -> TaskTrainings:
    """Start a DAG run, and return its trainings."""
    trainings = airflow.cluster.begin(run, kind=partial(TaskTrainings, airflow=airflow), run_config=config)
    assert isinstance(trainings, TaskTrainings)
    return trainings


def values(trainings: TaskTrainings, attempts: int = 1) -> dict[str, Any]:
    """Check that each task had one job with so many attempts, that the last one has succeeded and nothing is left, and
    return what the tasks have returned."""
    found = trainings.outcomes()
    rows = trainings.jobs()
    assert len({row.id for row in rows}) == 3, [(row.id, row.task_key) for row in rows]
    assert len(rows) == 3 * attempts, [(row.task_key, row.attempt, row.state, row.error) for row in rows]
    assert [row.state for row in rows if row.attempt == attempts] == [JobState.SUCCEEDED] * 3
    [first, other] = found["pytorch"]
    assert first == other
    assert (first["answer"], first["reversed"]) == (42, PIN[::-1])
    wait_until(
        lambda: not any(map(trainings.alive, trainings.names)) and not any(map(driver_is_alive, rows)),
        "the end of drivers and workers",
        60,
    )
    expect_no_credentials(trainings.cluster, rows)
    return found


def driver_is_alive(row: Job) -> bool:
    return row.driver is not None and alive(row.driver["pid"])


def expect_no_credentials(cluster: RemoteCluster, rows: list[Job]) -> None:
    """The jobs needed credentials, and nothing of these is left."""
    assert all(row.needs_credentials for row in rows)
    kept = str([vars(row) for row in rows])
    assert PIN not in kept and cluster.environment["AWS_SECRET_ACCESS_KEY"] not in kept
    assert [row.sealed_credentials or row.driver_key for row in rows] == [None] * len(rows)
    for home in (cluster.owner.home, cluster.orchestrator.home):
        assert list(home.glob(".shoal/credentials/*")) == []


def test_all_train_as_airflow_tasks(cluster: RemoteCluster, airflow: RemoteAirflow):
    out = airflow.run(str(DAGS / "trainings.py"))
    assert (cluster.orchestrator.home / "said.json").exists(), out[-9000:]
    said: dict[str, Any] = json.loads((cluster.orchestrator.home / "said.json").read_text())

    assert said["preflight"]["broken"] == []
    assert {"head: store", "worker: Ray", "head and worker"} <= set(said["preflight"]["checked"])
    assert (said["xgboost"]["rows"], said["xgboost"]["num_workers"]) == (ROWS, 2)
    assert (said["lightgbm"]["rows"], said["lightgbm"]["num_workers"]) == (300, 2)
    assert min(said["bytes"]) > 1000
    [first, other] = said["function"]
    assert first == other == {"answer": 42, "columns": ["a", "b"], "sum": 3.0, "reversed": PIN[::-1]}
    log = "\n".join(line for lines in said["logs"].values() for line in lines)
    assert "installed tidbit==1.0" in log and "the pin is ***" in log and PIN not in log
    rows = cluster.jobs()
    assert [row.state for row in rows] == [JobState.SUCCEEDED] * 3
    expect_no_credentials(cluster, rows)


def test_a_killed_process_of_each_task_is_followed_by_a_try_that_finds_its_job(
    running: RemoteAirflow, undisturbed: dict[str, Any]
):
    trainings = begin(running, "task")
    trainings.do_rounds(5)
    trainings.kill_tasks()
    trainings.do_rounds(5)
    trainings.hurry()

    assert values(trainings) == undisturbed
    assert trainings.tries() == dict.fromkeys(trainings.names, 2)
    assert {row.task_try for row in trainings.jobs()} == {2}


def test_a_killed_worker_of_each_task_is_replaced(running: RemoteAirflow, undisturbed: dict[str, Any]):
    trainings = begin(running, "worker", max_restarts=1)
    trainings.do_rounds(15)
    for name in trainings.names:
        os.kill(trainings.alive(name)[0], signal.SIGKILL)
    trainings.hurry()

    assert values(trainings) == undisturbed
    assert trainings.tries() == dict.fromkeys(trainings.names, 1)


def test_a_killed_node_ends_no_task_if_its_owner_replaces_it(running: RemoteAirflow, undisturbed: dict[str, Any]):
    cluster, trainings = running.cluster, begin(running, "node", max_restarts=1)
    trainings.do_rounds(15)
    cluster.worker.kill()
    wait_until(lambda: cluster.alive() == 1, "the end of the node", 120)
    cluster.join(cluster.worker)
    trainings.hurry()

    assert values(trainings) == undisturbed
    assert trainings.tries() == dict.fromkeys(trainings.names, 1)


def test_a_killed_head_fails_the_tries_and_the_next_ones_train_on_the_new_head(
    running: RemoteAirflow, undisturbed: dict[str, Any]
):
    cluster, trainings = running.cluster, begin(running, "head")
    trainings.do_rounds(5)
    cluster.head.kill()
    wait_until(lambda: not any(map(trainings.alive, trainings.names)), "the end of all workers", 60)
    cluster.worker.kill()
    cluster.start()
    trainings.hurry()

    assert values(trainings, attempts=2) == undisturbed
    for row in trainings.jobs()[:3]:
        assert row.state is JobState.FAILED
        assert re.search("does not know the job any more|has not answered for 45 s|got a new head", row.error or "")


def test_an_orchestrator_that_is_killed_as_a_whole_finds_its_jobs_again(
    running: RemoteAirflow, undisturbed: dict[str, Any]
):
    trainings = begin(running, "orchestrator")
    trainings.do_rounds(5)
    running.kill()
    trainings.do_rounds(5)
    running.start()
    trainings.hurry()

    assert values(trainings) == undisturbed
