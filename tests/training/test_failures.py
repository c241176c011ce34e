"""A worker, the tracker, the driver or a node ends at any stage: the first cause is told, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import TrainingError, WorkerLostError
from shoal.training import boosting
from shoal.training.gang.gang import Gang
from shoal.training.request import TrainRequest
from tests.training.ray_cluster import COLUMNS, TwoNodes, alive
from tests.training.sabotage import Sabotage
from tests.waiting import wait_until

pytestmark = pytest.mark.ray

STAGES = ["import", "matrix", "round"]
# Ends a test that hangs; the failures here were told within a second.
HANG_SECONDS = 60


class Attempt:
    """A training that one worker sabotages."""

    def __init__(self, rows: Path, sabotage: Sabotage) -> None:
        self.rows = rows
        self.sabotage = sabotage
        self.gang: Gang | None = None

    def train(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def on_all(training: Any, gang: Gang, name: str, args: Sequence[Any] = ()) -> list:
            self.gang = gang
            return gang.run(self.sabotage, [(name, arg) for arg in args], timeout=HANG_SECONDS)

        monkeypatch.setattr(boosting._Training, "_on_all", on_all)
        boosting.train(
            TrainRequest(
                dataset={"paths": (str(self.rows),)}, input_cols=tuple(COLUMNS), label_col="y", n_estimators=20
            )
        )

    def when_reached(self, act: Callable[[Gang], None]) -> threading.Thread:
        """Acts, in a thread, once the worker has come to its stage."""

        def wait_and_act() -> None:
            wait_until(self.sabotage.reached.exists, "the stage", HANG_SECONDS)
            assert self.gang is not None
            act(self.gang)

        thread = threading.Thread(target=wait_and_act)
        thread.start()
        return thread

    def assert_nothing_left(self) -> None:
        assert self.gang is not None
        tracker = self.gang._companions["xgboost"]
        pids = [*(worker.pid for worker in self.gang.workers), tracker.pid]
        # Their sockets are closed before the error is raised; the rest of an exit takes the kernel a few milliseconds.
        wait_until(lambda: not alive(pids), "workers and tracker to end", 5)


@pytest.fixture
def attempt(driver: TwoNodes, rows: Path, tmp_path: Path) -> Callable[[str, str], Attempt]:
    return lambda stage, deed: Attempt(rows, Sabotage(1, stage, deed, tmp_path / "reached"))


@pytest.mark.parametrize("stage", STAGES)
def test_worker_killed(attempt: Callable, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempted = attempt(stage, "kill")
    with pytest.raises(WorkerLostError, match=r"rank 1 \(node b, pid \d+\) was lost"):
        attempted.train(monkeypatch)
    attempted.assert_nothing_left()


@pytest.mark.parametrize("stage", STAGES)
def test_worker_raises(attempt: Callable, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempted = attempt(stage, "raise")
    with pytest.raises(TrainingError, match=r"rank 1 \(node b, pid \d+\) failed: ValueError: boom") as caught:
        attempted.train(monkeypatch)
    assert any("in act" in note for note in caught.value.__notes__)
    attempted.assert_nothing_left()


@pytest.mark.parametrize("stage", ["import", "round"])
def test_tracker_killed(attempt: Callable, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempted = attempt(stage, "hang")
    thread = attempted.when_reached(lambda gang: os.kill(gang._companions["xgboost"].pid, signal.SIGKILL))
    with pytest.raises(TrainingError, match=r"tracker process \(pid \d+\) ended: killed by signal 9"):
        attempted.train(monkeypatch)
    thread.join()
    attempted.assert_nothing_left()


@pytest.mark.parametrize("stage", ["matrix"])
def test_node_killed(driver: TwoNodes, attempt: Callable, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempted = attempt(stage, "hang")
    thread = attempted.when_reached(lambda gang: driver.kill_second())
    try:
        with pytest.raises(WorkerLostError, match=r"rank 1 \(node b, pid \d+\) was lost: its node's raylet ended"):
            attempted.train(monkeypatch)
        thread.join()
        attempted.assert_nothing_left()
    finally:
        driver.replace_second()


DRIVER = """
import json, sys, threading
from pathlib import Path
import ray
from shoal.training import boosting
from shoal.training.request import TrainRequest
from tests.training.sabotage import Sabotage

address, rows, stage, reached, columns = json.loads(sys.argv[1])
ray.init(address=address, log_to_driver=False, logging_level="ERROR")

def on_all(training, gang, name, args=()):
    if name == "prepare":
        print(json.dumps([*(worker.pid for worker in gang.workers), gang._companions["xgboost"].pid]), flush=True)
    return gang.run(Sabotage(1, stage, "hang", Path(reached)), [(name, arg) for arg in args])

boosting._Training._on_all = on_all
boosting.train(TrainRequest(dataset={"paths": (rows,)}, input_cols=tuple(columns), label_col="y"))
"""


@pytest.mark.parametrize("stage", STAGES)
def test_driver_killed(two_nodes: TwoNodes, rows: Path, tmp_path: Path, stage: str) -> None:
    from shoal.training.gang.shared import end_gangs

    end_gangs()
    reached = tmp_path / "reached"
    args = json.dumps([two_nodes.address, str(rows), stage, str(reached), COLUMNS])
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    process = subprocess.Popen([sys.executable, "-c", DRIVER, args], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    pids = json.loads(process.stdout.readline())
    wait_until(reached.exists, "the stage", HANG_SECONDS)
    assert alive(pids) == pids
    process.kill()
    process.wait()
    wait_until(lambda: not alive(pids), "workers and tracker to end", HANG_SECONDS)
