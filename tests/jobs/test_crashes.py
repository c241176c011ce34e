"""SIGKILL of whoever acts on a job at every point of every step; then the job is asked for again, and swept."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sqlalchemy import select, update

import shoal.jobs
from shoal.data import DataConnector
from shoal.jobs import load_training, parse_spec
from shoal.jobs.files import storage
from shoal.jobs.files.logs import log_path
from shoal.jobs.files.retention import discard_leftovers
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import JobStep
from shoal.jobs.results import JobResult
from shoal.state import Store, home
from shoal.state.schema import JOB_ENDED, Job, JobState, Lock, Promotion, PromotionState
from shoal.training.locations import MARKER
from tests.support.fake_ray_head import FakeHead, FakeJob
from tests.support.job_store import POOL, add_pool
from tests.support.killed_job_operations import JOB_ID, MODEL, Scene, act, points, publish

pytestmark = pytest.mark.crash

(
    ASK,
    HAND_OVER,
    ADMIT,
    SEND,
    TOUCH,
    START,
    TAKE,
    BEAT,
    NOTE_RUN,
    NOTE_CHOICE,
    FREE,
    PUBLISH,
    NOTE_SAVED,
    *_,
    END,
    STOP,
    TIDY,
    COLLECT,
) = JobStep
PROMOTING = (JobStep.LOCK, JobStep.SETTLE, JobStep.INTEND, JobStep.PROMOTE, JobStep.CONFIRM, JobStep.UNLOCK)
SETTLED = (PromotionState.CONFIRMED, PromotionState.WITHDRAWN)
NOWHERE = "nowhere"


class Stage:
    """A store with a pool, its head, and a job that may be asked for."""

    def __init__(self, head: FakeHead, tracking: Path) -> None:
        self.head = head
        self.tracking = tracking
        self.tracked = False
        self.model = f"model-{uuid.uuid4().hex}"

    def scene(self) -> Scene:
        """Ask as a task does that runs anew: it stages its data again."""
        random = np.random.default_rng(0)
        frame = pd.DataFrame({"a": random.random(50), "b": random.random(50)})
        data = DataConnector.from_dataframe(frame.assign(y=frame["a"])).to_spec()
        spec = {
            "dataset": data.model_dump(mode="json"),
            "input_cols": ["a", "b"],
            "label_col": "y",
            "n_estimators": 3,
            "params": {"nthread": 1},
            "run_config": {"job_id": JOB_ID, "pool_name": POOL},
            "tracking": None,
        }
        if self.tracked:
            held_out = pd.DataFrame({"a": random.random(50), "b": random.random(50)})
            held_out.assign(y=held_out["a"]).to_parquet(self.tracking / "holdout.parquet")
            spec["tracking"] = {"uri": f"sqlite:///{self.tracking / 'mlflow.db'}"}
            spec["register"] = {
                "model": self.model,
                "metric": "rmse",
                "holdout": {"paths": [str(self.tracking / "holdout.parquet")]},
            }
        return Scene(dict(os.environ), self.head.endpoint, spec)

    def row(self) -> Job | None:
        with Store().reading() as session:
            return session.scalars(select(Job).order_by(Job.attempt.desc()).limit(1)).first()

    def newest(self) -> FakeJob:
        """What the head knows of the newest attempt."""
        row = self.row()
        assert row is not None
        return self.head.jobs[Key(row.id, row.attempt).submission_id]

    def submitted(self) -> None:
        self.scene().ask()

    def waiting(self) -> None:
        """There was no room for it when it was asked for."""
        self.submitted()
        self.head.jobs.clear()
        with Store().transaction() as session:
            session.execute(update(Job).values(admitted_at=None))

    def submitted_tracked(self) -> None:
        self.tracked = True
        self.submitted()

    def running(self) -> None:
        """A driver has begun."""
        self.submitted()
        assert act(self.scene(), "driving", "before publish") is None
        self.newest().status = "RUNNING"

    def long_unasked(self) -> None:
        """A driver has begun, and nobody has asked for as long as a waiter leaves between two notes."""
        self.running()
        with Store().transaction() as session:
            session.execute(update(Job).values(last_polled_at=Job.last_polled_at - 60, last_polled_clock=None))

    def lost(self) -> None:
        """A driver has begun and was killed."""
        self.running()
        self.driver_died()

    def succeeded(self) -> None:
        self.submitted()
        self.drive()

    def drive(self) -> None:
        """Let the driver of the newest attempt do all its work."""
        assert act(self.scene(), "driving", NOWHERE) is not None
        self.newest().status = "SUCCEEDED"

    def driver_died(self) -> None:
        """Let Ray notice, and let the time pass after which a lock is free again whose holder died."""
        self.newest().status, self.newest().exit_code = "FAILED", -9
        with Store().transaction() as session:
            session.execute(update(Lock).values(expires_at=0))

    def settle(self) -> JobResult:
        """Ask again as a retried task does, have drivers run where the head was told to, collect, and sweep."""
        handle = self.scene().ask()
        if handle.status().state is JobState.PENDING:
            self.drive()
        result = handle.wait(on_log=None)
        discard_leftovers(Store())
        return result

    def left_over(self) -> list[str]:
        """Everything that should not be there, a sentence each."""
        said = [f"credentials {path.name}" for path in (home() / "credentials").iterdir()]
        said += [f"working folder {name}" for name in storage.left()]
        said += [f"half a file {path}" for path in (home() / "jobs").rglob("*") if unfinished(path)]
        with Store().reading() as session:
            rows = list(session.scalars(select(Job)))
            said += [f"lock {lock.name}" for lock in session.scalars(select(Lock))]
            promotions = session.scalars(select(Promotion))
            said += [f"promotion of {each.version} is {each.state}" for each in promotions if each.state not in SETTLED]
        said += [f"attempt {job.attempt} is {job.state}" for job in rows if job.state not in JOB_ENDED]
        staged = {location for job in rows for location in parse_spec(job.spec).staged()}
        return said + [f"staged data in {location}" for location in staged if Path(location).exists()]


def unfinished(path: Path) -> bool:
    """Whether a file was being written under another name than its own."""
    return path.is_file() and path.name not in ("model.ubj", "training.json", "driver.log", MARKER)


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
    "submitting": Case(
        nothing,
        (ASK, HAND_OVER, ADMIT, SEND),
        ("written ask", "after ask", "after admit", "after send"),
    ),
    "starting": Case(Stage.waiting, (ADMIT, SEND), ("written admit", "after admit", "after send")),
    "attaching": Case(Stage.running, (ASK,), ("written ask",)),
    "waiting": Case(Stage.long_unasked, (TOUCH,), ("written touch",)),
    "retrying": Case(Stage.lost, (ASK, END, TIDY, HAND_OVER, ADMIT, SEND), ("after end",), tried=(END, TIDY, SEND)),
    "driving": Case(
        Stage.submitted,
        (START, TAKE, NOTE_CHOICE, FREE, PUBLISH, END, TIDY),
        ("written start", "after start", "after free", "after publish", "written end", "after end"),
    ),
    "promoting": Case(
        Stage.submitted_tracked,
        (START, TAKE, NOTE_RUN, NOTE_CHOICE, FREE, PUBLISH, NOTE_SAVED, *PROMOTING, END, TIDY),
        ("after promote",),
        tried=(NOTE_RUN, NOTE_SAVED, *PROMOTING, END),
    ),
    "beating": Case(Stage.running, (BEAT,), ("written beat",)),
    "collecting": Case(Stage.succeeded, (COLLECT,), ("written collect",), tried=(COLLECT,)),
    "cancelling": Case(Stage.submitted, (END, STOP, TIDY), ("written end", "after end", "before tidy")),
    "sweeping": Case(Stage.lost, (END, TIDY), ("after end",)),
}
"""Every operation that changes a job."""


@pytest.fixture(scope="module")
def tracking(mlflow_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one MLflow database for the module."""
    folder = tmp_path_factory.mktemp("tracking")
    shutil.copy(mlflow_database, folder)
    return folder


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def either_store(request: pytest.FixtureRequest) -> Path:
    """A fresh home with its own store: on SQLite in `make test`, on both in `make soak`."""
    if request.param == "postgresql":
        request.getfixturevalue("on_postgresql")
    home: Path = request.getfixturevalue("fresh_home")
    return home


