"""A process that does something with a job and dies by SIGKILL at one point of one step.

It is forked from a server that has imported what drivers need and has used none of it: imports would take seconds each
of many times, and a process that has trained has threads, which no fork takes along.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection

from shoal import jobs
from shoal.jobs import attempts, submission
from shoal.jobs.handle import JobHandle
from shoal.jobs.steps import At, JobStep
from shoal.pool.endpoint import Endpoint
from shoal.state import Store, steps

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
        return JobHandle(store, attempts.latest(store, JOB_ID), endpoint_of=lambda _: self.endpoint)


def drive(scene: Scene) -> None:
    """Be the driver of the newest attempt, with everything real but the gang."""
    from shoal.jobs import driver, gate
    from shoal.training import boosting
    from tests.jobs.test_driver import plain_xgboost

    driver.connect = lambda gcs: None
    boosting.train = plain_xgboost
    gate._LOCK_TTL_S = 1.0  # what a killed driver leaves locked is free again soon
    key = attempts.Key(JOB_ID, attempts.latest(Store(), JOB_ID).attempt)
    sys.argv = ["driver", key.job_id, str(key.attempt)]
    driver.main()


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "submitting": Scene.ask,
    "attaching": Scene.ask,
    "retrying": Scene.ask,
    "driving": drive,
    "promoting": drive,
    "collecting": lambda scene: scene.ask().wait(on_log=None),
    "cancelling": lambda scene: scene.found().cancel(),
    "sweeping": lambda scene: scene.found().end_if_lost(),
}


def act(scene: Scene, operation: str, die_at: str) -> list[str] | None:
    """Carry out an operation in a fork; None where it was killed, else the points that it went through."""
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
        seen[point := f"{at} {step}"] = None
        if point == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    steps.passing = passing
    try:
        OPERATIONS[operation](scene)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    writing.send(list(seen))
    os._exit(0)  # threads of MLflow's may hang at the interpreter's exit
