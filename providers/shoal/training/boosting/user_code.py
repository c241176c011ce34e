"""What a training runs of the user's own. A spec is plain data and has no place for it: it travels beside, by value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import InvalidArgumentError

Objective = Callable[..., Any]
"""Gradient and Hessian of each row's loss, in the signature that the library gives such functions."""
Metric = Callable[..., Any]
"""The value of a metric on an eval set, in the signature that the library gives such functions."""


@dataclass(frozen=True, slots=True)
class UserCode:
    """Callbacks and functions; every worker gets its own copy. Empty, it is false.

    Args:
        callbacks: The library's callbacks.
        objective: What is minimised, where it is none of the library's own.
        metrics: What is evaluated after each round, beside the library's own metrics.
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
        """What is the user's own in an estimator's arguments.

        Args:
            callbacks: The library's callbacks.
            objective: A function, or the name of one of the library's.
            custom_metric: A function, or several.

        Raises:
            InvalidArgumentError: If a metric is no function.
        """
        metrics: Sequence[Any] = () if custom_metric is None else (custom_metric,)
        if isinstance(custom_metric, list | tuple):
            metrics = custom_metric
        for metric in metrics:
            if not callable(metric):
                raise InvalidArgumentError(
                    f"custom_metric must be a function or a list of them, not {metric!r}: "
                    "the library's own metrics are named in params"
                )
        return cls(tuple(callbacks or ()), objective if callable(objective) else None, tuple(metrics))

    def __bool__(self) -> bool:
        return bool(self.parts())

    def parts(self) -> tuple[Any, ...]:
        """All callbacks and functions."""
        return (*self.callbacks, *self.metrics, *(() if self.objective is None else (self.objective,)))

    def names(self) -> dict[str, str]:
        """What the functions are called, under the names of the arguments that they were given as."""
        objective = () if self.objective is None else (self.objective,)
        found = {"objective": objective, "custom_metric": self.metrics}
        return {
            argument: ", ".join(getattr(function, "__name__", type(function).__name__) for function in functions)
            for argument, functions in found.items()
            if functions
        }


def refuse_namesakes(history: Mapping[str, Mapping[str, Sequence[float]]], rounds: int) -> None:
    """Refuses a custom metric that has the name of another one: both would be written down as one.

    Args:
        history: Eval set -> metric -> its values.
        rounds: Rounds that they are of.

    Raises:
        InvalidArgumentError: If there are more values than rounds.
    """
    for metrics in history.values():
        for metric, values in metrics.items():
            if len(values) > rounds:
                raise InvalidArgumentError(f'two metrics are called "{metric}": give the custom one a name of its own')
