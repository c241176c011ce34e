"""Decide whether a lower or a higher value of a metric is better, for early stopping and for searches.

The libraries' modules `params` know the directions of the library's own metrics; a function of the user may tell the
direction of its metric.
"""

from __future__ import annotations

from typing import Any, Literal

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.user_code import UserCode

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
