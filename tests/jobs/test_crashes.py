"""SIGKILL of whoever acts on a job at every point of every step; then the job is asked for again, and swept."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import shoal.jobs
from shoal.data import DataConnector
from shoal.jobs import attempts, load_training
from shoal.jobs.leftovers import discard_leftovers
from shoal.jobs.spec import JobResult
from shoal.jobs.steps import JobStep
from shoal.state import Store, home
from shoal.state.schema import JOB_ENDED, Job, JobState
from tests.jobs.act import JOB_ID, Scene, act, points
from tests.jobs.conftest import POOL, add_pool
from tests.jobs.fake_head import FakeHead

pytestmark = pytest.mark.crash

ASK, HAND_OVER, SEND, TOUCH, START, TAKE, NOTE_RUN, PUBLISH, LOCK, PROMOTE, UNLOCK, END, STOP, TIDY, COLLECT = JobStep
NOWHERE = "nowhere"


class Stage:
    """A store with a pool, its head, and a job that may be asked for."""

    def __init__(self, head: FakeHead, spec: dict[str, Any]) -> None:
        self.head = head
        self.scene = Scene(dict(os.environ), head.endpoint, spec)

    def row(self) -> Job:
        return attempts.latest(Store(), JOB_ID)

    def asked(self) -> bool:
        return bool(shoal.jobs.list_jobs())

    def submitted(self) -> None:
        self.scene.ask()

    def running(self) -> None:
        """A driver has begun."""
        self.submitted()
        assert act(self.scene, "driving", "after take") is None
        self.head.jobs[f"{JOB_ID}-1"].status = "RUNNING"

    def lost(self) -> None:
        """A driver has begun and was killed."""
        self.running()
        self.driver_died()

    def succeeded(self) -> None:
        self.submitted()
        self.drive()

    def drive(self) -> None:
        """Let the driver of the newest attempt do all its work."""
        assert act(self.scene, "driving", NOWHERE) is not None
        self.head.jobs[f"{JOB_ID}-{self.row().attempt}"].status = "SUCCEEDED"

    def driver_died(self) -> None:
        job = self.head.jobs[f"{JOB_ID}-{self.row().attempt}"]
        job.status, job.exit_code = "FAILED", -9

    def settle(self) -> JobResult:
        """Ask again as a retried task does, have drivers run where the head was told to, and collect."""
        handle = self.scene.ask()
        if handle.status().state is JobState.PENDING:
            self.drive()
        result = handle.wait(on_log=None)
        discard_leftovers(Store())
        return result

    def left_over(self) -> list[str]:
        """Everything that should not be there, a sentence each."""
        said = [f"credentials {path.name}" for path in (home() / "credentials").iterdir()]
        said += [f"staged data {path.name}" for path in (home() / "staging").iterdir()]
        said += [f"half a file {path.name}" for path in (home() / "jobs").rglob("*") if unfinished(path)]
        with Store().reading() as session:
            said += [
                f"attempt {job.attempt} is {job.state}" for job in session.query(Job) if job.state not in JOB_ENDED
            ]
        return said


def unfinished(path: Path) -> bool:
    """Whether a file was being written under another name than its own."""
    return path.is_file() and path.name not in ("model.ubj", "training.json", "driver.log")


@dataclass(frozen=True)
class Case:
    """An operation, and what the job is like before it.

    Attributes:
        prepare: Makes the job.
        steps: All that the operation goes through.
        tried: Steps that are tried; the others are those of another operation.
        thin: Points that `make test` tries.
    """

    prepare: Callable[[Stage], None]
    steps: tuple[JobStep, ...]
    thin: tuple[str, ...]
    tried: tuple[JobStep, ...] | None = None

    def points(self) -> list[str]:
        return points(*(self.tried or self.steps))


def nothing(_: Stage) -> None:
    pass


CASES = {
    "submitting": Case(nothing, (ASK, HAND_OVER, SEND), ("written ask", "after ask", "before send", "after send")),
    "attaching": Case(Stage.running, (ASK, TOUCH), ("written touch",)),
    "retrying": Case(
        Stage.lost, (ASK, TOUCH, END, TIDY, HAND_OVER, SEND), ("written end", "after end"), tried=(END, TIDY, SEND)
    ),
    "driving": Case(
        Stage.submitted,
        (START, TAKE, PUBLISH, END, TIDY),
        ("before start", "written start", "after start", "after publish", "written end", "after end"),
    ),
    "promoting": Case(
        Stage.submitted,
        (START, TAKE, NOTE_RUN, PUBLISH, LOCK, PROMOTE, UNLOCK, END, TIDY),
        ("after promote",),
        tried=(NOTE_RUN, LOCK, PROMOTE, UNLOCK, END),
    ),
    "collecting": Case(Stage.succeeded, (ASK, TOUCH, COLLECT), ("written collect",), tried=(TOUCH, COLLECT)),
    "cancelling": Case(Stage.submitted, (END, STOP, TIDY), ("written end", "after end", "before tidy")),
    "sweeping": Case(Stage.lost, (END, TIDY), ("after end",)),
}
"""Every operation that changes a job."""


def document(tmp_path: Path) -> dict[str, Any]:
    """A job whose data are staged and whose tracking server wants a password."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"a": random.random(50), "b": random.random(50)})
    staged = DataConnector.from_dataframe(frame.assign(y=frame["a"]))
    return {
        "dataset": staged.to_spec().model_dump(mode="json"),
        "input_cols": ["a", "b"],
        "label_col": "y",
        "n_estimators": 3,
        "params": {"nthread": 1},
        "run_config": {"job_id": JOB_ID, "pool_name": POOL},
        "tracking": None,
    }


@pytest.fixture
def stage(either_store: Path, head: FakeHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    add_pool(Store())
    return Stage(head, document(tmp_path))


def matrix() -> list[Any]:
    return [
        pytest.param(operation, point, marks=[] if point in case.thin else [pytest.mark.long])
        for operation, case in CASES.items()
        for point in case.points()
    ]


@pytest.mark.parametrize(("operation", "point"), matrix())
def test_killed(stage, operation, point):
    CASES[operation].prepare(stage)

    assert act(stage.scene, operation, point) is None

    if operation in ("driving", "promoting"):
        stage.driver_died()
    before = stage.row() if stage.asked() else None
    result = stage.settle()

    assert stage.left_over() == []
    assert load_training(result).booster().num_boosted_rounds() == 3
    if before is not None and before.state is JobState.SUCCEEDED and before.collected_at is None:
        assert (result.attempt, stage.head.submissions) == (before.attempt, before.attempt)
