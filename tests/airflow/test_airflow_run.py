"""`make run` ended in the middle of a training: whatever ends it, nothing is left."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from shoal.jobs import list_jobs
from shoal.state.schema import JOB_ENDED
from tests.support.pool_processes import nothing_left, processes_of_home
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.ray, pytest.mark.long]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_it_leaves_nothing(fresh_home, end):
    command = [sys.executable, "-u", "-m", "examples.airflow_run", "--month", "2", "--rounds", "1000000"]
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
    # Airflow's, the pool's and the jobs'.
    wait_until(lambda: processes_of_home() == [], "the end of every process", 60)
    nothing_left()
    assert all(job.state in JOB_ENDED for job in list_jobs() if end is signal.SIGTERM)
