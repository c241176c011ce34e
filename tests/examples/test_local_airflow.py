"""The keeper of Airflow's processes; the rest of `LocalAirflow` is tested with a real Airflow in tests/airflow."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.support.waiting import wait_until

KEEPER = """
import subprocess
from examples import local_airflow
local_airflow._COMPONENTS = (("component",),)
local_airflow._started = lambda command: subprocess.Popen(["sleep", "600"])
local_airflow.keep()
"""


@pytest.mark.processes
def test_a_killed_component_is_started_again_until_the_keeper_is_told_to_stop():
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, start_new_session=True)
    [first] = wait_until(psutil.Process(keeper.pid).children, "the component")
    first.kill()
    [second] = wait_until(
        lambda: [child for child in psutil.Process(keeper.pid).children() if child != first], "its next start"
    )
    keeper.communicate()
    assert keeper.returncode == 0
    assert not second.is_running()
