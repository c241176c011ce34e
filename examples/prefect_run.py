"""Run the flight retraining example as a Prefect flow: ``python -m examples.prefect_run``, `make run-prefect`.

The program starts a Prefect server on loopback, runs ``flows/scheduled_retraining_flow.py`` against this server in
another process, and prints the number of nodes while the flow runs. At the end the program stops everything that it has
started, even after an error.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import httpx

from examples.ports import free_port
from examples.python_run import Timeline, check_model_loads, command_line, run_alone, summary
from shoal.errors import PoolNotFoundError, ShoalError
from shoal.examples.flights import POOL, check_month
from shoal.jobs.results import JobResult
from shoal.pool.api import ComputePool
from shoal.state.home import subfolder

FLOW = Path(__file__).parents[1] / "flows" / "scheduled_retraining_flow.py"

_SERVER_PATIENCE_S = 300.0
"""Maximum time in seconds for the start of the server. The first start migrates a database, which takes 10 s on an idle
machine with two cores, and several times as long on a busy machine."""

_STOP_PATIENCE_S = 90.0
"""Maximum time in seconds for the flow to cancel its job and release its nodes. Cancelling and releasing usually take a
few seconds, but ComputePool.down may take 60 s."""

_LOOK_S = 0.3
"""Seconds between checks of the pool and of the flow."""

_END_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Program that asks the kernel for a SIGTERM when its parent process is killed, and then executes its arguments as a
command. A `preexec_fn` is not used: Python would then run its fork handlers, and a Ctrl-C during such a handler is
lost."""

_CHILD = """
import json, sys
from prefect.flows import load_flow_from_entrypoint
retrain = load_flow_from_entrypoint(sys.argv[1] + ":retrain")
result = retrain(month=int(sys.argv[2]), rounds=int(sys.argv[3]))
with open(sys.argv[4], "w") as file:
    json.dump(result, file)
"""


def run(month: int, rounds: int) -> JobResult:
    """Start a Prefect server, run the flow against this server, and print a summary.

    Raises:
        InvalidArgumentError: `month` is not from 2 to 12. Nothing was started.
        ShoalError: The server did not start, or the flow failed. Everything has been stopped.
    """
    check_month(month)
    if not FLOW.exists():
        raise ShoalError(f"{FLOW} does not exist: run this example from a clone of the repository")
    timeline = Timeline()
    folder = subfolder("prefect")
    outcome = folder / "result.json"
    outcome.unlink(missing_ok=True)
    timeline.say("starting a Prefect server")
    with _server(folder) as environment:
        timeline.say(f"running {FLOW.name} against {environment['PREFECT_API_URL']}")
        arguments = [str(FLOW), str(month), str(rounds), str(outcome)]
        try:
            with _process([sys.executable, "-c", _CHILD, *arguments], environment, _STOP_PATIENCE_S) as flow:
                while flow.poll() is None:
                    _look(timeline)
                    time.sleep(_LOOK_S)
        finally:
            _down()
    _look(timeline)
    if flow.returncode != 0 or not outcome.exists():
        raise ShoalError("the flow failed: see the end of the flow's log above for the cause")
    result = JobResult.model_validate(json.loads(outcome.read_text()))
    check_model_loads(result)
    summary(timeline, month, result, "examples.prefect_run")
    return result


@contextmanager
def _server(folder: Path, *, ui: bool = False) -> Iterator[dict[str, str]]:
    """Run a Prefect server with its files in `folder`, and yield the environment variables for its clients."""
    port = free_port()
    environment = {
        **os.environ,
        "PREFECT_HOME": str(folder),
        "PREFECT_PROFILES_PATH": str(folder / "profiles.toml"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / 'prefect.db'}",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_COLORS": "false",
        "DO_NOT_TRACK": "1",
    }
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--ui" if ui else "--no-ui", "--log-level", "WARNING"]
    command = [sys.executable, "-m", "prefect", "server", "start", *arguments]
    log = folder / "server.log"
    with log.open("wb") as file, _process(command, environment, 10.0, file) as server:
        until = time.monotonic() + _SERVER_PATIENCE_S
        while not _answers(f"http://127.0.0.1:{port}/api/health"):
            if server.poll() is not None:
                raise ShoalError(
                    f"the Prefect server ended with exit code {server.returncode}: see {log} for the cause"
                )
            if time.monotonic() > until:
                raise ShoalError(
                    f"the Prefect server did not answer within {_SERVER_PATIENCE_S:.0f} s: see its log, {log}"
                )
            time.sleep(_LOOK_S)
        yield environment


@contextmanager
def _process(
    command: list[str], environment: Mapping[str, str], patience: float, log: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process, and end the process at the end of the ``with`` block.

    The process runs in a new session, so that Ctrl-C in the terminal does not reach the process directly.
    """
    process = subprocess.Popen(
        [sys.executable, "-IS", "-c", _END_WITH_PARENT, *command],
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        try:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        finally:  # Kill the process even if a second Ctrl-C interrupts the wait.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).is_success
    except httpx.HTTPError:
        return False


def _look(timeline: Timeline) -> None:
    with suppress(PoolNotFoundError):  # The flow has not yet started the pool.
        timeline.update(ComputePool(POOL).describe())


def _down() -> None:
    """Take the pool down, because the flow may have been killed before it took the pool down itself."""
    with suppress(PoolNotFoundError):
        ComputePool(POOL).down()


def main() -> int:
    """Run the example, and return the exit code: 0 only if the flow succeeded and the model can be loaded."""
    arguments = command_line("Retrain the flight delay model as a Prefect flow.").parse_args()
    return run_alone(
        lambda: run(arguments.month, arguments.rounds),
        farewell="the job was cancelled, the pool is down, and the server has ended",
    )


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
