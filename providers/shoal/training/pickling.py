"""Pickling what is the user's own by value: what is not installed where it is read travels along."""

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

# cloudpickle's registry is one for all threads of the process.
_registering = threading.Lock()


def pickled(value: Any, parts: Iterable[Any], what: str) -> bytes:
    """Pickles functions and objects with what they close over.

    Whatever is not installed in the environment, such as a script, a DAG file or a notebook, travels along, because the
    nodes cannot import it.

    Args:
        value: What to pickle.
        parts: The functions and objects in it that are the user's own.
        what: What to call it where it cannot be pickled.

    Raises:
        InvalidArgumentError: If something cannot be pickled.
    """
    import cloudpickle

    try:
        with _registering, _by_value(_modules_of(parts)):
            content: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise InvalidArgumentError(f"{what} cannot be sent to the pool: {error}") from error
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
    # Without a file it is built in, or what is typed in, which travels by value anyhow.
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
