"""Check the user's `train_func` (a function, the name of a function, or a script) and the arguments for it."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from shoal.errors import InvalidArgumentError

TrainFunc = Callable[..., Any] | str | os.PathLike[str]
"""Type of `train_func`: a function, the name of a function (``pkg.module:name``), or the path of a script."""

FRAMEWORK = "pytorch"
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_OF_THE_FUNCTION = ("train_func", "args", "kwargs", "program")


def is_name(train_func: Any) -> bool:
    """Return whether `train_func` is the name of a function in the form ``pkg.module:name``, and not a path."""
    return isinstance(train_func, str) and _NAME.fullmatch(train_func) is not None


def imported(name: str) -> Callable[..., Any]:
    """Import a function by its name ``pkg.module:name``.

    Raises:
        InvalidArgumentError: The function cannot be imported.
    """
    module, _, path = name.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(
            f"train_func {name} cannot be imported: {error}. Check the names of the module and the function"
        ) from error
    found: Callable[..., Any] = function
    return found


def call_imported(name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Import a function by its name ``pkg.module:name``, call it, and return its value."""
    return imported(name)(*args, **kwargs)


def check_train_func(
    train_func: Any, args: Any, kwargs: Any, *, framework: str | None = None, fields: Any = None
) -> None:
    """Raise InvalidArgumentError if `train_func` cannot be run with the given arguments.

    The check reads no files.

    Raises:
        InvalidArgumentError: The arguments are not allowed together; the message contains the reason.
    """
    if isinstance(args, str | bytes):
        raise InvalidArgumentError(f"arguments must be a list, such as [{args!r}], not {args!r}")
    in_spec = fields.get("framework") if isinstance(fields, Mapping) else getattr(fields, "framework", None)
    if framework and in_spec and framework != in_spec:
        raise InvalidArgumentError(
            f'framework="{framework}" contradicts framework="{in_spec}" in the spec: remove one of the two'
        )
    if train_func is None:
        if args or kwargs:
            raise InvalidArgumentError(
                "arguments are set, but train_func is not: set train_func, or remove the arguments"
            )
        return
    check_runnable(train_func, "train_func", "a function, the name of a function (pkg.module:name)")
    if (framework or in_spec or FRAMEWORK) != FRAMEWORK:
        raise InvalidArgumentError(
            f'train_func requires framework="{FRAMEWORK}", not framework="{framework or in_spec}"'
        )
    if fields is not None and not isinstance(fields, Mapping):
        raise InvalidArgumentError(
            "if train_func is given, spec must be a dict with the other fields of the job, such as hyper_params"
        )
    if twice := sorted(set(_OF_THE_FUNCTION) & set(fields or ())):
        raise InvalidArgumentError(
            f"if train_func is given, spec must not contain {', '.join(twice)}: remove these fields from the spec"
        )
    if not callable(train_func) and not is_name(train_func):
        check_script_arguments(kwargs)


def check_runnable(target: Any, argument: str, function: str = "a function") -> None:
    """Raise InvalidArgumentError if `target` is neither a function nor a string nor a path object.

    Raises:
        InvalidArgumentError: `target` is of another type, or is an async function or a generator function.
    """
    if not callable(target) and not isinstance(target, str | os.PathLike):
        raise InvalidArgumentError(f"{argument} must be {function} or the path of a script, not {target!r}")
    if kind := _not_called_to_its_end(target):
        raise InvalidArgumentError(
            f"{argument} is {kind}, whose call returns before its code has run: pass a plain function, which may call "
            "asyncio.run(...) or loop over the generator"
        )


def _not_called_to_its_end(target: Any) -> str | None:
    while isinstance(target, partial):
        target = target.func
    for function in (target, vars(type(target)).get("__call__")):
        if inspect.iscoroutinefunction(function):
            return "an async function"
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            return "a generator function"
    return None


def check_script_arguments(kwargs: Mapping[str, Any] | None) -> None:
    """Raise InvalidArgumentError if there are keyword arguments for a script, because a script accepts only a list of
    arguments.

    Raises:
        InvalidArgumentError: `kwargs` is not empty.
    """
    if kwargs:
        raise InvalidArgumentError(
            f"a script accepts only command line arguments, no keyword arguments: {sorted(kwargs)}. "
            "Pass these values in the list of arguments"
        )
