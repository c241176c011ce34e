"""Three trainings as Airflow tasks on a Ray cluster with which the orchestrator shares nothing but the network."""

from __future__ import annotations

import json
import secrets
import subprocess
from typing import Any

import pytest

from shoal.state.schema import JobState
from tests.support import ROOT
from tests.support.remote_cluster import ROWS, missing, remote_cluster

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]

DAG = ROOT / "tests" / "jobs" / "remote_dags" / "trainings.py"


def test_all_train_as_airflow_tasks():
    if why := missing():
        pytest.skip(why)
    pin = secrets.token_hex(8)
    with remote_cluster() as cluster:
        owner, orchestrator = cluster.owner, cluster.orchestrator
        environment = {
            **cluster.environment,
            "AIRFLOW_HOME": str(orchestrator.home / "airflow"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(DAG.parent),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
            "MY_PIN": pin,
            "WHEELS": str(owner.home / "wheels"),
            "CODE": str(orchestrator.file("features.py", "COLUMNS = ['a', 'b']\n")),
            "SAID": str(orchestrator.home / "said.json"),
        }
        for command in (["-m", "airflow", "db", "migrate"], [str(DAG)]):
            run = orchestrator.popen(
                [str(cluster.python), *command],
                environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            out, _ = run.communicate(timeout=900)
            assert run.returncode == 0, out[-6000:]
        assert (orchestrator.home / "said.json").exists(), out[-9000:]
        said: dict[str, Any] = json.loads((orchestrator.home / "said.json").read_text())

        assert said["preflight"]["broken"] == []
        assert {"head: store", "worker: Ray", "head and worker"} <= set(said["preflight"]["checked"])
        assert (said["xgboost"]["rows"], said["xgboost"]["num_workers"]) == (ROWS, 2)
        assert (said["lightgbm"]["rows"], said["lightgbm"]["num_workers"]) == (300, 2)
        assert min(said["bytes"]) > 1000
        [first, other] = said["function"]
        assert first == other == {"answer": 42, "columns": ["a", "b"], "sum": 3.0, "reversed": pin[::-1]}
        log = "\n".join(line for lines in said["logs"].values() for line in lines)
        assert "installed tidbit==1.0" in log and "the pin is ***" in log and pin not in log
        rows = cluster.jobs()
        assert [row.state for row in rows] == [JobState.SUCCEEDED] * 3
        assert all(row.needs_credentials for row in rows)
        kept = str([vars(row) for row in rows])
        assert pin not in kept and cluster.environment["AWS_SECRET_ACCESS_KEY"] not in kept
        assert [row.sealed_credentials or row.driver_key for row in rows] == [None] * 3
        for home in (owner.home, orchestrator.home):
            assert list(home.glob(".shoal/credentials/*")) == []
