"""Merge the user's parameters and functions with the estimator's arguments, refuse contradictions, and decide whether a
lower or a higher value of a metric is better.

The libraries' modules `params` know the directions of the library's own metrics; a function of the user may tell the
direction of its metric.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shoal.errors import DataError, InvalidArgumentError, TrainingError
from shoal.lazy_imports import np
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


ROUNDS = "n_estimators"
"""Canonical name of the parameter for the number of boosting rounds."""


@dataclass(frozen=True, slots=True)
class Names:
    """Aliases of a library's parameters and objectives, and methods that convert an alias to the canonical name.

    Args:
        library: Name of the library.
        aliases: Alias of a parameter -> canonical name.
        objectives: Alias of an objective -> canonical name.
    """

    library: str
    aliases: Mapping[str, str]
    objectives: Mapping[str, str]

    def canonical(self, name: str) -> str:
        """Return the canonical name of a parameter; `name` is an alias or already the canonical name."""
        return self.aliases.get(name, name)

    def objective(self, name: Any) -> Any:
        """Return the canonical name of an objective; `name` is an alias or already the canonical name."""
        return self.objectives.get(name, name)


def merge(
    params: Mapping[str, Any] | None, objective: str | Objective | None, n_estimators: int, names: Names
) -> dict[str, Any]:
    """Merge `params` with the estimator's `objective` and `n_estimators`, and raise an error if values contradict each
    other.

    Raises:
        InvalidArgumentError: A parameter is given twice with different values, or a value cannot be represented as
            JSON.
    """
    if not isinstance(params, Mapping | None):
        raise InvalidArgumentError(
            f"params must be a dict, not {params!r}: give several values of a parameter as a list, such as "
            '{"eval_metric": ["rmse", "mae"]}'
        )
    # For both libraries, None means that a parameter is not set.
    merged = {name: _plain(name, value) for name, value in (params or {}).items() if value is not None}
    given: dict[str, tuple[str, Any]] = {}
    for name, value in merged.items():
        add_once(given, names.canonical(name), name, value)
    if callable(objective):
        if "objective" in given:
            name, inside = given["objective"]
            raise InvalidArgumentError(
                f'objective is a function, but params contain {name}="{inside}": remove one of the two'
            )
    elif objective is not None:
        if not isinstance(objective, str):
            raise InvalidArgumentError(
                f"objective must be a function or the name of an objective of {names.library}, not {objective!r}"
            )
        name, inside = given.get("objective", ("objective", objective))
        if names.objective(inside) != names.objective(objective):
            raise InvalidArgumentError(
                f'the estimator has objective="{objective}", but params contain {name}="{inside}": '
                "remove one of the two"
            )
        merged[name] = objective
    if ROUNDS in given:
        name, value = given[ROUNDS]
        if value != n_estimators:
            raise InvalidArgumentError(
                f"params contain {name}={value!r}, but the estimator has n_estimators={n_estimators}: "
                f"remove {name} from params and set n_estimators"
            )
    return {name: value for name, value in merged.items() if names.canonical(name) != ROUNDS}


ONE_WORKER = "train with one worker (num_workers=1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """A parameter with which a library cannot train, or trains another model in several workers than in one.

    Args:
        name: Canonical name of the parameter.
        values: The unsupported values; empty: every value that switches the parameter on.
        allowed: Values that are supported although `values` is empty.
        only_several_workers: Whether one worker can train with the parameter, and only several workers cannot.
        reason: Reason, as the part of a sentence after "because".
        remedy: Advice in the imperative.
    """

    name: str
    values: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    only_several_workers: bool = True
    reason: str
    remedy: str = ONE_WORKER

    def given(self, value: Any) -> Any:
        """Return the unsupported part of a parameter's value: the value, one item of a list, or None."""
        if not self.values:
            return None if value in (None, "", False, 0, [], *self.allowed) else value
        items = value if isinstance(value, list) else str(value).split(",")
        return next((item for item in items if str(item).strip().partition("@")[0] in self.values), None)


def refuse_unsupported(entries: Iterable[Unsupported], params: Mapping[str, Any], num_workers: int) -> None:
    """Raise InvalidArgumentError if a library cannot train with a parameter, or not in so many workers.

    Raises:
        InvalidArgumentError: A parameter is among the entries; the message contains the reason and the remedy.
    """
    for entry in entries:
        if entry.only_several_workers and num_workers == 1:
            continue
        value = entry.given(params.get(entry.name))
        if value is None:
            continue
        given = f'"{value}"' if isinstance(value, str) else value
        where = f"with {num_workers} workers" if entry.only_several_workers else "in shoal"
        raise InvalidArgumentError(
            f"{entry.name}={given} is not supported {where}, because {entry.reason}: {entry.remedy}"
        )


def add_once(given: dict[str, tuple[str, Any]], canonical: str, name: str, value: Any) -> None:
    """Add a parameter's name and value to `given`, by its canonical name.

    Raises:
        InvalidArgumentError: `given` contains another value of the parameter.
    """
    if canonical in given and given[canonical][1] != value:
        other, theirs = given[canonical]
        raise InvalidArgumentError(
            f"params contain {other}={theirs!r} and {name}={value!r}, which are two names of the same parameter: "
            "remove one of the two"
        )
    given[canonical] = (name, value)


