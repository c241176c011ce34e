"""Driver of one attempt of a job, run on the pool's head: ``python -m shoal.jobs.driver JOB_ID ATTEMPT``.

The driver trains, logs to MLflow, compares the model with the champion, writes the result into the job's row, and
cleans up. It ends itself when the job was cancelled, or when no process has polled the job for `orphan_after` seconds.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from shoal.errors import MissingExtraError, ShoalError
from shoal.jobs import credentials
from shoal.jobs.credentials import Secrets
from shoal.jobs.driver import boosting, function, prediction
from shoal.jobs.driver.context import Workplace
from shoal.jobs.driver.watchdog import Reason, Watchdog
from shoal.jobs.files import staging
from shoal.jobs.files.logs import log_path, teed
from shoal.jobs.function_spec import AnyJobSpec, FunctionJobSpec, parse_spec
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.retries import patiently
from shoal.jobs.journal.steps import JobStep, act
from shoal.jobs.mlflow import tracking
from shoal.jobs.mlflow.tracking import Run
from shoal.jobs.predict_spec import PredictJobSpec
from shoal.jobs.spec import JobResult, JobSpec
from shoal.state import Store, codec
from shoal.state.process import ProcessId
from shoal.state.schema import Job, JobState
from shoal.training.host.imports import import_lean

_STOPPED = Reason(JobState.CANCELLED, "the job was stopped through Ray (SIGTERM)")

_RUN_STATUS = {JobState.SUCCEEDED: "FINISHED", JobState.FAILED: "FAILED", JobState.CANCELLED: "KILLED"}
"""MLflow's run status for each final state."""


class _Ended(BaseException):
    """Signals that the job was cancelled or timed out; a `BaseException`, so that no `except Exception` catches it."""


@dataclass(frozen=True)
class _End:
    """End of an attempt: state, error and result."""

    state: JobState
    error: str | None = None
    result: JobResult | None = None
    results_digest: str | None = None


