"""Train a boosting model for each trial of a search for parameters, on rows that are read and quantised once.

Each worker trains its trials alone, with all rows, in the same segments as a training with one worker: the metrics of
a trial are those of such a training.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.lazy_imports import cloudpickle
from shoal.training.boosting.engine import Training, installed_library
from shoal.training.boosting.library import Library, library_of
from shoal.training.boosting.messages import Boosted, Checkpoint, History, Segment, Task, next_segment
from shoal.training.boosting.params import ROUNDS, Direction, Directions, UserCode, agreed, custom_text
from shoal.training.boosting.request import TrainRequest
from shoal.training.gang.placement import GangShape
from shoal.training.pickling import pickled
from shoal.training.reporting import HOLDOUT, GangContext
from shoal.training.run_config import Restarts

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
        direction: Direction of the metric that stops the training early; None: only the worker gets to know it.
    """

    params: dict[str, Any]
    seed: int
    rounds: int
    direction: Direction | None = None


class Trainer(Protocol):
    """Interface of a library's module `trials`, whose class `Trials` trains in a worker and keeps the matrices."""

    def boost(self, task: Task, on_round: OnRound) -> Callable[[Segment], Boosted]:
        """Begin a training, and return the function that trains a segment of it."""

    def direction(self, task: Task, metric: str | None) -> Direction | None:
        """Return the direction that the user's function tells of its metric; without a name, of the last metric. Only
        libraries with `functions_tell_direction` have this method."""


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
        return cast("Trainer", importlib.import_module(library_of(self.framework).worker).Trials(context))

    def train(self, trainer: Trainer, trial: TrialParams, on_round: OnRound) -> dict[str, Any]:
        """Train a trial in this worker.

        Returns:
            The ``value`` of the deciding metric on the holdout, in the best round with early stopping, else in the
            last, all ``metrics`` in that round, and the number of ``rounds`` up to and including that round.

        Raises:
            PrunedError: The driver has ended the trial early.
        """
        boost = trainer.boost(self._task(trial), on_round)
        resume: Checkpoint | None = Checkpoint()
        rounds = 0
        while True:
            segment = next_segment(rounds, trial.rounds, self.checkpoint_every, resume)
            boosted = boost(segment)
            assert boosted.checkpoint is not None, "a worker that trains alone is rank 0"
            rounds, resume = boosted.checkpoint.rounds, None
            if segment.last or boosted.stopped:
                history, best = boosted.checkpoint.history, boosted.best_iteration
                place = -1 if best is None else best
                metrics = {name: float(values[place]) for name, values in history[HOLDOUT].items()} if history else {}
                last = rounds if best is None else best + 1
                return {"value": self.value(history, place), "metrics": metrics, "rounds": last}

    def direction(self, context: GangContext, trial: TrialParams) -> Direction | None:
        """Return the direction that the user's function tells of the deciding metric in a trial."""
        return self.trainer(context).direction(self._task(trial), self.metric)

    def _task(self, trial: TrialParams) -> Task:
        user_code = cloudpickle.loads(self.user_code) if self.user_code else UserCode()
        return replace(self.task, params=trial.params, seed=trial.seed, direction=trial.direction, user_code=user_code)

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


