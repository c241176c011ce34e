"""What runs on the pool's head for each attempt of a job: ``python -m shoal.jobs.driver JOB_ID ATTEMPT``.

It trains, logs, compares and writes the result into the job's row. It ends itself when its row says so, or when nobody
has asked about the job for long.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from typing import NoReturn

from shoal.errors import MissingExtraError, ShoalError
from shoal.jobs import attempts, boosting_work, credentials, function_work, staging, tracking
from shoal.jobs.attempts import Key
from shoal.jobs.credentials import Secrets
from shoal.jobs.function_spec import FunctionJobSpec, parse_spec
from shoal.jobs.logs import log_path, teed
from shoal.jobs.spec import JobResult, JobSpec
from shoal.jobs.tracking import Run
from shoal.jobs.watchdog import Reason, Watchdog
from shoal.jobs.workplace import Workplace
from shoal.pool.processes import ProcessId
from shoal.state import Store
from shoal.state.schema import Job, JobState
from shoal.training.lean import import_lean

_STOPPED = Reason(JobState.CANCELLED, "it was stopped through Ray (SIGTERM)")


class _Ended(BaseException):
    """The job is not wanted any more; no `Exception`, so that nothing on the way takes it for a failure to handle."""


class Driver:
    """One attempt.

    Args:
        store: Where its row is.
        job: Its row.
        spec: Its spec, credentials and all.
        secrets: What must not be printed, and the workers need.
    """

    def __init__(self, store: Store, job: Job, spec: JobSpec | FunctionJobSpec, secrets: Secrets) -> None:
        self._store = store
        self._job = job
        self._key = Key(job.id, job.attempt)
        self._spec = spec
        self._secrets = secrets
        self._watchdog = Watchdog(store, self._key, spec.run_config.timeout)
        self._begun = time.monotonic()

    def run(self) -> int:
        """Work until the attempt has ended; returns the exit code."""
        run: Run | None = None
        self._watchdog.start()
        try:
            connect(self._job.endpoint["gcs"])
            # Set last, because Ray has just set its own.
            signal.signal(signal.SIGTERM, self._on_sigterm)
            run = self._begin_run()
            result, results_digest = self._work(run)
            self._finish_run(run, "FINISHED")
        except _Ended:
            reason = self._watchdog.reason or _STOPPED
            self._quietly_finish(run, "KILLED")
            return self._end(reason.state, reason.text)
        except Exception as error:
            if not isinstance(error, ShoalError):  # the message of our own says it all
                print(traceback.format_exc(), flush=True)
            elif isinstance(self._spec, FunctionJobSpec):  # but what the user's code raised they want to see
                print(*getattr(error, "__notes__", ()), sep="\n", flush=True)
            self._quietly_finish(run, "FAILED")
            return self._end(JobState.FAILED, _cause(error))
        finally:
            self._watchdog.stop()
            staging.discard(self._spec.staged())
        if not attempts.end(
            self._store,
            self._key,
            JobState.SUCCEEDED,
            time.time(),
            result=result.model_dump(mode="json"),
            results_digest=results_digest,
        ):
            print("the job was ended from outside before its result was written", flush=True)
            return 1
        return 0

    def _work(self, run: Run | None) -> tuple[JobResult, str | None]:
        place = Workplace(self._store, self._key, run, self._tags(), self._worker_environment(run), begun=self._begun)
        if isinstance(self._spec, FunctionJobSpec):
            return function_work.work(self._spec, place)
        return boosting_work.work(self._spec, place), None

    def _begin_run(self) -> Run | None:
        if self._spec.tracking is None:
            return None
        if not tracking.available():
            if self._spec.tracking.uri or self._spec.register_as:
                raise MissingExtraError("mlflow", "mlflow")
            print("MLflow is not installed on the pool: the run is not tracked", flush=True)
            return None
        run = Run.begin(self._spec.tracking, name=self._key.submission_id, tags=self._tags())
        attempts.note_run(self._store, self._key, run.run_id)
        print(f"MLflow run: {run.link}", flush=True)
        return run

    def _tags(self) -> dict[str, str]:
        return {
            "shoal.job_id": self._key.job_id,
            "shoal.attempt": str(self._key.attempt),
            "shoal.pool": self._job.pool,
            "shoal.holder": self._job.holder,
        }

    def _worker_environment(self, run: Run | None) -> dict[str, str]:
        """What the workers need beside the data, handed to them as actor arguments."""
        environment = dict(self._secrets.environment)
        if run:
            environment |= {
                "MLFLOW_TRACKING_URI": run.uri,
                "MLFLOW_EXPERIMENT_ID": run.experiment_id,
                "MLFLOW_RUN_ID": run.run_id,
            }
        return environment

    def _finish_run(self, run: Run | None, status: str) -> None:
        if run:
            run.finish(status)

    def _quietly_finish(self, run: Run | None, status: str) -> None:
        """End the run where the job has ended badly; that MLflow cannot be reached is not its cause then."""
        try:
            self._finish_run(run, status)
        except Exception as error:
            print(f"the MLflow run could not be marked {status}: {error}", flush=True)

    def _end(self, state: JobState, reason: str) -> int:
        reason = self._secrets.redact(reason)
        print(f"{state.value}: {reason}", flush=True)
        attempts.end(self._store, self._key, state, time.time(), error=reason)
        return 1

    def _on_sigterm(self, *_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one farewell is enough
        raise _Ended


def connect(gcs: str) -> None:
    """Connect this process to its pool as a Ray driver.

    Not to the RAY_ADDRESS that Ray sets for a job: where two clusters run on one host it is now the one's and then the
    other's (seen with 2.60).

    Args:
        gcs: Address of the head that the job was submitted to.
    """
    os.environ["RAY_ADDRESS"] = gcs
    import ray

    ray.init(address=gcs, logging_level=logging.WARNING)


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"


def main() -> int:
    """Entry point: ``JOB_ID ATTEMPT``."""
    key = Key(sys.argv[1], int(sys.argv[2]))
    secrets = Secrets()
    # The log is there before the row says that the job runs: whoever follows it finds it.
    with teed(log_path(key), lambda text: secrets.redact(text)):
        store = Store(migrate=False)
        job = attempts.start(store, key, ProcessId.mine().to_json(), time.time())
        if job is None:
            print(f"attempt {key.attempt} of job {key.job_id} is not wanted any more, or runs already")
            return 0
        secrets = credentials.take(key.submission_id)
        os.environ.update(secrets.environment)
        spec = parse_spec(credentials.reveal(job.spec, secrets.uris))
        print(f"job {key.job_id}, attempt {key.attempt}, on pool {job.pool}, for {job.holder}", flush=True)
        # A champion that others registered may be a model with scikit-learn's interface.
        if isinstance(spec, JobSpec) and spec.register_as is None:
            import_lean([spec.framework])
        return Driver(store, job, spec, secrets).run()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Ray's and MLflow's threads may hang at interpreter exit; the gang has ended with its training
