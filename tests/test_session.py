"""A session of tests takes down what it has started, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import ROOT
from tests.support.two_node_cluster import TwoNodes, alive
from tests.support.waiting import wait_until

SESSION = """
import time
from pathlib import Path
import pytest

HERE = Path(__file__).parent

@pytest.fixture(scope="session")
def pool():
    (HERE / "up").touch()
    yield
    (HERE / "up").rename(HERE / "down")

def test_waits(pool):
    time.sleep(600)
"""


@pytest.mark.processes
def test_a_session_that_is_terminated_takes_its_pools_down(tmp_path: Path) -> None:
    file = tmp_path / "test_waits.py"
    file.write_text(SESSION)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(file)]
    session = subprocess.Popen([sys.executable, "-m", "pytest", *options], cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_until((tmp_path / "up").exists, "the session to run its test", 120)
    session.send_signal(signal.SIGTERM)
    assert session.wait(120) == pytest.ExitCode.INTERRUPTED
    assert (tmp_path / "down").exists()


def test_two_nodes_that_fail_to_start_leave_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, str]] = []

    def fail(head_node_args: dict[str, str], **_: object) -> None:
        folder = head_node_args["temp_dir"]
        started.append((subprocess.Popen([sys.executable, "-c", "input()", folder], stdin=subprocess.PIPE).pid, folder))
        wait_until(lambda: folder in " ".join(psutil.Process(started[0][0]).cmdline()), "the process to have its name")
        raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr("ray.cluster_utils.Cluster", fail)
    with pytest.raises(RuntimeError, match="timed out during startup"):
        TwoNodes()
    [(pid, folder)] = started
    wait_until(lambda: not alive([pid]), "the process to end")
    assert not Path(folder).exists()
