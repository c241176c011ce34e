"""Provide `LocalAirflow`, which runs Airflow on loopback. Airflow ends when `LocalAirflow.stop` is called, or when the
process that has started Airflow ends.

Run as a program, this file is the keeper, a process between Airflow and the process that uses
`LocalAirflow`. The keeper starts scheduler, DAG processor, triggerer and API server in a session of its own, and starts
them again if they are killed. When the keeper's standard input closes, the keeper ends all processes in this session.
The standard input closes when `LocalAirflow.stop` is called, or when the process that started the keeper is killed.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from shoal.errors import ShoalError

USER = "admin"
_COMPONENTS = (
    ("api-server", "--workers", "1"),
    ("scheduler", "--skip-serve-logs"),  # The API server reads the log files, so the scheduler need not serve them.
    ("dag-processor",),
    ("triggerer", "--skip-serve-logs"),  # Without a triggerer, a deferred task would wait forever.
)
_READY_S = 600.0
"""Maximum time in seconds until the API answers and the scheduler has a heartbeat. On 2 cores, the start takes 15 to 30
s. With 60 other processes on these cores, the start took 4 minutes."""

_GRACE_S = 12.0
"""Seconds from SIGTERM to SIGKILL. The time is sufficient for a training task to cancel its job, which takes up to
5 s."""


class LocalAirflow:
    """Context manager that starts Airflow, calls Airflow's REST API, and stops Airflow at the end.

    Args:
        home: ``AIRFLOW_HOME`` with database, logs and password. The folder is kept, so that the next start is faster.
        dags: Folders with DAG files.
        environment: Additional environment variables of Airflow's processes.
        on_wait: Function that is called every 0.5 s while a method waits.
        python: Python interpreter of the environment that has Airflow and shoal. By default, the interpreter of this
            process.

    Attributes:
        environment: Environment variables of Airflow's processes, with which a further component can be started.
    """

    def __init__(
        self,
        home: Path,
        dags: Sequence[Path],
        environment: Mapping[str, str] | None = None,
        on_wait: Callable[[], None] = lambda: None,
        *,
        python: str | Path = sys.executable,
    ) -> None:
        from examples.ports import free_port  # here, because the keeper runs without the repository on its path

        self.home = home
        self.url = f"http://127.0.0.1:{free_port()}"
        self.environment = {**os.environ, **self._settings(dags), **(environment or {})}
        self._on_wait = on_wait
        self._python = python
        self._keeper: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(base_url=self.url, timeout=30)

    def __enter__(self) -> LocalAirflow:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def password(self) -> str:
        """Return the password of Airflow's user ``admin``, which was generated at the first start."""
        passwords: dict[str, str] = json.loads(self._password_file.read_text())
        return passwords[USER]

    @property
    def log(self) -> Path:
        """Return the path of the file with the output of Airflow's processes."""
        return self.home / "airflow.log"

    @property
    def session(self) -> int:
        """Return the id of the POSIX session (see `os.setsid`) to which all processes of Airflow belong."""
        assert self._keeper is not None
        return self._keeper.pid

    def call(self, method: str, path: str, **body: Any) -> Any:
        """Call the REST API, and return the decoded answer; None if the answer is empty.

        Raises:
            ShoalError: The API returned an error, or does not answer.
        """
        try:
            answer = self._send(method, f"/api/v2{path}", body)
        except httpx.HTTPError as error:
            raise ShoalError(f"Airflow's API does not answer ({error}): see Airflow's log, {self.log}") from error
        if answer.is_error:
            raise ShoalError(f"Airflow's API refused {method} {path}: {answer.status_code} {answer.text}")
        return answer.json() if answer.content else None

    def _send(self, method: str, path: str, body: dict[str, Any]) -> httpx.Response:
        # A GET request that gets no answer within 30 s is repeated, which is safe, because GET changes nothing. On 2
        # busy cores that Airflow shared with a training, one answer took more than 30 s.
        attempts = stop_after_attempt(4 if method == "GET" else 1)
        retrying = Retrying(retry=retry_if_exception_type(httpx.ReadTimeout), stop=attempts, reraise=True)
        return retrying(self._http.request, method, path, json=body or None)

    def trigger(self, dag_id: str, conf: Mapping[str, Any]) -> str:
        """Wait until Airflow has loaded the DAG, start a run of the DAG, and return the run's id."""
        self.unpause(dag_id)
        run = self.call("POST", f"/dags/{dag_id}/dagRuns", logical_date=None, conf=dict(conf))
        return str(run["dag_run_id"])

    def wait_for_dag(self, dag_id: str) -> None:
        """Wait until Airflow has loaded the DAG."""
        self._wait(lambda: self._knows(dag_id), f"DAG {dag_id}")

    def unpause(self, dag_id: str) -> None:
        """Wait until Airflow has loaded the DAG, and unpause it, because a new DAG and its backfills are paused."""
        self.wait_for_dag(dag_id)
        self.call("PATCH", f"/dags/{dag_id}", is_paused=False)

    def run_state(self, dag_id: str, run_id: str) -> str:
        """Return the state of a run: ``queued``, ``running``, ``success`` or ``failed``."""
        return str(self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def task_states(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        """Return the state of each task of a DAG run, by task id. The state is None if the task has no state yet."""
        found = self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances")["task_instances"]
        return {one["task_id"]: one["state"] for one in found}

    def returned(self, dag_id: str, run_id: str, task_id: str) -> Any:
        """Return the return value of a task in a run; Airflow stores this value as an XCom."""
        entry = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/return_value"
        return self.call("GET", f"{entry}?deserialize=true")["value"]

    def task_log(self, dag_id: str, run_id: str, task_id: str, attempt: int = 1) -> list[str]:
        """Return the lines of a task's log, including error messages, but without Airflow's markers of log groups."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{attempt}?full_content=true"
        lines = []
        for entry in self.call("GET", path)["content"]:
            lines += str(entry["event"]).splitlines()
            for error in entry.get("error_detail") or ():
                lines += f"{error['exc_type']}: {error['exc_value']}".splitlines()
        return [line for line in lines if line and not line.startswith("::")]

    def alive(self) -> bool:
        """Return whether the keeper, the process that starts and ends Airflow's components, is still running."""
        return self._keeper is not None and self._keeper.poll() is None

    def stop(self) -> None:
        """End all processes of Airflow; this method may be called at any time, also twice."""
        self._http.close()
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()
        if self._keeper.wait() != 0:
            # The process that should end Airflow's processes was killed. So Airflow's processes are killed here.
            _end_session(self._keeper.pid, signal.SIGKILL)

    def _start(self) -> None:
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._password_file.exists():
            self._password_file.touch(mode=0o600)
            self._password_file.write_text(json.dumps({USER: secrets.token_urlsafe(12)}))
        self._migrate()
        with self.log.open("wb") as log:
            self._keeper = subprocess.Popen(
                [self._python, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        self._wait(self._is_ready, "Airflow")

    def _migrate(self) -> None:
        done = self.home / f"migrated-{version('apache-airflow')}"
        if done.exists():
            return
        ran = subprocess.run(
            [self._python, "-P", "-m", "airflow", "db", "migrate"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise ShoalError(f"Airflow's database cannot be created in {self.home}: {ran.stderr[-2000:]}")
        done.touch()

    def _is_ready(self) -> bool:
        try:
            health = self._http.get("/api/v2/monitor/health")
            if health.is_error or health.json()["scheduler"]["status"] != "healthy":
                return False
            # Airflow's API server builds its execution API, which tasks use, at the first request to this API. Building
            # takes 9 s of CPU time, and minutes on a busy machine, and blocks the server. So the first request is sent
            # here. Otherwise the first task would wait for the execution API, and fail.
            self._http.get("/execution/health").raise_for_status()
            token = self._http.post("/auth/token", json={"username": USER, "password": self.password})
            self._http.headers["Authorization"] = f"Bearer {token.raise_for_status().json()['access_token']}"
        except httpx.HTTPError:
            return False
        return True

    def _knows(self, dag_id: str) -> bool:
        dags = self.call("GET", f"/dags?dag_id_pattern={dag_id}")["dags"]
        if not dags and (broken := self.call("GET", "/importErrors")["import_errors"]):
            raise ShoalError(f"a DAG file cannot be imported: {broken[0]['stack_trace']}")
        return any(dag["dag_id"] == dag_id for dag in dags)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _READY_S
        while not condition():
            if not self.alive():
                raise ShoalError(f"Airflow ended before {what} was ready: see Airflow's log, {self.log}")
            if time.monotonic() > until:
                raise ShoalError(f"{what} was not ready after {_READY_S:.0f} s: see Airflow's log, {self.log}")
            self._on_wait()
            time.sleep(0.5)

    @property
    def _password_file(self) -> Path:
        return self.home / "passwords.json"

    def _settings(self, dags: Sequence[Path]) -> dict[str, str]:
        bundles = [
            {
                "name": folder.name if len(dags) == 1 else f"{folder.name}-{number}",
                "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
                "kwargs": {"path": str(folder.absolute())},
            }
            for number, folder in enumerate(dags)
        ]
        settings: dict[str, dict[str, Any]] = {
            "core": {
                "executor": "LocalExecutor",
                "parallelism": 4,
                "load_examples": False,
                "test_connection": "Enabled",
                "execution_api_server_url": f"{self.url}/execution/",
                "simple_auth_manager_users": f"{USER}:admin",
                "simple_auth_manager_passwords_file": self._password_file,
            },
            "database": {"sql_alchemy_conn": f"sqlite:///{self.home.absolute()}/airflow.db"},
            "api": {
                "host": "127.0.0.1",
                "port": self.url.rpartition(":")[2],
                "base_url": self.url,
                "secret_key": secrets.token_hex(16),
            },
            "api_auth": {"jwt_secret": secrets.token_hex(32)},
            "dag_processor": {
                "dag_bundle_config_list": json.dumps(bundles),
                "refresh_interval": 10,
                # After this time, Airflow kills a callback of a DAG run. The first callback that reads the tasks'
                # results needs more time than others, because the DAG processor first builds the execution API. On 2
                # busy cores, building took longer than the default timeout of 50 s.
                "dag_file_processor_timeout": 600,
            },
            "scheduler": {"scheduler_idle_sleep_time": 0.3, "scheduler_heartbeat_sec": 2},
            # Tasks wait up to 30 s for an answer of the API server, instead of Airflow's default of 5 s, because some
            # answers take longer than 5 s on 2 busy cores.
            "workers": {"min_heartbeat_interval": 2, "execution_api_timeout": 30},
            # Airflow 3.0 and 3.1 send usage data by default, so the collection of usage data is switched off.
            "usage_data_collection": {"enabled": False},
        }
        named = {
            f"AIRFLOW__{section.upper()}__{name.upper()}": str(value)
            for section, options in settings.items()
            for name, value in options.items()
        }
        return {"AIRFLOW_HOME": str(self.home), "DO_NOT_TRACK": "1", **named}


def _in_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) == session and process.pid != os.getpid():
                found.append(process)
    return found


def _end_session(session: int, *signals: signal.Signals) -> None:
    """End the processes of a POSIX session (see `os.setsid`). Send each of `signals` in turn to the processes that
    still run, and wait after each signal until they have ended."""
    for number in signals:
        remaining = _in_session(session)
        for process in remaining:
            with suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(remaining, _GRACE_S)


def keep() -> None:
    """Run Airflow's components until standard input closes or one of the components ends by itself.

    A component that was killed by a signal is started again, as a process manager would do.
    """
    components = {command: _started(command) for command in _COMPONENTS}
    # Standard input becomes readable only when it is closed, because no process writes to it.
    while not select.select([sys.stdin], [], [], 0.5)[0]:
        ended = {command: code for command, process in components.items() if (code := process.poll()) is not None}
        if any(code >= 0 for code in ended.values()):
            break
        components |= {command: _started(command) for command in ended}
    _end_session(os.getsid(0), signal.SIGTERM, signal.SIGKILL)


def _started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-P", "-m", "airflow", *command], stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    keep()
