"""Give a function the arguments of another one, which are then written only once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def same_arguments(model: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Return a decorator for a function that takes the arguments of `model`, and gets each by its name."""
    expected = inspect.signature(model)

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            given = expected.bind(*args, **kwargs)
            given.apply_defaults()
            return function(**given.arguments)

        returned = inspect.signature(function).return_annotation
        call.__signature__ = expected.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return call

    return decorate
