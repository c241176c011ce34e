"""Provide `TrialContext`, by which a function that runs a trial gets its parameters and reports its value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError

if TYPE_CHECKING:
    from shoal.data.connector import DataConnector


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


def running_trial() -> TrialContext | None:
    """Return the trial that this process runs; None if it runs none."""
    return _current


def set_current_trial(trial: TrialContext | None) -> None:
    """Set the trial that this process runs."""
    global _current
    _current = trial
