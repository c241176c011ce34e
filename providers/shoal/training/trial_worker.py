"""Run trials in one worker: ask the driver for the next one, train it, and send its result with the next question.

A worker sends two kinds of questions: ``{"outcome": ...}`` asks for a trial, and ``{"trial": number, "value": ...,
"step": ...}`` reports a value and asks whether the trial should end. The answer to the first is the pickled trial as
text, or None if no trials are left; the answer to the second is a truth value.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Protocol

from shoal.data.connector import DataConnector
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.planning import ALONE
from shoal.errors import InvalidArgumentError
from shoal.lazy_imports import cloudpickle
from shoal.training.boosting.messages import History
from shoal.training.boosting.params import Direction
from shoal.training.boosting.trials import BoostingTrials, PrunedError, TrialParams
from shoal.training.gang.worker import PeerError
from shoal.training.host.own_process import ending_forks
from shoal.training.reporting import GangContext, gang_context, set_gang_context
from shoal.training.tracking import after_import


class TrialPruned(Exception):  # Optuna's name
    """Raise this in the function of a search to end a trial that `TrialContext.should_prune` has given up."""


Ask = Callable[[float, int], bool]
"""Type of a function that reports a value and its step to the driver, and returns whether the trial should end."""


@dataclass
class TrialContext:
    """Second argument of the function of a search: the trial that the function runs.

    Args:
        number: Number of the trial, from 0.
        params: Parameters of the trial.
        dataset_map: Datasets of the search, by name.
        metric: Name of the deciding metric in what the function reports or returns; None: any.

    Attributes:
        metrics: Metrics that were reported last.
        model: Model that was reported last; None if there is none.
        mlflow_run: Id of the first MLflow run that the function has opened; None if there is none.
    """

    number: int
    params: dict[str, Any]
    dataset_map: dict[str, DataConnector] = field(default_factory=dict)
    metric: str | None = None
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    model: Any = field(default=None, init=False)
    mlflow_run: str | None = field(default=None, init=False)
    _ask: Ask | None = field(default=None, repr=False)
    _step: int = field(default=0, init=False, repr=False)
    _stop: bool = field(default=False, init=False, repr=False)

    def report(self, value: float | Mapping[str, float], step: int | None = None, *, model: Any = None) -> None:
        """Report the value of the trial so far, such as the loss after an epoch.

        The last value counts as the trial's value if the function returns None.

        Args:
            value: Value of the deciding metric, or a mapping from names of metrics to values.
            step: Number of the step, such as the epoch. Default: one more than at the last call, from 0.
            model: Model of the trial; that of the best trial is the result's ``model``. It is pickled.

        Raises:
            InvalidArgumentError: The value is no number, or the mapping does not contain the deciding metric.
        """
        self.metrics = metrics_of(value, self.metric)
        if model is not None:
            self.model = model
        place = self._step if step is None else int(step)
        self._step = place + 1
        if self._ask is not None:
            self._stop = self._ask(value_of(self.metrics, self.metric), place)

    def should_prune(self) -> bool:
        """Return whether the last reported value is so bad, compared with those of other trials, that the function
        should end the trial with ``raise TrialPruned``."""
        return self._stop


def metrics_of(value: Any, metric: str | None) -> dict[str, float]:
    """Return what a function has returned or reported as metrics by name.

    Raises:
        InvalidArgumentError: The value is no number, or the mapping does not contain the deciding metric.
    """
    given = value if isinstance(value, Mapping) else {metric or "value": value}
    try:
        found = {str(name): float(each) for name, each in given.items()}
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"the function of a search must return or report a number, or a mapping from names to numbers, not "
            f"{value!r}"
        ) from error
    if not found or (metric is not None and metric not in found):
        raise InvalidArgumentError(
            f'the function of a search has returned or reported no metric "{metric or "value"}", but only '
            f"{', '.join(found) or 'none'}: report it, or name another in metric="
        )
    return found


def value_of(metrics: Mapping[str, float], metric: str | None) -> float:
    """Return the deciding value among metrics; without a name, the last one."""
    return metrics[metric] if metric is not None else [*metrics.values()][-1] if metrics else math.nan


_current: TrialContext | None = None


def current_trial() -> TrialContext:
    """Return the trial that this process runs.

    Raises:
        InvalidArgumentError: This process runs no trial.
    """
    if _current is None:
        raise InvalidArgumentError("this process runs no trial: call this in the function of a search")
    return _current


def set_current_trial(trial: TrialContext | None) -> None:
    """Set the trial that this process runs."""
    global _current
    _current = trial


def note_opened_runs(mlflow: ModuleType) -> None:
    """Replace ``mlflow.start_run``, which all logging without a run calls, by a function that notes new runs."""
    original = mlflow.start_run
    if getattr(original, "notes_trials", False):
        return

    @functools.wraps(original)
    def start_run(run_id: str | None = None, *args: Any, **options: Any) -> Any:
        trial = _current
        is_trials = (
            trial is not None
            and trial.mlflow_run is None
            # A run that exists, and a run on another server, are not those of the trial.
            and run_id is None
            and "MLFLOW_RUN_ID" not in os.environ
            and mlflow.active_run() is None
            and mlflow.get_tracking_uri() == os.environ.get("MLFLOW_TRACKING_URI")
        )
        if not is_trials:
            return original(run_id, *args, **options)
        assert trial is not None
        if len(args) < 2 and options.get("run_name") is None:
            options["run_name"] = f"trial {trial.number}"
        run = original(run_id, *args, **options)
        trial.mlflow_run = run.info.run_id
        return run

    start_run.notes_trials = True  # type: ignore[attr-defined]
    mlflow.start_run = mlflow.tracking.fluent.start_run = start_run  # type: ignore[attr-defined]


_LONGEST_ERROR = 4000
"""Number of characters of a trial's error that the study keeps."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial, as the driver sends it to a worker.

    Args:
        number: Number of the trial.
        params: Parameters that were suggested.
        checked: Parameters of the boosting library; None for a function.
    """

    number: int
    params: dict[str, Any]
    checked: TrialParams | None = None

    def sent(self) -> str:
        """Return the trial as text for the answer to a worker."""
        return base64.b64encode(pickle.dumps(self)).decode()


class TrialRunner(Protocol):
    """Interface of what runs the trials of a worker.

    Attributes:
        mlflow_run: Id of the MLflow run that user code has opened in the last trial; None if there is none.
    """

    mlflow_run: str | None

    def run(self, trial: Trial, report: Ask) -> dict[str, Any]:
        """Run a trial, and return its outcome: `value`, `metrics`, and what else the driver needs.

        Raises:
            PrunedError: The driver has ended the trial early.
        """


Work = Callable[[GangContext], TrialRunner]
"""Type of what the driver sends to each worker before the first trial: a function that returns the runner of its
trials, such as a class of this module with its first arguments."""


class BoostingRunner:
    """Runner of trials that train a boosting model.

    Args:
        trials: Data and options of the trainings.
        report_every: Number of rounds between two reported values; 0: none.
        context: Context of this worker.
    """

    mlflow_run: str | None = None

    def __init__(self, trials: BoostingTrials, report_every: int, context: GangContext) -> None:
        self._trials = trials
        self._report_every = report_every
        self._trainer = trials.trainer(context)

    def run(self, trial: Trial, report: Ask) -> dict[str, Any]:
        """See `TrialRunner.run`."""
        trials, every = self._trials, self._report_every

        def on_round(iteration: int, history: History) -> None:
            if every and (iteration + 1) % every == 0 and report(trials.value(history), iteration):
                raise PrunedError

        assert trial.checked is not None
        return trials.train(self._trainer, trial.checked, on_round)


class FunctionRunner:
    """Runner of trials that call a function of the user.

    Args:
        function: The pickled function ``(params, context)``.
        dataset_map: Datasets by name.
        metric: Deciding metric in what the function reports or returns.
        folder: Folder or URI for the models that the function reports.
        context: Context of this worker.
    """

    def __init__(
        self,
        function: bytes,
        dataset_map: Mapping[str, DatasetSpec],
        metric: str | None,
        folder: str,
        context: GangContext,
    ) -> None:
        after_import("mlflow", note_opened_runs)
        self.mlflow_run: str | None = None
        self._metric = metric
        self._folder = folder
        self._function = cloudpickle.loads(function)
        self._datasets = {name: DataConnector.from_spec(spec) for name, spec in dataset_map.items()}

    def run(self, trial: Trial, report: Ask) -> dict[str, Any]:
        """See `TrialRunner.run`."""
        metric = self._metric
        context = TrialContext(trial.number, trial.params, dict(self._datasets), metric, _ask=report)
        set_current_trial(context)
        try:
            with ending_forks():
                returned = self._function(dict(trial.params), context)
        finally:
            self.mlflow_run = context.mlflow_run
            set_current_trial(None)
            if (mlflow := sys.modules.get("mlflow")) is not None:
                mlflow.end_run()  # the next trial's MLflow calls go to a run of their own
        metrics = context.metrics if returned is None and context.metrics else metrics_of(returned, metric)
        outcome = {"value": value_of(metrics, metric), "metrics": metrics}
        if context.model is not None:
            path = f"{self._folder}/trial-{trial.number}.pkl"
            outcome |= {"model": path, "model_digest": _save(context.model, path)}
        return outcome


def direction(trials: BoostingTrials, trial: TrialParams) -> Direction | None:
    """Return the direction of the deciding metric, which only the user's function knows. Rank 0 calls it."""
    gang = gang_context()
    if gang.rank:
        return None
    with _alone(gang) as context:
        return trials.direction(context, trial)


