"""`make run-prefect`, to its end and interrupted; on the real thing, with fewer months."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import psutil
import pytest

from examples import prefect_run
from shoal.jobs import list_jobs, sweep
from shoal.state.home import home
from tests.support.pool_processes import nothing_left
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.server]


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "examples.prefect_run", "--month", "2", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def nothing_runs() -> None:
    wait_until(lambda: sweep() == [], "nothing left to sweep")
    nothing_left()
    # What was killed takes the kernel a moment.
    wait_until(lambda: not any(map(is_prefects, psutil.process_iter())), "the end of Prefect's processes")


def is_prefects(process: psutil.Process) -> bool:
    """Whether it is the server or the flow of this home, by their environment."""
    try:
        return process.environ().get("PREFECT_HOME") == str(home() / "prefect")
    except psutil.Error:
        return False


@pytest.mark.long
def test_it_trains_and_leaves_nothing(fresh_home):
    process = start("--rounds", "5")
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 0, said
    assert re.search(r"verdict +│ promoted", said), said
    assert re.search(r"nodes over time │ .*3 at", said), said
    assert [job.state for job in list_jobs()] == ["succeeded"]
    nothing_runs()


@pytest.mark.parametrize("stage", ["starting a Prefect server", pytest.param("nodes ", marks=pytest.mark.long)])
def test_an_interrupt_leaves_nothing(fresh_home, stage):
    process = start("--rounds", "100000")
    said = []
    for line in process.stdout:
        said.append(line)
        if stage in line:
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130, "".join(said) + rest
    nothing_runs()
    assert all(job.state == "cancelled" for job in list_jobs())


def test_a_wrong_month_is_refused_before_anything_starts(fresh_home, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prefect_run", "--month", "13"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process has handlers of its own
    assert prefect_run.main() == 1
    assert "error: the month must be from 2 to 12, not 13" in capsys.readouterr().out
    nothing_left()
