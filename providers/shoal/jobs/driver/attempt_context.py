"""Define `AttemptContext`, the data that the driver of any kind of job needs, such as the store and the MLflow run."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import JobError, RegistryError, ShoalError
from shoal.jobs.driver.attempt_metrics import MetricSeries
from shoal.jobs.files import artifacts
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import patiently
from shoal.jobs.mlflow_run import Run, is_unreachable, retrying_briefly
from shoal.jobs.results import JobResult, JobTimes
from shoal.lazy_imports import mlflow
from shoal.secrets.redaction import redact_value
from shoal.state import Store
from shoal.state.schema import JOB_ENDED, Job
from shoal.training.locations import Claim
from shoal.training.reporting import OnProgress


class Stopwatch:
    """Stopwatch that measures the seconds of each step of one attempt. The driver creates the stopwatch when the driver
    starts.

    Args:
        job: The attempt's row.
        now: Time of the driver's start in seconds since the epoch.
        monotonic: Function that returns the seconds of a clock that never jumps.
    """

    def __init__(self, job: Job, now: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        sent_at = job.admitted_at or job.created_at
        self._queue_s = max(0.0, sent_at - job.created_at)
        self._before_s = max(0.0, now - sent_at)
        self._monotonic = monotonic
        self._begun = self._worked_until = monotonic()
        self._read_s: float | None = None
        self._train_s = self._search_s = 0.0
        self._score_s: float | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds since the driver's start."""
        return self._monotonic() - self._begun

    def worked(self, *, train_s: float, read_s: float | None = None) -> None:
        """Record that the workers have finished now, and how long they have read and trained."""
        self._worked_until = self._monotonic()
        self._read_s, self._train_s = read_s, train_s + self._search_s

    def searched(self, seconds: float) -> None:
        """Record that the workers have run the trials of a search for so long. They may train further."""
        self._search_s = seconds
        self.worked(train_s=0.0)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Measure the seconds of the `with` block, which compares the model with the champion.

        If there are several such blocks, their seconds are added up.
        """
        began = self._monotonic()
        try:
            yield
        finally:
            self._score_s = (self._score_s or 0.0) + self._monotonic() - began

    def times(self) -> JobTimes:
        """Return the seconds that each step has taken up to now, and print them to the job's log."""
        worked_s = (self._read_s or 0.0) + self._train_s
        times = JobTimes(
            queue=self._queue_s,
            start=max(0.0, self._before_s + self._worked_until - self._begun - worked_s),
            read=self._read_s,
            train=self._train_s,
            score=self._score_s,
            upload=max(0.0, self._monotonic() - self._worked_until - (self._score_s or 0.0)),
        )
        print(f"seconds: {times}", flush=True)
        return times


