"""`make run` ended in the middle of a training: whatever ends it, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shoal.jobs import list_jobs
from shoal.state.schema import JOB_ENDED
from tests.pool.looking import nothing_left
from tests.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.ray]


def of_home(home: Path) -> list[psutil.Process]:
    """Every process that was started for this home: Airflow's, the pool's, the jobs'."""
    mine = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SHOAL_HOME") == str(home) and process.pid != os.getpid():
                mine.append(process)
        except psutil.Error:
            continue
    return mine


@pytest.mark.parametrize("end", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_it_leaves_nothing(fresh_home, end):
    command = [sys.executable, "-u", "-m", "shoal.examples.airflow_run", "--month", "2", "--rounds", "1000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "task train: running" in line:
            break

    process.send_signal(end)

    rest, _ = process.communicate(timeout=90)
    assert process.returncode == (130 if end is signal.SIGTERM else -signal.SIGKILL), "".join(said) + rest
    assert "Traceback" not in rest
    wait_until(lambda: of_home(fresh_home) == [], "the end of every process", 60)
    nothing_left()
    assert all(job.state in JOB_ENDED for job in list_jobs() if end is signal.SIGTERM)