class TrialPlan:
    """Checks of a search, and of the parameters of each trial, in the driver.

    Args:
        request: Training of which the search varies the parameters, with the holdout as its only eval set.
        size: Number and size of the workers; each trains a trial alone.
        user_code: The user's functions.
        metric: Deciding metric; None: the last metric of the holdout.
        direction: Direction of the deciding metric; None: as the metric demands.
        samples: Parameters of some trials, among them each objective and each metric that the trials can have.

    Attributes:
        size: Number and size of the workers.
        user_code: The user's functions.
        metric: Name of the deciding metric; None: the last one.
        compared_by: This name, or that of the library's last metric; None: that of the user's last function.
        direction: Its direction; None: only the user's function tells it, in a worker.
        is_told: Whether the user's function tells the direction, which a given direction must not contradict.

    Raises:
        InvalidArgumentError: The library refuses the parameters that the search does not vary, or all samples; the
            trials have no metric in common; or the direction is not known, or contradicts the metric.
        DataError: The footers show that the datasets cannot be used.
    """

    def __init__(
        self,
        request: TrainRequest,
        size: GangShape,
        user_code: UserCode,
        metric: str | None,
        direction: Direction | None = None,
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.size = size
        self.user_code = user_code
        self._one = replace(size, num_workers=1)
        self._library: Library = installed_library(request.framework)
        scaling = request.scaling_config.model_copy(
            update={"num_workers": 1, "num_cpu_per_worker": size.threads, "use_gpu": bool(size.gpus_per_worker)}
        )
        self._request = request.model_copy(update={"scaling_config": scaling, "verbose_eval": None})
        self.metric = self._resolved(metric)
        self._compared, self.direction, self._sample = self._decide(direction, samples)
        self.compared_by = self.metric or self._compared
        self.is_told = self._compared is None and self._library.functions_tell_direction
        if self._compared is None and (self.metric is None or len(user_code.metrics) == 1):
            # The metric that stops a trial early is the deciding one.
            self._request = self._request.model_copy(update={"direction": self.direction})
        training = Training(self._request, self._library, user_code, Restarts(self._request.run_config))
        self.trials = BoostingTrials(
            request.framework,
            replace(training.alone(), user_code=UserCode()),
            pickled(user_code, "callbacks, objective or metrics") if user_code else b"",
            self.metric,
            request.run_config.checkpoint_every,
        )

    def sample(self) -> TrialParams:
        """Return the parameters of a trial that the library accepts."""
        return self.checked(self._sample)

    def checked(self, params: Mapping[str, Any]) -> TrialParams:
        """Check the parameters of a trial with the library, as a training does.

        Raises:
            InvalidArgumentError: A parameter is unknown, its value is not legal, or the trial would be compared by
                another metric than the others.
        """
        request = with_params(self._request, params)
        checked, seed = self._library.params(request, self._one, self.user_code)
        if self._compared is not None:
            name = self._deciding(self._library.metrics(request, checked, self.user_code))
            if name != self._compared:
                raise _not_comparable((self._compared, self._sample), (name, params))
        direction = self._library.stopping_direction(request, checked, self.user_code)
        return TrialParams(checked, seed, request.n_estimators, direction)

    def _metrics(self, request: TrainRequest) -> Directions:
        checked, _ = self._library.params(request, self._one, self.user_code)
        return self._library.metrics(request, checked, self.user_code)

    def _resolved(self, metric: str | None) -> str | None:
        """Return the name under which the library evaluates a metric, and have it evaluated.

        Raises:
            InvalidArgumentError: The request names other metrics of the library, and the user has none of their own.
        """
        given = self._request
        evaluated = self._metrics(given)
        if metric is None or metric in evaluated or self.user_code.metrics:
            return metric
        others = {name: value for name, value in given.params.items() if name not in _METRIC_ALIASES}
        is_named = any(given.params.get(name) for name in _METRIC_ALIASES)
        named = given.model_copy(update={"params": {**others, self._library.metric_param: metric}})
        try:
            names = list(self._metrics(named))
        except InvalidArgumentError:
            if not is_named:
                raise
            names = []
        if len(names) > 1:
            raise InvalidArgumentError(f'metric="{metric}" has the values {", ".join(names)}: name one of these')
        if not is_named:
            self._request = named
        elif not names or names[0] not in evaluated:
            raise InvalidArgumentError(
                f'metric="{metric}" is not among the metrics of the estimator ({", ".join(evaluated)}): add it there, '
                "or name one of these"
            )
        return names[0]

    def _decide(
        self, given: Direction | None, samples: Sequence[Mapping[str, Any]]
    ) -> tuple[str | None, Direction | None, Mapping[str, Any]]:
        """Return the library's metric by which all trials are compared, its direction, and parameters of a trial.

        The metric is None if it is one of the user's functions. Then the direction is None if only the function tells
        it.
        """
        found: dict[str | None, tuple[Direction | None, Mapping[str, Any]]] = {}
        problems: list[InvalidArgumentError] = []
        for params in samples or ({},):
            try:
                metrics = self._metrics(with_params(self._request, params))
            except InvalidArgumentError as error:
                problems.append(error)
                continue
            name = self._deciding(metrics)
            found.setdefault(name, (None if name is None else metrics[name], params))
        if not found:
            raise problems[0]
        if len(found) > 1:
            one, other = [(name, params) for name, (_, params) in found.items()][:2]
            raise _not_comparable(one, other)
        [(name, (known, sample))] = found.items()
        if name is not None:
            return name, agreed(f'the metric "{name}"', known, given), sample
        own = self._request.direction
        if self._library.functions_tell_direction and own in (None, given):
            return None, given, sample
        return None, agreed(custom_text(self.user_code), own, given), sample

    def _deciding(self, metrics: Directions) -> str | None:
        """Return which of the library's metrics decides; None if a function of the user does."""
        if self.metric in metrics:
            return self.metric
        if self.user_code.metrics:
            return None
        if self.metric is not None or not metrics:
            what = "no metric" if self.metric is None else f'not the metric "{self.metric}"'
            raise InvalidArgumentError(
                f"{what} is evaluated with these parameters, but {', '.join(metrics) or 'none'}: name a metric in "
                "metric=, or add it to the parameters of the estimator"
            )
        return next(reversed(metrics))


def _not_comparable(
    one: tuple[str | None, Mapping[str, Any]], other: tuple[str | None, Mapping[str, Any]]
) -> InvalidArgumentError:
    (metric, params), (other_metric, others) = one, other
    return InvalidArgumentError(
        f'the trials cannot be compared: their metric is "{metric}" with {dict(params)}, and "{other_metric}" with '
        f"{dict(others)}. Name one metric for all in metric=, or in the parameters of the estimator"
    )


def decides_metric(framework: str, name: str) -> bool:
    """Return whether a parameter may change by which metric a training is evaluated."""
    names = library_of(framework).names
    return name in _METRIC_ALIASES or names.canonical(name) == "objective"


def with_params(request: TrainRequest, params: Mapping[str, Any]) -> TrainRequest:
    """Return a copy of a request with the parameters of a trial, which replace parameters of the same name or alias.

    Raises:
        InvalidArgumentError: A value is not legal.
    """
    others = {name: value for name, value in params.items() if name != ROUNDS}
    names = library_of(request.framework).names
    replaced = {names.canonical(name) for name in others}
    kept = {name: value for name, value in request.params.items() if names.canonical(name) not in replaced}
    rounds = params.get(ROUNDS, request.n_estimators)
    if isinstance(rounds, float) and rounds.is_integer():
        rounds = int(rounds)
    return type(request)(**{**dict(request), "params": {**kept, **others}, ROUNDS: rounds})
