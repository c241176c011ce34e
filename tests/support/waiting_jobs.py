"""Jobs that wait in the queue of a pool until they are cancelled: they need no Ray."""

from __future__ import annotations

import time
from typing import Any

from shoal.errors import JobCancelledError
from shoal.jobs import FlowTask, JobResult, attach
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.spec import AnyJobSpec
from shoal.state import Store
from shoal.state.schema import JOB_ACTIVE, JOB_ENDED, Job
from tests.support.waiting import wait_until


def spec_of(name: str) -> dict[str, Any]:
    """The spec of a job with this id."""
    dataset = {"paths": ["x.parquet"]}
    return {"dataset": dataset, "input_cols": ["x"], "label_col": "y", "run_config": {"job_id": name}}


def submit(spec: AnyJobSpec, *, holder: str, task: FlowTask, **_: Any) -> WaitingJob:
    """In place of `shoal.jobs.submit`."""
    name, document = str(spec.run_config.job_id), {**spec.document(), "fingerprint": "1"}
    job = attempts.ask(
        Store(), Order(name, str(spec.run_config.pool_name), holder, document, {}, None, task=task), time.time()
    )
    with Store().transaction() as session:
        session.get_one(Job, (job.id, job.attempt)).queued_at = time.time()
    return WaitingJob(Key(job.id, job.attempt))


class WaitingJob:
    """In place of `shoal.jobs.JobHandle`."""

    def __init__(self, key: Key) -> None:
        self.job_id, self.attempt = key.job_id, key.attempt
        self._key, self.was_collected = key, False

    def wait(self, **_: Any) -> JobResult:
        job = wait_until(lambda: (job := attempts.load(Store(), self._key)).state in JOB_ENDED and job, "its end", 120)
        raise JobCancelledError(f"cancelled: {job.error}", permanent=bool(job.error_is_permanent))

    def cancel(self, reason: str, **_: Any) -> None:
        attach(self.job_id, self.attempt).cancel(reason)


def unfinished() -> set[str]:
    """The ids of the jobs that wait."""
    return {job.id for job in attempts.newest(Store(), pool=None, states=JOB_ACTIVE, limit=1000)}


def wait_for(*names: str) -> None:
    """Wait until exactly these jobs wait."""
    wait_until(lambda: unfinished() == set(names), f"the jobs {names}")
