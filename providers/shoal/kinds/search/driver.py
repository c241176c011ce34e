"""Run a search for parameters in its job's driver: its trials, and the training of the winner on all rows.

A thread records each trial as a child of the job's MLflow run. A server that is away never ends the search.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.jobs import shipped_code
from shoal.jobs.driver.attempt_context import AttemptContext, before_work, only_printed
from shoal.jobs.files import artifacts, storage
from shoal.jobs.journal import study_logs
from shoal.jobs.journal.steps import patiently
from shoal.jobs.kind import KindDriver
from shoal.jobs.mlflow_run import Run, legal_name
from shoal.jobs.results import JobResult, SearchSummary
from shoal.jobs.timeouts import METRICS_PERIOD_S, TRIAL_RUNS_END_S
from shoal.kinds.search.engine import Found, run
from shoal.kinds.search.spec import TuneJobSpec, load_code
from shoal.kinds.search.study_storage import STUDY, Ended, StudyJournal, require_optuna, storage_of
from shoal.kinds.training.driver import check_training, train_and_publish
from shoal.models.contest import holdout_named
from shoal.secrets.redaction import redact_all
from shoal.training.boosting.engine import import_ahead_for_workers
from shoal.training.boosting.params import UserCode
from shoal.training.gang.gang import end_gangs

if TYPE_CHECKING:
    from mlflow.entities import Run as MlflowRun


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
        # What the function has logged to its own run stays.
        child, logged = replace(self._run, run_id=run.info.run_id), run.data
        values = trial.metrics if trial.value is None else {**trial.metrics, "value": trial.value}
        child.log_values({name: value for name, value in values.items() if legal_name(name) not in logged.metrics})
        child.log_params({name: each for name, each in trial.params.items() if legal_name(name) not in logged.params})
        client.set_terminated(run.info.run_id, _STATUS[trial.state])


class SearchDriver(KindDriver[TuneJobSpec, AttemptContext]):
    """A search: its trials, and the training of the winner on all rows.

    A thread records each trial as a child of the job's MLflow run. A server that is away never ends the search.
    """

    def begin(self) -> None:
        """Prepare the imports of the workers, so that the first trials start sooner."""
        spec = self.spec
        super().begin()
        require_optuna()
        if spec.train is not None:
            trained = spec.train.model_copy(update={"scaling_config": spec.scaling_config})
            import_ahead_for_workers(trained, complete=spec.user_code is not None)

    def work(self, place: AttemptContext) -> tuple[JobResult, str | None]:
        """Search for parameters, train the winner on all rows, and return the job's result.

        For a function, nothing is trained after the trials: the model is the one that the best trial has reported.

        Returns:
            The result, and the digest of the file of a reported model.

        Raises:
            ShoalError: The job failed; the message has the cause.
        """
        spec = self.spec
        location = spec.run_config.artifact_location
        folder, claim = place.checked_folder(location)
        if spec.train is not None:
            check_training(spec.winner({}, None), place, selected_on=spec.holdout)
            # The nodes must also be large enough for the workers that train the winner.
            with warnings.catch_warnings(action="ignore"):
                spec.train.demand().resolved(clamp=spec.run_config.clamp)
        else:
            artifacts.mark(folder, claim)
        study = _study(spec, place)
        print(f"study of attempt {study}" if study != place.key.attempt else "a new study begins", flush=True)
        _log_search(spec, place)
        found = _search(spec, place, study, folder)
        summary = found.summary(study)
        print(f"best of {len(found.ended)} trials: {summary.best_value:g} with {summary.best_params}", flush=True)
        if spec.train is None:
            return _of_function(spec, place, found, summary, folder)

        end_gangs()  # the training may need other workers
        winner = spec.winner(found.best.params, found.best.rounds)
        # The saved training of an earlier attempt is used only if its parameters were the same.
        same = hashlib.sha256(
            json.dumps([spec.fingerprint, found.best.params, winner.n_estimators]).encode()
        ).hexdigest()
        winner = winner.model_copy(update={"fingerprint": same})
        result = train_and_publish(winner, place, selected_on=spec.holdout)
        # With `register`, the metrics on the holdout are those on the rows of the gate.
        metrics = result.metrics if spec.register_as else holdout_named(found.best.metrics)
        return result.model_copy(update={"search": summary, "metrics": metrics}), None


def _study(spec: TuneJobSpec, place: AttemptContext) -> int:
    """Return the number of the study of this attempt. A study of which every trial has failed is not continued,
    because a retry should try again."""
    study = patiently(place.store, lambda: study_logs.study_of(place.store, place.key))
    if study == place.key.attempt:
        return study
    import optuna

    storage = storage_of(StudyJournal(place.store, place.key, study))
    if STUDY not in {each.study_name for each in optuna.get_all_study_summaries(storage)}:
        return study
    states = Counter(each.state.name for each in optuna.load_study(study_name=STUDY, storage=storage).trials)
    failed_only = states["FAIL"] >= spec.trials and not states["COMPLETE"] and not states["PRUNED"]
    return place.key.attempt if failed_only else study


def _log_search(spec: TuneJobSpec, place: AttemptContext) -> None:
    if place.run is None:
        return
    values = {
        "search.trials": spec.trials,
        "search.sampler": spec.sampler or ("code" if spec.program else "tpe"),
        "search.pruner": spec.pruner or ("code" if spec.program else "median"),
        "search.metric": spec.metric or "",
        "search.seed": spec.seed,
        **{f"search.space.{name}": each.model_dump(exclude_defaults=True) for name, each in spec.space.items()},
    }
    with before_work(place.run.uri, place.environment):
        place.run.log_params(values)


def _search(spec: TuneJobSpec, place: AttemptContext, study: int, folder: str) -> Found:
    """Run the trials, and pass each one on to the series of metrics and to MLflow."""
    journal = StudyJournal(place.store, place.key, study)
    runs = TrialRuns(place.run, place.tags) if place.run else None

    def on_end(trial: Ended) -> None:
        text = f"{trial.state}: {trial.value:g}" if trial.value is not None else f"{trial.state}"
        error = f" ({trial.error})" if trial.error else ""
        print(f"trial {trial.number} {text} with {trial.params}{error}", flush=True)
        if trial.state == "complete" and trial.value is not None:
            place.metrics.log(0, {"trial-value": trial.value}, trial.number)
        if runs:
            runs.add(trial)

    env = dict(place.environment)
    if spec.train is None:
        # All trials would log their parameters to the job's run, and MLflow refuses other values of a parameter.
        env.pop("MLFLOW_RUN_ID", None)
    user_code = UserCode() if spec.user_code is None else shipped_code.load_user_code(spec.user_code)
    try:
        found = run(
            spec,
            load_code(spec.program),
            user_code,
            storage=storage_of(journal),
            flush=journal.flush,
            folder=folder,
            env=env,
            on_end=on_end,
            on_progress=place.on_progress,
            keep_gpu_choice=place.keep_gpu_choice,
        )
    finally:
        if runs:
            with only_printed("the trials could not be recorded in MLflow"):
                runs.close()
    place.stopwatch.searched(found.seconds)
    return found


def _of_function(
    spec: TuneJobSpec, place: AttemptContext, found: Found, summary: SearchSummary, folder: str
) -> tuple[JobResult, str | None]:
    """Return the result of a search over a function, with the model of its best trial."""
    place.on_trained()
    for trial in found.ended:
        if trial.model is not None and trial.number != found.best.number:
            with only_printed(f"the model of trial {trial.number} could not be removed"):
                storage.remove(trial.model)
    model, digest = found.best.model, found.best.model_digest
    if model is not None and digest is not None:
        storage.read_unchanged(model, digest)
    result = place.finished(
        found,
        model_path=model or folder,
        model_uri=model or folder,
        model_digest=digest,
        metrics=found.best.metrics,
        search=summary,
    )
    return result, digest