def unknown_hint(name: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown parameter: similar names, if there are any."""
    near = difflib.get_close_matches(name, known, n=2)
    return "; did you mean " + " or ".join(near) + "?" if near else ""


def json_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as JSON represents them: tuples and sets become lists.

    Raises:
        InvalidArgumentError: JSON cannot represent a value.
    """
    plain = {name: _plain(name, value) for name, value in params.items()}
    return dict(json.loads(json.dumps(plain)))


def seed_in(params: Mapping[str, Any], default: int, names: Names) -> int:
    """Return the seed that is set in `params`, or `default` if no seed is set.

    Raises:
        InvalidArgumentError: The seed is not an integer.
    """
    seed = next((value for name, value in params.items() if names.canonical(name) == "seed"), default)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidArgumentError(f"params contain seed={seed!r}: a seed must be an integer")
    return seed


def _plain(name: str, value: Any) -> Any:
    if not isinstance(name, str):
        raise InvalidArgumentError(f"a parameter's name must be a str, not {name!r}")
    if hasattr(value, "tolist"):
        # Libraries for hyperparameter search pass NumPy scalars and arrays. JSON cannot represent these types, so the
        # values are converted to Python numbers and lists.
        value = value.tolist()
    if isinstance(value, list | tuple):
        return type(value)(_plain(name, item) for item in value)
    if isinstance(value, set | frozenset):
        # The order of a set differs between processes, and a training must be reproducible.
        return sorted((_plain(name, item) for item in value), key=str)
    if isinstance(value, dict):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise InvalidArgumentError(f"params[{name!r}] must have names as keys, not {strange[0]!r}")
        return {key: _plain(name, item) for key, item in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if callable(value):
        raise InvalidArgumentError(
            f"params[{name!r}] is a function: pass it to the estimator as objective or custom_metric instead"
        )
    raise InvalidArgumentError(
        f"params[{name!r}] must be a number, a str, a bool, or a list or dict of these, not {value!r}"
    )


_NEEDS_CLASSES = frozenset({"auc", "aucpr", "average_precision", "auc_mu"})
_SHOWN_LABELS = 5


def check_stopping_metric(
    eval_set: str, metric: str, value: float, label: np.ndarray | None, *, grouped: bool, classes: int = 2
) -> None:
    """Raise an error if a metric cannot decide when to stop a training early.

    XGBoost's AUC of an eval set with only one class is NaN, and LightGBM's is 1. With either value no round improves on
    the first, so the training would end with the model of round 0.

    Raises:
        DataError: The eval set has no rows of a class, and the metric needs rows of all classes.
        TrainingError: The value is NaN.
    """
    begin = f'early stopping uses the metric {metric} of eval_set "{eval_set}"'
    if metric.split("@")[0] in _NEEDS_CLASSES and not grouped and label is not None:
        found = np.unique(label)
        if len(found) < classes:
            shown = ", ".join(f"{each:g}" for each in found[:_SHOWN_LABELS])
            raise DataError(
                f"{begin}, which needs rows of all {classes} classes, but this eval set contains only the labels "
                f"{shown}: use an eval set with rows of all classes, or another metric as the last one"
            )
    if math.isnan(value):
        raise TrainingError(
            f"{begin}, but its value is NaN, so it cannot show which round is best. A custom_metric is NaN if its "
            "function returns NaN; a metric of the library, if the model's predictions are not finite or lie outside "
            "of the metric's range, or if all weights are 0: change the metric, or lower the learning rate"
        )


def check_best_score(eval_set: str, metric: str, best: float) -> None:
    """Raise TrainingError if the best value of the metric that stopped a training is infinite.

    A round with an infinite value is allowed, because later rounds can be better or worse. An infinite best value shows
    that no round could be compared.
    """
    if math.isinf(best):
        raise TrainingError(
            f'early stopping uses the metric {metric} of eval_set "{eval_set}", but its best value is {best}, so it '
            "cannot show which round is best: use a metric that is finite for the eval set's labels"
        )


Direction = Literal["minimize", "maximize"]

Directions = dict[str, Direction | None]
"""Type of the library's own metrics of an eval set, in the order of their evaluation: name -> direction, or None if it
is not known."""


def agreed(metric: str, known: Direction | None, given: Direction | None) -> Direction:
    """Return the direction of a metric.

    Args:
        metric: The metric, as a text for error messages.
        known: Direction that the library or the user's function tells; None if neither does.
        given: Direction that the user has set; None if there is none.

    Raises:
        InvalidArgumentError: Both are None, or they contradict each other.
    """
    if known is None and given is None:
        raise InvalidArgumentError(
            f"it is not known whether a lower or a higher value of {metric} is better: set "
            'direction="minimize" or direction="maximize"'
        )
    if None not in (known, given) and known != given:
        raise InvalidArgumentError(
            f'direction="{given}" contradicts {metric}, whose best value is the {str(known)[:3]}imum: leave direction '
            "out"
        )
    return given or known  # type: ignore[return-value]


def told(metric: str, higher_is_better: Any) -> Direction | None:
    """Return the direction that a user's function has returned as `higher_is_better`.

    Raises:
        InvalidArgumentError: The value is neither a truth value nor None.
    """
    if higher_is_better is None:
        return None
    try:
        return {True: "maximize", False: "minimize"}[higher_is_better]  # type: ignore[return-value]
    except (KeyError, TypeError):
        raise InvalidArgumentError(
            f"the custom_metric {metric} must return (name, value, higher_is_better) with True or False as "
            f"higher_is_better, not {higher_is_better!r}"
        ) from None


def custom_text(user_code: UserCode) -> str:
    """Return the user's metric functions as a text for error messages."""
    return f"the custom_metric {user_code.names()['custom_metric']}"