@pytest.fixture
def stage(either_store: Path, head: FakeHead, tracking: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")  # so that there is something to hand over
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    add_pool(Store())
    return Stage(head, tracking)


def matrix() -> list[Any]:
    return [
        pytest.param(operation, point, marks=[] if point in case.thin else [pytest.mark.long])
        for operation, case in CASES.items()
        for point in case.points()
    ]


@pytest.mark.parametrize(("operation", "point"), matrix())
def test_killed(stage, operation, point):
    case = CASES[operation]
    case.prepare(stage)

    assert act(stage.scene(), operation, point) is None

    before = stage.row()
    if START in case.steps or operation in ("attaching", "waiting", "beating"):  # whose driver was killed before
        stage.driver_died()
    result = stage.settle()

    assert stage.left_over() == []
    assert load_training(result).booster().num_boosted_rounds() == 3
    assert len(stage.head.jobs) == result.attempt
    if before is not None and before.state is JobState.SUCCEEDED and before.collected_at is None:
        assert result.attempt == before.attempt
    if stage.tracked:
        check_champion(stage, result)
        saved = point == "after note-saved" or point.partition(" ")[2] in (*PROMOTING, END)
        log = log_path(Key(JOB_ID, result.attempt)).read_text()
        assert ("not trained again: attempt 1 has saved" in log) is (saved and result.attempt == 2)


def check_champion(stage: Stage, result: JobResult) -> None:
    """The alias is on the newest of equal models that no other was better than: the first that got it."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{stage.tracking / 'mlflow.db'}")
    champion = client.get_model_version_by_alias(stage.model, "champion")
    assert float(champion.tags["holdout.rmse"]) == result.metrics["holdout-rmse"]


def test_half_a_model_goes_with_its_attempt(stage):
    """Killed when the model was written under another name and had not got its own yet."""
    stage.submitted()
    assert act(stage.scene(), "driving", "change model.ubj") is None
    assert [path for path in (home() / "jobs").rglob("*") if unfinished(path)]
    stage.driver_died()

    assert stage.settle().attempt == 2
    assert stage.left_over() == []


def test_an_attempt_has_one_driver(stage):
    """One that comes second finds that it is not wanted, though the first is dead."""
    stage.submitted()
    assert act(stage.scene(), "driving", f"after {START}") is None
    first = stage.row()

    seen = act(stage.scene(), "driving", NOWHERE)

    assert seen is not None
    assert not {f"after {PUBLISH}", f"after {END}"} & set(seen)
    assert stage.row().driver == first.driver


@pytest.mark.parametrize("operation", CASES)
def test_every_step_of_an_operation_is_listed(stage, operation):
    """A step that an operation goes through, and the matrix does not know of, fails here."""
    case = CASES[operation]
    case.prepare(stage)
    seen = act(stage.scene(), operation, NOWHERE)
    assert seen is not None
    if BEAT not in case.steps:  # a slow driver's heart beats once more
        seen = [point for point in seen if point not in points(BEAT)]
    assert sorted(seen) == sorted(points(*case.steps))


def test_every_step_is_tried():
    assert {point for case in CASES.values() for point in case.points()} == set(points(*JobStep))


def test_every_transaction_is_a_step():
    """What changes a job goes through `shoal.jobs.journal.steps`."""
    modules = Path(shoal.jobs.__file__).parent.rglob("*.py")
    assert [path.name for path in modules if re.search(r"tore\.transaction\(", path.read_text())] == []


def test_a_model_is_complete_or_absent(fresh_home, tmp_path, head):
    """Killed before every change of a file or folder, in turn, until there is none left to be killed before."""
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        scene = Scene(dict(os.environ), head.endpoint, {"folder": str(folder)})
        survived = act(scene, "publishing", f"change {number}") is not None
        if (folder / "model.ubj").exists():
            assert (folder / "model.ubj").read_bytes() == MODEL
            assert json.loads((folder / "training.json").read_text())["rows"] == 1
        publish(scene)
        assert (folder / "model.ubj").read_bytes() == MODEL
        if survived:
            break
    assert number > 4  # two files, each opened under another name and renamed