@contextmanager
def _alone(gang: GangContext) -> Iterator[GangContext]:
    """Make this worker rank 0 of 1: each worker trains alone, and reads all rows of a dataset."""
    context = replace(gang, position=ALONE, note=lambda note: None)
    set_gang_context(context)
    try:
        yield context
    finally:
        set_gang_context(gang)


def serve(work: Work) -> int:
    """Run trials until none is left, and return their number."""
    gang = gang_context()
    runner: TrialRunner | None = None
    outcome: dict[str, Any] | None = None
    done = 0
    with _alone(gang) as context:
        while (answer := _ask(gang, {"outcome": outcome})) is not None:
            trial: Trial = pickle.loads(base64.b64decode(answer))
            runner = runner or work(context)
            outcome = _outcome(runner, trial, gang)
            done += 1
    return done


def _outcome(runner: TrialRunner, trial: Trial, gang: GangContext) -> dict[str, Any]:
    """Run a trial, and return its outcome, also if it fails."""
    began = time.perf_counter()

    def report(value: float, step: int) -> bool:
        return bool(_ask(gang, {"trial": trial.number, "value": float(value), "step": step}))

    found: dict[str, Any]
    try:
        found = {"state": "complete", **runner.run(trial, report)}
    except PeerError:
        raise
    except BaseException as error:  # also SystemExit and KeyboardInterrupt, which would end all trials of this worker
        # Optuna may not be installed on the nodes, so its class is known by its name.
        if isinstance(error, PrunedError | TrialPruned) or type(error).__name__ == TrialPruned.__name__:
            found = {"state": "pruned"}
        else:
            gang.log(f"trial {trial.number} has failed:\n{traceback.format_exc()}")
            found = {"state": "failed", "error": _error_text(error)[:_LONGEST_ERROR]}
    seconds = time.perf_counter() - began
    return {"trial": trial.number, "seconds": seconds, "mlflow_run": runner.mlflow_run, **found}


def _error_text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"SystemExit: the trial called sys.exit({error.code!r}), so it has no value: return the value instead"
    return "".join(traceback.format_exception_only(error)).strip()


def _ask(gang: GangContext, question: Mapping[str, Any]) -> Any:
    assert gang.ask is not None, "a trial runs in a worker"
    return gang.ask(question)


def _save(model: Any, path: str) -> str:
    """Write a pickled model into a file, and return the digest by which the driver knows it again."""
    from shoal.data.parquet.files import resolve

    content = cloudpickle.dumps(model)
    filesystem, inner = resolve(path)
    filesystem.create_dir(inner.rpartition("/")[0], recursive=True)
    with filesystem.open_output_stream(inner) as file:
        file.write(content)
    return hashlib.sha256(content).hexdigest()
