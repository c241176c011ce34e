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

import pyarrow.parquet as pq
import pytest

from shoal.boosting_libraries import Framework
from shoal.errors import DataError, TrainingError, WorkerLostError
from shoal.training.boosting import engine
from shoal.training.boosting.request import TrainRequest
from shoal.training.gang.gang import Gang
from tests.support.two_node_cluster import COLUMNS, TwoNodes, alive, assert_ended, write_rows
from tests.support.waiting import wait_until
from tests.training.sabotage import FIRST, Sabotage

pytestmark = pytest.mark.ray

STAGES = ["import", "matrix", "round"]
# Ends a test that hangs; the failures here were told within a second.
HANG_SECONDS = 60


SOAK = pytest.mark.long
"""For what fails at one stage as at another: the gang notices it, whatever the workers are at."""


def request(rows: Path, framework: Framework) -> TrainRequest:
    return TrainRequest(
        framework=framework,
        dataset={"paths": (str(rows),)},
        input_cols=tuple(COLUMNS),
        label_col="y",
        n_estimators=20,
    )


class Attempt:
    """A training that one worker sabotages."""

    def __init__(self, rows: Path, sabotage: Sabotage) -> None:
        self.rows = rows
        self.sabotage = sabotage
        self.gang: Gang | None = None

    def train(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def on_all(training: Any, gang: Gang, name: str, args: Sequence[tuple[Any, ...]], **how: Any) -> list:
            self.gang = gang
            return gang.run(self.sabotage, [(name, *each) for each in args], timeout=HANG_SECONDS, **how)

        monkeypatch.setattr(engine.Training, "_on_all", on_all)
        engine.train(request(self.rows, self.sabotage.framework))

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
        pids = [
            *(worker.pid for worker in self.gang.workers),
            *(sidecar.pid for sidecar in self.gang._sidecars.values()),
        ]
        # Their sockets are closed before the error is raised; the rest of an exit takes the kernel a few milliseconds.
        assert_ended(pids)


@pytest.fixture
def attempt(driver: TwoNodes, rows: Path, tmp_path: Path) -> Callable[[str, str, Framework], Attempt]:
    return lambda stage, deed, framework="xgboost": Attempt(
        rows, Sabotage(framework, 1, stage, deed, tmp_path / "reached")
    )


@pytest.mark.parametrize(
    ("framework", "stage"),
    [
        pytest.param("xgboost", "import", marks=SOAK),
        pytest.param("xgboost", "matrix", marks=SOAK),
        ("xgboost", "round"),
        ("lightgbm", "matrix"),
        pytest.param("lightgbm", "round", marks=SOAK),
    ],
)
def test_worker_killed(attempt: Callable, framework: Framework, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # LightGBM's other worker hangs in its library's own code, and is killed there.
    attempted = attempt(stage, "kill", framework)
    with pytest.raises(WorkerLostError, match=r"rank 1 \(node b, pid \d+\) was lost"):
        attempted.train(monkeypatch)
    attempted.assert_nothing_left()


@pytest.mark.parametrize(
    ("framework", "stage"),
    [
        pytest.param("xgboost", "import", marks=SOAK),
        ("xgboost", "matrix"),
        pytest.param("xgboost", "round", marks=SOAK),
        ("lightgbm", "round"),
    ],
)
def test_worker_raises(attempt: Callable, framework: Framework, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempted = attempt(stage, "raise", framework)
    with pytest.raises(TrainingError, match=r"rank 1 \(node b, pid \d+\) failed: ValueError: boom") as caught:
        attempted.train(monkeypatch)
    assert any("in act" in note for note in caught.value.__notes__)
    attempted.assert_nothing_left()


@pytest.mark.parametrize("stage", [pytest.param("import", marks=SOAK), "round"])
def test_tracker_killed(attempt: Callable, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempted = attempt(stage, "hang")
    thread = attempted.when_reached(lambda gang: os.kill(gang._sidecars["xgboost"].pid, signal.SIGKILL))
    with pytest.raises(TrainingError, match=r"tracker process \(pid \d+\) was killed by SIGKILL"):
        attempted.train(monkeypatch)
    thread.join()
    attempted.assert_nothing_left()


@pytest.mark.parametrize(("framework", "stage"), [("xgboost", "matrix"), pytest.param("lightgbm", "round", marks=SOAK)])
def test_node_killed(
    driver: TwoNodes, attempt: Callable, framework: Framework, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempted = attempt(stage, "hang", framework)
    thread = attempted.when_reached(lambda gang: driver.kill_second())
    try:
        with pytest.raises(WorkerLostError, match=r"rank 1 \(node b, pid \d+\) was lost: the raylet of its node ended"):
            attempted.train(monkeypatch)
        thread.join()
        attempted.assert_nothing_left()
    finally:
        driver.replace_second()


def remove(path: Path) -> None:
    path.unlink()


def corrupt(path: Path) -> None:
    chunk = pq.read_metadata(path).row_group(1).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    raw = bytearray(path.read_bytes())
    raw[start : start + 200] = b"\xff" * 200
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("framework", "spoil", "told"),
    [
        ("xgboost", remove, r"part-1\.parquet is gone"),
        ("lightgbm", corrupt, r"part-1\.parquet, row group 1, is corrupt"),
    ],
)
def test_a_file_is_spoilt_after_it_was_planned(
    driver: TwoNodes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    framework: Framework,
    spoil: Callable[[Path], None],
    told: str,
) -> None:
    rows = write_rows(tmp_path / "rows")
    on_all = engine.Training._on_all

    def spoilt(training: Any, gang: Any, name: str, *args: Any, **how: Any) -> Any:
        if name == FIRST[framework]:
            spoil(rows / "part-1.parquet")
        return on_all(training, gang, name, *args, **how)

    monkeypatch.setattr(engine.Training, "_on_all", spoilt)
    with pytest.raises(DataError, match=told + r".*\[rank \d"):
        engine.train(request(rows, framework))


DRIVER = """
import json, sys, threading
from pathlib import Path
import ray
from shoal.training.boosting import engine
from shoal.training.boosting.request import TrainRequest
from tests.training.sabotage import Sabotage

address, rows, stage, reached, columns = json.loads(sys.argv[1])
ray.init(address=address, log_to_driver=False, logging_level="ERROR")

def on_all(training, gang, name, args, **how):
    if name == "prepare":
        print(json.dumps([*(worker.pid for worker in gang.workers), gang._sidecars["xgboost"].pid]), flush=True)
    return gang.run(Sabotage("xgboost", 1, stage, "hang", Path(reached)), [(name, *each) for each in args], **how)

engine.Training._on_all = on_all
engine.train(TrainRequest(dataset={"paths": (rows,)}, input_cols=tuple(columns), label_col="y"))
"""


@pytest.mark.parametrize("stage", [pytest.param("import", marks=SOAK), pytest.param("matrix", marks=SOAK), "round"])
def test_driver_killed(two_nodes: TwoNodes, rows: Path, tmp_path: Path, stage: str) -> None:
    from shoal.training.gang.gang import end_gangs

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
    assert_ended(pids, HANG_SECONDS)
