"""Define a container for the callbacks, the objective and the metrics that the user wrote for a training.

These functions and objects are pickled and sent separately from the request, because the request contains only JSON
data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.training.host.own_process import ending_forks

Objective = Callable[..., Any]
"""Type of the user's objective function, which returns the gradient and Hessian of each row's loss. The boosting
library defines the arguments of the function."""
Metric = Callable[..., Any]
"""Type of the user's metric function, which returns the value of a metric on an eval set. The boosting library defines
the arguments of the function."""


@dataclass(frozen=True, slots=True)
class UserCode:
    """Callbacks, objective and metrics that the user wrote; every worker gets a copy.

    A `UserCode` is falsy if it contains neither callbacks, nor an objective, nor metrics.

    Args:
        callbacks: Callbacks in the library's format.
        objective: Objective function, or None for one of the library's objectives.
        metrics: Functions to evaluate after each round, in addition to the library's own metrics.
    """

    callbacks: tuple[Any, ...] = ()
    objective: Objective | None = None
    metrics: tuple[Metric, ...] = ()

    @classmethod
    def of(
        cls,
        callbacks: Sequence[Any] | None,
        objective: str | Objective | None,
        custom_metric: Metric | Sequence[Metric] | None,
    ) -> UserCode:
        """Collect the user's functions from an estimator's arguments.

        Raises:
            InvalidArgumentError: A metric is not a function.
        """
        metrics: Sequence[Any] = () if custom_metric is None else (custom_metric,)
        if isinstance(custom_metric, list | tuple):
            metrics = custom_metric
        for metric in metrics:
            if not callable(metric):
                raise InvalidArgumentError(
                    f"custom_metric must be a function or a list of functions, not {metric!r}: "
                    "to use a metric of the library itself, add its name to params"
                )
        return cls(tuple(callbacks or ()), objective if callable(objective) else None, tuple(metrics))

    def __bool__(self) -> bool:
        return bool(self.parts())

    def parts(self) -> tuple[Any, ...]:
        """Return the user's callbacks, metrics and objective (if any) in one tuple."""
        return (*self.callbacks, *self.metrics, *(() if self.objective is None else (self.objective,)))

    def ending_forks(self) -> UserCode:
        """Return a copy for a worker, whose objective and metrics end the processes that they fork."""

        def ends(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                with ending_forks():
                    return function(*args)

            return call

        objective = None if self.objective is None else ends(self.objective)
        return replace(self, objective=objective, metrics=tuple(map(ends, self.metrics)))

    def names(self) -> dict[str, str]:
        """Return the names of the user's functions, by estimator argument: ``objective`` or ``custom_metric``."""
        objective = () if self.objective is None else (self.objective,)
        found = {"objective": objective, "custom_metric": self.metrics}
        return {
            argument: ", ".join(getattr(function, "__name__", type(function).__name__) for function in functions)
            for argument, functions in found.items()
            if functions
        }


def refuse_namesakes(history: Mapping[str, Mapping[str, Sequence[float]]], rounds: int) -> None:
    """Raise InvalidArgumentError if two metrics have the same name, because both would append their values to one list.

    Raises:
        InvalidArgumentError: A metric has more values than there are rounds.
    """
    for metrics in history.values():
        for metric, values in metrics.items():
            if len(values) > rounds:
                raise InvalidArgumentError(f'two metrics have the name "{metric}": rename the custom metric')
