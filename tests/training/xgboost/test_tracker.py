from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys

import pytest

from shoal.errors import TrainingError
from shoal.training.xgboost.tracker import Tracker
from tests.support.two_node_cluster import assert_ended

pytestmark = pytest.mark.processes

PARENT = """
import threading
from shoal.training.xgboost.tracker import Tracker
tracker = Tracker("127.0.0.1", 2, print)
tracker.begin()
print(tracker.pid, flush=True)
threading.Event().wait()
"""


def test_serves_one_run_after_another_on_its_address() -> None:
    deaths: queue.Queue = queue.Queue()
    tracker = Tracker("127.0.0.1", 1, deaths.put)
    try:
        first, second = tracker.begin(), tracker.begin()
    finally:
        tracker.close()
    assert first["dmlc_tracker_uri"] == second["dmlc_tracker_uri"] == "127.0.0.1"
    assert first["dmlc_tracker_port"] != second["dmlc_tracker_port"]
    assert_ended([tracker.pid])
    assert deaths.empty()


def test_its_death_is_noticed() -> None:
    deaths: queue.Queue = queue.Queue()
    tracker = Tracker("127.0.0.1", 1, deaths.put)
    os.kill(tracker.pid, signal.SIGKILL)
    assert "killed by SIGKILL" in deaths.get(timeout=30)
    with pytest.raises(TrainingError, match="killed by SIGKILL"):
        tracker.begin()
    tracker.close()


def test_it_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert_ended([pid], 30)


def test_an_address_that_is_not_ours() -> None:
    tracker = Tracker("203.0.113.7", 1, lambda _: None)
    try:
        with pytest.raises(TrainingError, match=r"203\.0\.113\.7"):
            tracker.begin()
    finally:
        tracker.close()
