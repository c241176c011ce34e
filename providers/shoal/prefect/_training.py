"""One training as a task sees it: submitted, followed into the run's log, cancelled with the run."""

from __future__ import annotations

import threading
from typing import Any

from prefect.logging import get_run_logger

from shoal.jobs import FunctionJobSpec, JobHandle, JobResult, JobSpec, submit
from shoal.prefect._holder import current_holder, task_key
from shoal.prefect.blocks import PoolSource, pool_of

ARTIFACT_KEY = "shoal-training"
_CANCELLED = "its Prefect run was cancelled"


class Training:
    """A training from its submission to its result.

    Args:
        spec: What to train.
        pool_name: Where; by default where the spec says.
    """

    def __init__(self, spec: JobSpec | FunctionJobSpec, pool_name: PoolSource) -> None:
        self.logger = get_run_logger()
        if pool_name is not None:
            run_config = spec.run_config.model_copy(update={"pool_name": pool_of(pool_name).name})
            spec = spec.model_copy(update={"run_config": run_config})
        self._spec = spec
        self._holder = current_holder()
        self._key = task_key()
        self._handle: JobHandle | None = None
        self._cancelled = threading.Event()

    def run(self) -> JobResult:
        """Submit it, or attach to the job that an earlier try of this task left running, and wait.

        Raises:
            JobFailedError: It ended without a result; the message ends with the cause.
            JobCancelledError: It was cancelled.
        """
        self._handle = submit(self._spec, holder=self._holder, key=self._key)
        self.logger.info("submitted or found: job %s, attempt %d", self._handle.job_id, self._handle.attempt)
        try:
            if self._cancelled.is_set():
                self._handle.cancel(_CANCELLED)
            return self._handle.wait(on_log=self.logger.info)
        except Exception:
            raise  # a timeout of the task among them: its retry attaches to the job
        except BaseException:  # how Prefect and the user say stop
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the job; from any thread."""
        self._cancelled.set()
        if self._handle is not None:
            self._handle.cancel(_CANCELLED)


def artifact(result: JobResult) -> dict[str, Any]:
    """What is shown of a training in Prefect's UI: arguments of `create_table_artifact`."""
    rows = [
        *([name, f"{value:.6g}"] for name, value in sorted(result.metrics.items())),
        ["model", result.model_uri],
        ["version", result.model_version or "not registered"],
        ["promoted", {True: "yes", False: "no, the champion is better", None: "-"}[result.promoted]],
        ["rows", "-" if result.rows is None else f"{result.rows:,}"],
        ["workers", str(result.num_workers)],
        ["seconds", f"{result.seconds:.1f}"],
        ["MLflow run", result.mlflow_run_id or "-"],
    ]
    return {
        "key": ARTIFACT_KEY,
        "table": [{"what": what, "value": value} for what, value in rows],
        "description": f"Job `{result.job_id}`, attempt {result.attempt}",
    }
