"""Pickle the user's functions and objects together with the code of modules that are not installed on the nodes."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.errors import InvalidArgumentError

# All threads of the process share cloudpickle's registry of modules that are pickled by value, so only one thread at a
# time may change it.
_registering = threading.Lock()


def pickled(value: Any, parts: Iterable[Any], what: str) -> bytes:
    """Pickle functions and objects, including the variables of their closures.

    Code that is not installed in the environment (a script, a DAG file, a notebook) is pickled too, because the nodes
    cannot import such code.

    Args:
        value: Object to pickle.
        parts: The functions and objects within `value` that the user wrote.
        what: Name of `value` in the error message.

    Returns:
        The pickled bytes.

    Raises:
        InvalidArgumentError: The value contains an object that cannot be pickled.
    """
    import cloudpickle

    try:
        with _registering, _by_value(_modules_of(parts)):
            content: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise InvalidArgumentError(
            f"{what} cannot be sent to the pool: {error}. Create objects that cannot be pickled, such as locks and "
            "connections, inside the function"
        ) from error
    return content


def _modules_of(objects: Iterable[Any]) -> Iterator[ModuleType]:
    for found in objects:
        while isinstance(found, partial):
            found = found.func
        name = found.__module__ if hasattr(found, "__qualname__") else type(found).__module__
        if (module := sys.modules.get(name)) is not None and not _is_installed(module):
            yield module


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    installed = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platlib", "purelib")]
    # Modules without a file need no registration with cloudpickle. They are either built into Python, so every node has
    # them, or they are the main module of an interactive session, which cloudpickle always pickles.
    return file is None or any(Path(file).is_relative_to(folder) for folder in installed)


@contextmanager
def _by_value(modules: Iterable[ModuleType]) -> Iterator[None]:
    import cloudpickle

    mine = {module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()}
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)
