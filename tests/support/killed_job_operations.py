"""A process that does something with a job and dies by SIGKILL at one point of one step.

It is forked from a server that has imported what drivers need and has used none of it: imports would take seconds each
of many times, and a process that has trained has threads, which no fork takes along.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

from shoal import jobs
from shoal.jobs import submission
from shoal.jobs.handle import JobHandle
from shoal.jobs.journal import attempts
from shoal.jobs.journal.steps import At, JobStep
from shoal.jobs.reconcile import rounds
from shoal.jobs.reconcile.look import Target
from shoal.pool.endpoint import Endpoint
from shoal.state import Store, store

HOLDER = "airflow:dag/run"
JOB_ID = "killed"

ACTS = frozenset(
    {JobStep.HAND_OVER, JobStep.SEND, JobStep.TAKE, JobStep.PUBLISH, JobStep.PROMOTE, JobStep.STOP, JobStep.TIDY}
)
"""Steps that are no transaction, and have no point in the middle."""

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["pytest", "shoal.jobs.driver", "shoal.data", "psycopg", "mlflow", "xgboost", "sklearn"])


def points(*of: JobStep) -> list[str]:
    """All points of some steps, as ``"written ask"``."""
    return [f"{at} {step}" for step in of for at in At if not (step in ACTS and at is At.WRITTEN)]


@dataclass(frozen=True)
class Scene:
    """What the acting process is given: everything that a test sets up in its own."""

    environment: dict[str, str]
    endpoint: Endpoint
    spec: dict[str, object]

    def ask(self) -> JobHandle:
        """Submit the job, or find it."""
        return submission.submit(jobs.parse_spec(self.spec), holder=HOLDER, endpoint_of=lambda _: self.endpoint)

    def found(self) -> JobHandle:
        """The job's newest attempt."""
        store = Store()
        job = attempts.latest(store, JOB_ID)
        target = Target(store, attempts.Key(job.id, job.attempt), job.pool, find_endpoint=lambda _: self.endpoint)
        return JobHandle(target, job)


def drive(scene: Scene) -> None:
    """Be the driver of the newest attempt, with everything real but the gang."""
    from shoal.jobs.driver import main as driver
    from shoal.training.boosting import engine
    from shoal.training.boosting.request import TrainRequest, TrainResult
    from tests.jobs.driver.test_main import plain_xgboost

    driver.connect = lambda gcs, runtime_env: None

    def train(request: TrainRequest, *, keep_gpu_choice: Callable[[bool], bool], **_: object) -> TrainResult:
        keep_gpu_choice(False)
        return plain_xgboost(request)

    engine.train = train
    key = attempts.Key(JOB_ID, attempts.latest(Store(), JOB_ID).attempt)
    sys.argv = ["driver", key.job_id, str(key.attempt)]
    driver.main()


def beat(_: Scene) -> None:
    """Be the thread of heartbeats of the newest attempt's driver, at its first look."""
    from shoal.jobs.driver.attempt_metrics import MetricSeries
    from shoal.jobs.driver.heartbeats import HeartbeatThread
    from shoal.training.run_config import RunConfig

    store = Store()
    key = attempts.Key(JOB_ID, attempts.latest(store, JOB_ID).attempt)
    HeartbeatThread(store, key, MetricSeries(key), RunConfig()).look()


MODEL = b"a model, as a library writes it"


def publish(scene: Scene) -> None:
    """Write what a training returned."""
    from shoal.jobs.files import artifacts
    from shoal.training.boosting.request import TrainResult
    from shoal.training.locations import Claim

    trained = TrainResult(
        model=MODEL,
        eval_results={},
        rounds=1,
        rows=1,
        num_workers=1,
        threads_per_worker=1,
        seconds=0.5,
        workers=(),
    )
    artifacts.save(str(scene.spec["folder"]), Claim(JOB_ID, "the test"), trained)


_CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate"}
"""Events by which Python tells of a change of files, before it makes it; beside them ``open`` for writing."""


def _die_before_change(which: str, under: str) -> None:
    """Have this process killed before it changes a file.

    Args:
        which: The number of the change, from 1, or the end of the path that a file is renamed to.
        under: A part of the paths that count.
    """
    changes = itertools.count(1)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        written = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        # A relative path is below a folder that was opened before, whose descriptor the event does not contain.
        inside = under in path or (path and not os.path.isabs(path))
        if not (written or event in _CHANGES) or not inside:
            return
        renamed_to_it = event == "os.rename" and str(arguments[1]).endswith(which)
        if which == str(next(changes)) or renamed_to_it:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "submitting": Scene.ask,
    "attaching": Scene.ask,
    "starting": lambda scene: rounds.start_if_room(scene.found().target),
    "waiting": lambda scene: scene.found().status(),
    "retrying": Scene.ask,
    "driving": drive,
    "promoting": drive,
    "collecting": lambda scene: scene.ask().wait(on_log=None),
    "cancelling": lambda scene: scene.found().cancel(),
    "publishing": publish,
    "beating": beat,
    "sweeping": lambda scene: rounds.host_round(scene.found().target),
}


def act(scene: Scene, operation: str, die_at: str) -> list[str] | None:
    """Carry out an operation in a fork; None where it was killed, else the points that it went through.

    Args:
        scene: What the test has set up.
        operation: One of `OPERATIONS`.
        die_at: A point, or ``change N`` or ``change NAME``: before the N-th change of a file, before one gets its name.
    """
    reading, writing = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_carry_out, args=(scene, operation, die_at, writing))
    process.start()
    writing.close()
    seen: list[str] | None = None
    with reading, contextlib.suppress(EOFError):
        seen = reading.recv()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), f"{operation} ended with {process.exitcode}"
    return seen if process.exitcode == 0 else None


def _carry_out(scene: Scene, operation: str, die_at: str, writing: Connection) -> None:
    os.environ.clear()
    os.environ.update(scene.environment)
    seen: dict[str, None] = {}

    def passing(step: StrEnum, at: At) -> None:
        if not isinstance(step, JobStep):  # a driver renews its lease, which is a pool's step
            return
        seen[point := f"{at} {step}"] = None
        if point == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    store.passing = passing
    if die_at.startswith("change "):
        _die_before_change(die_at.removeprefix("change "), str(scene.spec.get("folder", f"/jobs/{JOB_ID}/")))
    try:
        OPERATIONS[operation](scene)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    writing.send(list(seen))
    os._exit(0)  # threads of MLflow's may hang at the interpreter's exit
