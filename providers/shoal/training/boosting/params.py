"""A library's parameters as the user wrote them: what may be said in two places joined, contradictions refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.user_code import Objective

ROUNDS = "n_estimators"
"""What every name of the number of rounds is an alias of here."""


@dataclass(frozen=True, slots=True)
class Names:
    """What a library calls its parameters.

    Args:
        library: Its name.
        aliases: Names that it takes for one another, each with the one that stands for them.
        objectives: The same of objectives.
    """

    library: str
    aliases: Mapping[str, str]
    objectives: Mapping[str, str]

    def canonical(self, name: str) -> str:
        """The one name that stands for a parameter's."""
        return self.aliases.get(name, name)

    def objective(self, name: Any) -> Any:
        """The one name that stands for an objective's."""
        return self.objectives.get(name, name)


def merge(
    params: Mapping[str, Any] | None, objective: str | Objective | None, n_estimators: int, names: Names
) -> dict[str, Any]:
    """Joins what may be said in two places, and refuses contradictions.

    Args:
        params: The user's parameters.
        objective: The estimator's own `objective` argument; a function has no place among the parameters.
        n_estimators: The estimator's own number of rounds.
        names: What the library calls them.

    Returns:
        Plain values that JSON can hold, under the user's names; the objective among them where it has a name, the
        number of rounds not. NumPy scalars have become Python's.

    Raises:
        InvalidArgumentError: If two values for one thing differ, or a value cannot be written down as JSON.
    """
    merged = {name: _plain(name, value) for name, value in dict(params or {}).items()}
    given: dict[str, tuple[str, Any]] = {}
    for name, value in merged.items():
        canonical = names.canonical(name)
        if canonical in given and given[canonical][1] != value:
            other, theirs = given[canonical]
            raise InvalidArgumentError(
                f"params hold {other}={theirs!r} and {name}={value!r}, which are one parameter: leave one out"
            )
        given[canonical] = (name, value)
    if callable(objective):
        if "objective" in given:
            name, inside = given["objective"]
            raise InvalidArgumentError(f'objective is a function, and params hold {name}="{inside}": leave one out')
    elif objective is not None:
        if not isinstance(objective, str):
            raise InvalidArgumentError(
                f"objective must be a function, or the name of one of {names.library}'s objectives, not {objective!r}"
            )
        name, inside = given.get("objective", ("objective", objective))
        if names.objective(inside) != names.objective(objective):
            raise InvalidArgumentError(
                f'objective="{objective}" is given, and params hold {name}="{inside}": leave one out'
            )
        merged[name] = objective
    if ROUNDS in given:
        name, value = given[ROUNDS]
        if value != n_estimators:
            raise InvalidArgumentError(
                f"params hold {name}={value!r}, the estimator has n_estimators={n_estimators}: "
                "give it to the estimator alone"
            )
    return {name: value for name, value in merged.items() if names.canonical(name) != ROUNDS}


def seed_in(params: Mapping[str, Any], otherwise: int, names: Names) -> int:
    """The seed that the parameters name; `otherwise` if they do not.

    Raises:
        InvalidArgumentError: If it is no whole number.
    """
    seed = next((value for name, value in params.items() if names.canonical(name) == "seed"), otherwise)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidArgumentError(f"params hold seed={seed!r}: a seed is a whole number")
    return seed


def _plain(name: str, value: Any) -> Any:
    if not isinstance(name, str):
        raise InvalidArgumentError(f"a parameter's name must be a str, not {name!r}")
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(name, item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        # NumPy's scalars and arrays, as a search over hyperparameters draws them.
        value = value.tolist()
    if value is None or isinstance(value, str | bool | int | float | list):
        return value
    if callable(value):
        raise InvalidArgumentError(
            f"params[{name!r}] is a function: give it to the estimator, as objective or as custom_metric"
        )
    raise InvalidArgumentError(
        f"params[{name!r}] must be a number, a string, a bool, a list or a dict of them, not {value!r}"
    )
