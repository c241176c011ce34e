"""What runs on every rank, as people say it: a function, its name, or a script; and what they may say beside it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from shoal.errors import InvalidArgumentError

TrainFunc = Callable[..., Any] | str | os.PathLike[str]
"""A function, its name as ``pkg.module:name``, or the path of a script."""

FRAMEWORK = "pytorch"
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_OF_THE_FUNCTION = ("train_func", "args", "kwargs", "program")


def is_name(train_func: Any) -> bool:
    """Whether it names a function that is installed."""
    return isinstance(train_func, str) and _NAME.fullmatch(train_func) is not None


def check_train_func(
    train_func: Any, args: Any, kwargs: Any, *, framework: str | None = None, fields: Any = None
) -> None:
    """Refuses what cannot be run, as far as it shows without looking at a file.

    Args:
        train_func: The function, its name, or a script; None: there is none.
        args: Its arguments.
        kwargs: Its arguments by name.
        framework: What is to train.
        fields: The other fields of the job, or its spec; None: none, or not known yet.

    Raises:
        InvalidArgumentError: Saying what is wrong.
    """
    if isinstance(args, str | bytes):
        raise InvalidArgumentError(f"arguments are a list, such as [{args!r}], and not {args!r}")
    said = fields.get("framework") if isinstance(fields, Mapping) else getattr(fields, "framework", None)
    if framework and said and framework != said:
        raise InvalidArgumentError(f'framework="{framework}" contradicts the spec, which says "{said}"')
    if train_func is None:
        if args or kwargs:
            raise InvalidArgumentError("arguments were given, and no train_func that takes them")
        return
    if not callable(train_func) and not isinstance(train_func, str | os.PathLike):
        raise InvalidArgumentError(f"train_func must be a function, its name or a script's path, not {train_func!r}")
    if (framework or said or FRAMEWORK) != FRAMEWORK:
        raise InvalidArgumentError(f'framework="{framework or said}" runs no train_func: that is "{FRAMEWORK}"')
    if fields is not None and not isinstance(fields, Mapping):
        raise InvalidArgumentError("beside train_func, spec is a dict of the other fields, such as hyper_params")
    if twice := sorted(set(_OF_THE_FUNCTION) & set(fields or ())):
        raise InvalidArgumentError(f"beside train_func, spec cannot say {', '.join(twice)}, too")
    if kwargs and not callable(train_func) and not is_name(train_func):
        raise InvalidArgumentError(f"a script takes a command line, and no arguments by name: {sorted(kwargs)}")
