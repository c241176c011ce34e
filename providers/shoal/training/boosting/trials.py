"""Train a boosting model for each trial of a search for parameters, on rows that are read and quantised once.

Each worker trains its trials alone, with all rows, in the same segments as a training with one worker: the metrics of
a trial are those of such a training.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.boosting.engine import Library, Training, library_of
from shoal.training.boosting.messages import Boosted, Checkpoint, History, Segment, Task, segment_length
from shoal.training.boosting.request import TrainRequest
from shoal.training.boosting.user_code import UserCode
from shoal.training.context import GangContext
from shoal.training.pickling import pickled
from shoal.training.scaling import GangSize

HOLDOUT = "holdout"
"""Name of the eval set with which trials are compared."""

ROUNDS = "n_estimators"
"""Parameter of a search that is the number of boosting rounds, and no parameter of the library."""

_HIGHER_IS_BETTER = frozenset(
    {"auc", "aucpr", "auc_mu", "pre", "map", "mean_average_precision", "average_precision", "ndcg"}
)
_RANKING = ("rank:", "lambdarank", "rank_xendcg", "xendcg", "xe_ndcg")
_METRIC = {"xgboost": "eval_metric", "lightgbm": "metric"}
_METRIC_ALIASES = ("eval_metric", "metric", "metrics", "metric_types")


class PrunedError(Exception):
    """Raised in a trial that the driver has told to end early."""


OnRound = Callable[[int, History], None]
"""Type of a function that is called after each round with its number and the metrics so far, and may raise
`PrunedError`."""


@dataclass(frozen=True, slots=True)
class TrialParams:
    """Parameters of one trial, checked by the library.

    Args:
        params: Parameters of the library, without the seed.
        seed: Seed of the first segment.
        rounds: Number of boosting rounds.
    """

    params: dict[str, Any]
    seed: int
    rounds: int


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Metrics of a trial.

    Args:
        value: Value of the deciding metric on the holdout, in the best round with early stopping, else in the last.
        metrics: All metrics in that round.
        rounds: Number of rounds up to and including that round.
    """

    value: float
    metrics: dict[str, float]
    rounds: int


class Trainer(Protocol):
    """Interface of a library's module `trials`, whose class `Trials` trains in a worker and keeps the matrices."""

    def boost(self, task: Task, on_round: OnRound) -> Callable[[Segment], Boosted]:
        """Begin a training, and return the function that trains a segment of it."""


@dataclass(frozen=True)
class BoostingTrials:
    """What the workers need to train the trials of a search.

    Args:
        framework: Name of the library.
        task: Task of a worker that trains alone; each trial has other parameters.
        user_code: Pickled functions of the user; empty if there are none. Each trial gets new copies, because callbacks
            may have a state.
        metric: Deciding metric on the holdout; None: the last one.
        checkpoint_every: Option of the run; the segments of a training may depend on it.
    """

    framework: str
    task: Task
    user_code: bytes
    metric: str | None
    checkpoint_every: int | None

    def trainer(self, context: GangContext) -> Trainer:
        """Return an object that trains in this worker."""
        module = importlib.import_module(f"shoal.training.{self.framework}.trials")
        trainer: Trainer = module.Trials(context)
        return trainer

    def train(self, trainer: Trainer, trial: TrialParams, on_round: OnRound) -> TrialResult:
        """Train a trial in this worker.

        Raises:
            PrunedError: The driver has ended the trial early.
        """
        import cloudpickle

        user_code = cloudpickle.loads(self.user_code) if self.user_code else UserCode()
        task = replace(self.task, params=trial.params, seed=trial.seed, user_code=user_code)
        boost = trainer.boost(task, on_round)
        length = segment_length(trial.rounds, self.checkpoint_every)
        resume: Checkpoint | None = Checkpoint()
        rounds = 0
        while True:
            index = rounds // length
            stop = min(trial.rounds, (index + 1) * length)
            boosted = boost(Segment(index, stop, stop == trial.rounds, resume))
            assert boosted.checkpoint is not None, "a worker that trains alone is rank 0"
            rounds, resume = boosted.checkpoint.rounds, None
            if stop == trial.rounds or boosted.stopped:
                return self._result(boosted.checkpoint.history, boosted.best_iteration, rounds)

    def value(self, history: History, place: int = -1) -> float:
        """Return the deciding metric of a round.

        Raises:
            TrainingError: The training has not evaluated the metric.
        """
        found = history.get(HOLDOUT) or {}
        name = self.metric or next(reversed(found), None)
        if name is None or name not in found:
            raise TrainingError(
                f'the metric "{name}" was not evaluated, but only {", ".join(found) or "none"}: set metric to one of '
                "these, or add the metric to the parameters of the estimator"
            )
        return float(found[name][place])

    def _result(self, history: History, best: int | None, rounds: int) -> TrialResult:
        place = -1 if best is None else best
        metrics = {name: float(values[place]) for name, values in history[HOLDOUT].items()} if history else {}
        return TrialResult(self.value(history, place), metrics, rounds if best is None else best + 1)


