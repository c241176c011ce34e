"""An Airflow on the orchestrator's host of a remote cluster, and three trainings as tasks of one of its DAG runs."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg

from shoal.pool.holder import DagRunHolder
from shoal.state.schema import Job
from tests.support import ROOT
from tests.support.remote_cluster import RemoteCluster, Trainings
from tests.support.waiting import wait_until

DAGS = ROOT / "tests" / "jobs" / "remote_dags"
DAG_ID = "paced_trainings"
_DATABASE = "airflow"


@dataclass
class RemoteAirflow:
    """Airflow's components on the orchestrator's host, as a user who owns nothing else.

    Attributes:
        cluster: The cluster on which its tasks train.
        environment: Environment of its processes.
    """

    cluster: RemoteCluster
    environment: dict[str, str]
    _keeper: subprocess.Popen[Any] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, cluster: RemoteCluster, pin: str) -> RemoteAirflow:
        """Describe an Airflow whose tasks have a secret `pin`."""
        home = cluster.orchestrator.home
        server = cluster.database.url(_DATABASE)
        settings = {
            "core": {
                "dags_folder": DAGS, "dags_are_paused_at_creation": False, "executor": "LocalExecutor",
                "load_examples": False,
                "execution_api_server_url": "http://127.0.0.1:8080/execution/", "simple_auth_manager_all_admins": True,
            },
            "database": {"sql_alchemy_conn": server, "sql_alchemy_conn_async": server},
            "api": {"workers": 1, "secret_key": secrets.token_hex(16)},
            "api_auth": {"jwt_secret": secrets.token_hex(32)},
            # Tasks of a scheduler and of workers that were killed run again soon.
            "scheduler": {"orphaned_tasks_check_interval": 15, "task_instance_heartbeat_timeout": 60},
            "workers": {"execution_api_timeout": 60},
            "usage_data_collection": {"enabled": False},
        }  # fmt: skip
        named = {
            f"AIRFLOW__{section.upper()}__{name.upper()}": str(value)
            for section, options in settings.items()
            for name, value in options.items()
        }
        own = {
            "AIRFLOW_HOME": str(home / "airflow"),
            "PYTHONPATH": str(ROOT),
            "MY_PIN": pin,
            "WHEELS": str(cluster.owner.home / "wheels"),
            "CODE": str(cluster.orchestrator.file("features.py", "COLUMNS = ['a', 'b']\n")),
            "SAID": str(home / "said.json"),
        }
        return cls(cluster, {**cluster.environment, **named, **own})

    def run(self, *command: str) -> str:
        """Run a Python command on the orchestrator's host to its end, and return what it has printed."""
        process = self._popen(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        out, _ = process.communicate(timeout=900)
        assert process.returncode == 0, out[-9000:]
        return str(out)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Its components run; they are started again when they are killed."""
        self.start()
        try:
            yield
        finally:
            self.kill()

    def start(self) -> None:
        """Start the components, and wait until tasks can run and the DAG is known."""
        with self.log.open("ab") as log:
            keep = ("-P", str(ROOT / "examples" / "local_airflow.py"))
            self._keeper = self._popen(*keep, stdin=subprocess.PIPE, stdout=log, stderr=log)

        def answers() -> bool:
            assert self._keeper is not None and self._keeper.poll() is None, self.said()
            with suppress(httpx.TransportError):
                # The server builds what tasks need at the first request for it, which takes longer than tasks wait.
                url = f"http://{self.cluster.orchestrator.host.address}:8080/execution/health"
                return httpx.get(url, timeout=60, trust_env=False).is_success
            return False

        wait_until(answers, "Airflow's API", 300, every=1)
        wait_until(lambda: self.rows("SELECT 1 FROM dag WHERE dag_id = %s", DAG_ID), "the DAG", 300, every=1)

    def kill(self) -> None:
        """SIGKILL all that runs on the orchestrator's host."""
        self.cluster.orchestrator.host.kill()
        if self._keeper is not None:
            self._keeper.communicate(timeout=30)
            self._keeper = None

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return rows of Airflow's database."""
        with psycopg.connect(self.cluster.database.url(_DATABASE).replace("+psycopg", "")) as connection:
            return connection.execute(query, values).fetchall()

    @property
    def log(self) -> Path:
        """Output of the components."""
        return self.cluster.orchestrator.home / "airflow.log"

    def said(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-4000:]

    def _popen(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        return self.cluster.orchestrator.popen([str(self.cluster.python), *command], self.environment, **options)


@dataclass
class TaskTrainings(Trainings):
    """Three trainings as tasks of the DAG run whose id is `settings.job`."""

    airflow: RemoteAirflow | None = None

    def orchestrate(self) -> None:
        """Start the DAG run."""
        limits: Mapping[str, int] = self.settings.run_config or {}
        conf = {"folder": self.settings.folder, "max_restarts": 0, **limits}
        self._there.run(
            "-m", "airflow", "dags", "trigger", DAG_ID, "--run-id", self.settings.job, "--conf", json.dumps(conf)
        )

    def tries(self) -> dict[str, int]:
        """Return the number of each task's newest try that runs, has run, or waits."""
        query = "SELECT task_id, try_number FROM task_instance WHERE run_id = %s"
        return {task: number for task, number in self._there.rows(query, self.settings.job) if task in self.names}

    def kill_tasks(self) -> None:
        """SIGKILL the process of each task, and wait until its next try has found a job."""
        newest = max(self.tries().values())
        query = "SELECT task_id, id FROM task_instance WHERE run_id = %s AND state = 'running'"
        ids = {task: str(number) for task, number in self._there.rows(query, self.settings.job)}
        for name in self.names:
            for pid in self._groups(ids[name]):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: all((row.task_try or 0) > newest for row in self.jobs()), "the next tries", 300, every=1)

    def expect_running(self) -> None:
        """Fail if the DAG run has ended."""
        assert self._state() in ("queued", "running"), self.said()

    def outcomes(self) -> dict[str, Any]:
        """Wait until the DAG run has succeeded, and return the value of each task."""
        wait_until(lambda: self._state() not in ("queued", "running"), "the end of the DAG run", 600, every=1)
        assert self._state() == "success", self.said()
        query = "SELECT task_id, value FROM xcom WHERE run_id = %s AND key = 'return_value'"
        found = dict(self._there.rows(query, self.settings.job))
        return {name: found[name] if name == "pytorch" else found[name]["model_digest"] for name in self.names}

    def jobs(self) -> list[Job]:
        """Return all attempts of the jobs of the DAG run, the oldest first."""
        rows = ((row, DagRunHolder.of(row.holder)) for row in self.cluster.jobs())
        return [row for row, run in rows if run and (run.dag_id, run.run_id) == (DAG_ID, self.settings.job)]

    def said(self) -> str:
        """Return the ends of the tasks' logs."""
        logs = self.cluster.orchestrator.home.glob(f"airflow/logs/**/run_id={self.settings.job}/**/*.log")
        return "\n".join(f"{path}: {path.read_text(errors='replace')[-3000:]}" for path in sorted(logs))

    def _groups(self, instance: str) -> list[int]:
        """Return the processes on the orchestrator's host that lead a group and run a task instance."""
        found = []
        for pid in self.cluster.orchestrator.host.processes():
            with suppress(OSError):
                if os.getpgid(pid) == pid and instance in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        assert found, instance
        return found

    def _state(self) -> str:
        [(state,)] = self._there.rows("SELECT state FROM dag_run WHERE run_id = %s", self.settings.job)
        return str(state)

    @property
    def _there(self) -> RemoteAirflow:
        assert self.airflow is not None
        return self.airflow
