"""The functions that are called for partitions, pickled for the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.training.pickling import pickled
from shoal.training.pytorch.program import MAX_BYTES, call_imported, check_runnable, imported, name_of


def program_of(function: Callable[..., Any]) -> bytes:
    """Pickle a function with the variables of its closure.

    Raises:
        InvalidArgumentError: This is no function, it cannot be pickled, or it is too large.
    """
    check_runnable(function, "the function")
    content = pickled(function, name_of(function))
    if len(content) > MAX_BYTES:
        raise InvalidArgumentError(
            f"{name_of(function)} is {len(content) / 2**20:.0f} MiB large with the variables of its closure, but the "
            f"limit is {MAX_BYTES / 2**20:.0f} MiB: let the function read the data itself"
        )
    return content


def program_named(name: str, kwargs: Mapping[str, Any], *, in_workers: bool) -> bytes:
    """Pickle a function that is given by its name ``pkg.module:name``, with keyword arguments.

    Args:
        name: Name of the function.
        kwargs: Keyword arguments.
        in_workers: Whether only the workers can import the function, because it is in the job's own packages or code.

    Raises:
        InvalidArgumentError: The function cannot be imported.
    """
    function = partial(call_imported, name) if in_workers else imported(name)
    return pickled(partial(function, **kwargs) if kwargs else function, name)