class TrialPlan:
    """Checks of a search, and of the parameters of each trial, in the driver.

    Args:
        request: Training of which the search varies the parameters, with the holdout as its only eval set.
        size: Number and size of the workers; each trains a trial alone.
        user_code: The user's functions.
        metric: Deciding metric; None: the last metric of the holdout.

    Raises:
        InvalidArgumentError: The library refuses the parameters that the search does not vary.
        DataError: The footers show that the datasets cannot be used.
    """

    def __init__(self, request: TrainRequest, size: GangSize, user_code: UserCode, metric: str | None) -> None:
        self._request = with_metric(request, user_code, metric)
        self._size = replace(size, num_workers=1)
        self._user_code = user_code
        self._library: Library = library_of(request.framework)
        scaling = request.scaling_config.model_copy(
            update={"num_workers": 1, "num_cpu_per_worker": size.threads, "use_gpu": bool(size.gpus_per_worker)}
        )
        self._request = self._request.model_copy(update={"scaling_config": scaling, "verbose_eval": None})
        training = Training(
            self._request, self._library, user_code, None, {}, on_progress=None, metrics=None, began=time.monotonic()
        )
        self.trials = BoostingTrials(
            request.framework,
            replace(training.alone(), user_code=UserCode()),
            pickled(user_code, "callbacks, objective or metrics") if user_code else b"",
            metric,
            request.run_config.checkpoint_every,
        )

    def checked(self, params: Mapping[str, Any]) -> TrialParams:
        """Check the parameters of a trial with the library, as a training does.

        Raises:
            InvalidArgumentError: A parameter is unknown, or its value is not legal.
        """
        request = with_params(self._request, params)
        checked, seed = self._library.params(request, self._size, self._user_code)
        return TrialParams(checked, seed, request.n_estimators)


def with_params(request: TrainRequest, params: Mapping[str, Any]) -> TrainRequest:
    """Return a copy of a request with the parameters of a trial, which replace parameters of the same name or alias.

    Raises:
        InvalidArgumentError: A value is not legal.
    """
    others = {name: value for name, value in params.items() if name != ROUNDS}
    names = importlib.import_module(f"shoal.training.{request.framework}.params").NAMES
    replaced = {names.canonical(name) for name in others}
    kept = {name: value for name, value in request.params.items() if names.canonical(name) not in replaced}
    rounds = params.get(ROUNDS, request.n_estimators)
    if isinstance(rounds, float) and rounds.is_integer():
        rounds = int(rounds)
    return type(request)(**{**dict(request), "params": {**kept, **others}, ROUNDS: rounds})


def with_metric(request: TrainRequest, user_code: UserCode, metric: str | None) -> TrainRequest:
    """Return a copy of a request that evaluates the deciding metric.

    Raises:
        InvalidArgumentError: The request names other metrics of the library, and the user has none of their own.
    """
    if metric is None or user_code.metrics:
        return request
    given = next((request.params[name] for name in _METRIC_ALIASES if request.params.get(name)), None)
    if given is None:
        return request.model_copy(update={"params": {**request.params, _METRIC[request.framework]: metric}})
    named = given.split(",") if isinstance(given, str) else [str(each) for each in given]  # type: ignore[union-attr]
    if metric not in named:
        raise InvalidArgumentError(
            f'metric="{metric}" is not among the metrics of the estimator ({", ".join(named)}): add it there, or name '
            "one of these"
        )
    return request


def is_maximised(request: TrainRequest, metric: str | None) -> bool:
    """Return whether a higher value of the deciding metric is better, as far as the library's own metrics are known."""
    if metric is None:
        given = next((request.params[name] for name in _METRIC_ALIASES if request.params.get(name)), None)
        if given is None:
            return str(request.params.get("objective", "")).startswith(_RANKING)
        metric = str(given).split(",")[-1] if isinstance(given, str) else str(list(given)[-1])  # type: ignore[arg-type]
    return metric.split("@")[0].rstrip("-") in _HIGHER_IS_BETTER