class Driver:
    """Runner of one attempt of a job, which also records the attempt's end.

    Args:
        store: Store that has the attempt's row.
        job: The attempt's row.
        spec: Spec of the job, with its credentials.
        secrets: Credentials, which the workers get and the log must not contain.
    """

    def __init__(self, store: Store, job: Job, spec: AnyJobSpec, secrets: Secrets) -> None:
        self._store = store
        self._job = job
        self._key = Key(job.id, job.attempt)
        self._spec = spec
        self._secrets = secrets
        self._watchdog = Watchdog(store, self._key, spec.run_config.timeout)
        self._begun = time.monotonic()
        self._run: Run | None = None
        self._told_to_end = False

    def run(self) -> int:
        """Run the attempt until it has ended, and return the exit code.

        The end is stored first. Errors in the clean-up after that are only printed.
        """
        self._watchdog.start()
        end = self._until_end()
        # From here on the process ends soon by itself, and no signal may prevent the end from being stored.
        self._watchdog.stop()
        stored = self._store_end(end)
        with _logged("staged data could not be removed"), act(JobStep.TIDY):
            staging.discard(self._spec.staged())
        with _logged("credentials that were written too late could not be removed"):
            credentials.discard(self._key.submission_id)
        status = _RUN_STATUS[end.state] if stored else "KILLED"
        with _logged(f"the MLflow run could not be marked {status}"):
            if self._run:
                self._run.finish(status)
        return 0 if stored and end.state is JobState.SUCCEEDED else 1

    def _until_end(self) -> _End:
        """Run the attempt until it ends or is stopped; SIGTERM is ignored afterwards."""
        end: _End | None = None
        try:
            end = self._attempt()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        except _Ended:
            reason = self._watchdog.reason or _STOPPED
            end = end or _End(reason.state, error=reason.text)
        return end

    def _attempt(self) -> _End:
        try:
            connect(self._job.endpoint["gcs"])
            # After ray.init, which installs a SIGTERM handler of its own.
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._begin_run()
            result, results_digest = self._work(self._run)
            return _End(JobState.SUCCEEDED, result=result, results_digest=results_digest)
        except Exception as error:
            if self._told_to_end:  # Ray's compiled code turns an exception from a signal handler into a SystemError
                raise _Ended from error
            if not isinstance(error, ShoalError):  # the message of a ShoalError is enough
                print(traceback.format_exc(), flush=True)
            elif isinstance(self._spec, FunctionJobSpec):  # the notes have the traceback of the user's code
                print(*getattr(error, "__notes__", ()), sep="\n", flush=True)
            return _End(JobState.FAILED, error=_cause(error))

    def _store_end(self, end: _End) -> bool:
        """Write the end into the job's row; return False if the row has an end already or cannot be written."""
        error = None if end.error is None else self._secrets.redact(end.error)
        result = None if end.result is None else end.result.model_dump(mode="json")
        if error is not None:
            print(f"{end.state.value}: {error}", flush=True)

        def write() -> bool:
            if attempts.end(
                self._store,
                self._key,
                end.state,
                time.time(),
                seen={JobState.RUNNING},
                error=error,
                result=result,
                results_digest=end.results_digest,
                progress=self._watchdog.progress,
            ):
                return True
            # An earlier try may have been committed although the reply from the database was lost.
            job = attempts.load(self._store, self._key)
            # Compared as text, because a NaN in a result is not equal to itself.
            return codec.dumps([job.state, job.error, job.result]) == codec.dumps([end.state, error, result])

        try:
            stored = patiently(self._store, write)
        except ShoalError as refused:
            print(f"the end of the job could not be stored: {refused}", flush=True)
            return False
        if not stored and result is not None:
            print("another process ended the job before the result was written; the result is not recorded", flush=True)
        return stored

    def _work(self, run: Run | None) -> tuple[JobResult, str | None]:
        environment, keep = self._worker_environment(run), self._watchdog.keep
        place = Workplace(self._store, self._key, run, self._tags(), environment, keep, begun=self._begun)
        if isinstance(self._spec, FunctionJobSpec):
            return function.work(self._spec, place)
        if isinstance(self._spec, PredictJobSpec):
            return prediction.work(self._spec, place), None
        return boosting.work(self._spec, place), None

    def _begin_run(self) -> None:
        if self._spec.tracking is None:
            return
        if not tracking.available():
            if self._spec.tracking.uri or self._spec.register_as:
                raise MissingExtraError("mlflow", "mlflow")
            print("MLflow is not installed on the pool: the run is not tracked", flush=True)
            return
        self._run = Run.begin(self._spec.tracking, name=self._key.submission_id, tags=self._tags())
        attempts.note_run(self._store, self._key, self._run.run_id)
        print(f"MLflow run: {self._run.link}", flush=True)
        with _logged("the MLflow run of the previous attempt could not be ended"):
            self._end_previous_run(self._run)

    def _end_previous_run(self, run: Run) -> None:
        """End the MLflow run of a killed driver, because only a driver has MLflow and the credentials for it."""
        previous = attempts.previous_run(self._store, self._key)
        if previous is not None:
            run_id, state = previous
            run.end_other(run_id, _RUN_STATUS[state])

    def _tags(self) -> dict[str, str]:
        return {
            "shoal.job_id": self._key.job_id,
            "shoal.attempt": str(self._key.attempt),
            "shoal.pool": self._job.pool,
            "shoal.holder": self._job.holder,
        }

    def _worker_environment(self, run: Run | None) -> dict[str, str]:
        """Return environment variables for the workers, which get them as actor arguments."""
        environment = dict(self._secrets.environment)
        if run:
            environment |= {
                "MLFLOW_TRACKING_URI": run.uri,
                "MLFLOW_EXPERIMENT_ID": run.experiment_id,
                "MLFLOW_RUN_ID": run.run_id,
            }
        return environment

    def _on_sigterm(self, *_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not interrupt the end
        self._told_to_end = True
        raise _Ended


def connect(gcs: str) -> None:
    """Connect this process to its pool as a Ray driver.

    The RAY_ADDRESS that Ray sets for a job is not used: with two clusters on one host, Ray sometimes sets the address
    of the other cluster (seen with Ray 2.60).

    Args:
        gcs: GCS address of the head that the job was submitted to.
    """
    os.environ["RAY_ADDRESS"] = gcs
    import ray

    ray.init(address=gcs, logging_level=logging.WARNING)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Print an exception of the block instead of raising it."""
    try:
        yield
    except Exception as error:
        print(f"{what}: {error}", flush=True)


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"


def main() -> int:
    """Run the attempt that the command line names, ``JOB_ID ATTEMPT``, and return the exit code."""
    key = Key(sys.argv[1], int(sys.argv[2]))
    secrets = Secrets()
    # The log exists before the row's state is RUNNING, so that followers find the file.
    with teed(log_path(key), lambda text: secrets.redact(text)):
        store = Store(migrate=False)
        # Take the credentials while the row is still PENDING: after that, other processes may delete their file.
        with act(JobStep.TAKE):
            secrets = credentials.take(key.submission_id)
        job = attempts.start(store, key, ProcessId.mine().to_json(), time.time())
        if job is None:
            print(f"nothing to do: attempt {key.attempt} of job {key.job_id} has ended, or another driver runs it")
            return 0
        os.environ.update(secrets.environment)
        spec = parse_spec(credentials.reveal(job.spec, secrets.uris))
        print(f"job {key.job_id}, attempt {key.attempt}, on pool {job.pool}, for {job.holder}", flush=True)
        # import_lean hides scikit-learn, which a champion that others have registered may need.
        if isinstance(spec, JobSpec) and spec.register_as is None:
            import_lean([spec.framework])
        return Driver(store, job, spec, secrets).run()
