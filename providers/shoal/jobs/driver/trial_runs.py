"""A thread that records each trial of a search as a child of the job's MLflow run. A server that is away never ends the
search."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.jobs.mlflow.job_run import legal_name
from shoal.jobs.timeouts import METRICS_PERIOD_S, TRIAL_RUNS_END_S
from shoal.jobs.tuning.trials import Ended
from shoal.secrets.redaction import redact_all

if TYPE_CHECKING:
    from mlflow.entities import Run as MlflowRun

    from shoal.jobs.mlflow.job_run import Run

_PARENT = "mlflow.parentRunId"
_LONGEST_VALUE = 500
_STATUS = {"complete": "FINISHED", "pruned": "FINISHED", "failed": "FAILED"}


class TrialRuns:
    """Sender of trials to MLflow.

    Args:
        run: MLflow run of the attempt, of which the trials' runs are children.
        tags: Tags of all runs.
    """

    def __init__(self, run: Run, tags: Mapping[str, str]) -> None:
        self._run = run
        self._tags = dict(tags)
        self._trials: queue.SimpleQueue[Ended | None] = queue.SimpleQueue()
        self._left = 0
        self._give_up = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="shoal-trial-runs", daemon=True)
        self._thread.start()

    def add(self, trial: Ended) -> None:
        """Record a trial that has ended, soon."""
        self._left += 1
        self._trials.put(trial)

    def close(self) -> None:
        """Wait until all trials are recorded, but not for long if MLflow is away."""
        self._trials.put(None)
        self._thread.join(TRIAL_RUNS_END_S)
        self._give_up.set()
        if self._thread.is_alive():
            print(
                f"{self._left} trials are not recorded in MLflow, which does not answer; the study has them", flush=True
            )

    def _send_all(self) -> None:
        while (trial := self._trials.get()) is not None:
            self._send(trial)
            self._left -= 1

    def _send(self, trial: Ended) -> None:
        """Record a trial; while MLflow is away, try again."""
        is_told = False
        while not self._give_up.is_set():
            try:
                self._record(trial)
                return
            except Exception as error:
                if not is_told:
                    print(f"trial {trial.number} cannot be recorded in MLflow now: {error}", flush=True)
                is_told = True
                self._give_up.wait(METRICS_PERIOD_S)

    def _opened(self, trial: Ended, tags: Mapping[str, str]) -> MlflowRun | None:
        """Return the run that a trial's function has opened, now a child of the job's run; None if there is none."""
        from mlflow.exceptions import MlflowException

        if trial.mlflow_run is None:
            return None
        client = self._run.client
        try:
            run = client.get_run(trial.mlflow_run)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if run.info.lifecycle_stage == "deleted":  # by the function; MLflow refuses tags of such a run
            return None
        for name, value in tags.items():
            client.set_tag(run.info.run_id, name, value)
        return run

    def _record(self, trial: Ended) -> None:
        from mlflow.entities import Metric, Param

        client, now = self._run.client, time.time()
        tags = {**self._tags, _PARENT: self._run.run_id, "shoal.trial": str(trial.number), "shoal.state": trial.state}
        if trial.error:
            tags["shoal.error"] = trial.error[:_LONGEST_VALUE]
        run = self._opened(trial, redact_all(tags)) or client.create_run(
            self._run.experiment_id,
            start_time=int((now - (trial.seconds or 0.0)) * 1000),
            tags=redact_all(tags),
            run_name=f"trial {trial.number}",
        )
        chosen = {legal_name(name): str(value)[:_LONGEST_VALUE] for name, value in redact_all(trial.params).items()}
        values: dict[str, Any] = {**trial.metrics}
        if trial.value is not None:
            values["value"] = trial.value
        named = {legal_name(name): float(value) for name, value in values.items()}
        metrics = [Metric(name, value, int(now * 1000), 0) for name, value in named.items()]
        metrics = [each for each in metrics if each.key not in run.data.metrics]
        params = [Param(name, value) for name, value in chosen.items() if name not in run.data.params]
        client.log_batch(run.info.run_id, metrics=metrics, params=params)
        client.set_terminated(run.info.run_id, _STATUS[trial.state])