@contextmanager
def before_work(uri: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Say what to do if MLflow does not answer in the `with` block, which runs before the workers start.

    Args:
        uri: Tracking URI of the job's run.
        environment: Environment variables of the job, which may set the number of retries.

    Raises:
        JobError: MLflow does not answer, or rejects a request.
    """
    try:
        with retrying_briefly(environment):
            yield
    except Exception as error:
        is_away = is_unreachable(error)
        if isinstance(error, ShoalError) or not (is_away or isinstance(error, mlflow.MlflowException)):
            raise
        problem = "cannot be reached" if is_away else "rejects the request"
        raise JobError(
            f"no worker was started, because MLflow at {redact_value(uri)} {problem}: {type(error).__name__}: "
            f"{redact_value(str(error).strip())}. Check that its server runs and that the tracking URI is right, and "
            "run the job again"
        ) from error


@contextmanager
def saved_before(path: str) -> Iterator[None]:
    """Name the saved model in the error if the `with` block, which works with MLflow after the training, fails.

    Raises:
        JobError: MLflow does not answer, or rejects a request.
    """
    try:
        yield
    except Exception as error:
        is_away = isinstance(error, RegistryError) or is_unreachable(error)
        if isinstance(error, ShoalError) and not is_away:
            raise
        problem, advice = "MLflow cannot be reached", "Check that its server runs"
        if not is_away:
            problem, advice = "the work with MLflow failed", "Correct the cause"
            # The driver prints no traceback of a JobError.
            print(traceback.format_exc(), flush=True)
        raise JobError(
            f"the training has ended and its model is saved in {redact_value(path)}, but {problem}: "
            f"{type(error).__name__}: {redact_value(str(error).strip())}. {advice}, and run the job again, or load the "
            "model from that file"
        ) from error


@contextmanager
def only_printed(what: str) -> Iterator[None]:
    """Catch any exception of the `with` block, and print the text `what` and the exception."""
    try:
        yield
    except Exception as error:
        print(f"{what}: {error}", flush=True)


@dataclass(frozen=True)
class AttemptContext:
    """Data about one attempt that its driver passes to the code that trains or predicts.

    Attributes:
        store: Store that has the attempt's row.
        key: The attempt.
        run: MLflow run of the attempt; None if the job records nothing in MLflow.
        tags: MLflow tags that name the job, attempt, pool and holder.
        environment: Environment variables for the workers, which get them as arguments of their Ray actors.
        on_progress: Function that takes the training's latest progress, to store it in the job's row.
        metrics: Series of the attempt's metrics, in the store and in MLflow.
        on_trained: Function to call when the workers have finished and only work for the driver remains. The function
            ends the workers and lets the next job of the pool start.
        stopwatch: Measures the seconds of each step since the attempt started.
    """

    store: Store
    key: Key
    run: Run | None
    tags: dict[str, str]
    environment: dict[str, str] = field(repr=False)
    on_progress: OnProgress
    metrics: MetricSeries
    on_trained: Callable[[], None]
    stopwatch: Stopwatch

    def result(self, **fields: Any) -> JobResult:
        """Return the job's result: the given fields, and those that each attempt has."""
        return JobResult(
            job_id=self.key.job_id,
            attempt=self.key.attempt,
            seconds=self.stopwatch.seconds,
            mlflow_run_id=self.run.run_id if self.run else None,
            **fields,
        )

    def times(self) -> JobTimes:
        """Return the seconds that each step has taken up to now, print them, and log them to the MLflow run."""
        times = self.stopwatch.times()
        if self.run:
            # The model is saved by now, and these metrics must not lose it.
            with suppress(Exception):
                self.run.log_values({f"seconds/{step}": seconds for step, seconds in times.measured().items()})
        return times

    def finished(self, answer: Any, promotion: Mapping[str, Any] | None = None, **fields: Any) -> JobResult:
        """Return the result of a job whose workers have done their work, and print the seconds of its steps.

        Args:
            answer: What the engine has returned: the numbers of workers and restarts.
            promotion: Fields that say how the model was registered.
            fields: The other fields.
        """
        counts = {"num_workers": answer.num_workers, "restarts": answer.restarts}
        return self.result(**counts, times=self.times(), **fields, **(promotion or {}))

    def checked_folder(self, artifact_location: str | None) -> tuple[str, Claim]:
        """Return the folder of the attempt's files and its claim, after a check that the attempt may write there."""
        folder, claim = artifacts.folder(self.key, artifact_location), self.claim()
        artifacts.check(folder, claim, artifact_location)
        return folder, claim

    def claim(self) -> Claim:
        """Return the attempt's claim, which is written into folders to show that they belong to this attempt."""
        return artifacts.claim_of(self.store, self.key)

    def keep_gpu_choice(self, choice: bool) -> bool:
        """Record whether the job uses GPUs, unless an earlier attempt did so, and return the recorded choice."""
        return patiently(self.store, lambda: attempts.keep_choice(self.store, self.key, "uses_gpu", choice))

    def is_current(self) -> bool:
        """Return whether this attempt is running and is the newest of its job.

        The method retries while the store cannot be used, because an error would lose the result of the training.
        """
        return patiently(self.store, lambda: attempts.is_current(self.store, self.key))

    def has_ended(self, claim: Claim) -> bool:
        """Return whether the attempt that owns a folder has ended.

        The result is False if the attempt is not in the store.
        """
        key = Key(claim.job_id, claim.attempt)
        return attempts.state(self.store, key) in JOB_ENDED and artifacts.claim_of(self.store, key) == claim
