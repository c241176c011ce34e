"""Pickle the user's functions and objects together with the code of modules that are not installed on the nodes."""

from __future__ import annotations

import io
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from shoal.errors import InvalidArgumentError

# All threads of the process share cloudpickle's registry of modules that are pickled by value, so only one thread at a
# time may change it.
_registering = threading.Lock()


@dataclass(frozen=True, slots=True)
class Pickled:
    """Pickled object. If a message contains a `Pickled`, the receiver of the message gets the object itself.

    Args:
        content: Result of :func:`pickled`.
    """

    content: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        import cloudpickle

        return cloudpickle.loads, (self.content,)


def pickled(value: Any, what: str) -> bytes:
    """Pickle functions and objects, including the variables of their closures.

    Code that is not installed in the environment (a script, a DAG file, a notebook, and the modules that these use) is
    pickled too, because the nodes cannot import such code. It does not matter where in `value` the code is used: in a
    callback object of the library, in a bound method or in the variables of a function.

    Returns:
        The pickled bytes.

    Raises:
        InvalidArgumentError: The value contains an object that cannot be pickled.
    """
    try:
        with _registering:
            try:
                return _dump(value, (type, FunctionType, ModuleType))
            except Exception:
                # A module that a function uses as a whole may contain objects that cannot be pickled. The nodes may be
                # able to import the module, so it is pickled by its name.
                return _dump(value, (type, FunctionType))
    except Exception as error:
        raise InvalidArgumentError(
            f"{what} cannot be sent to the pool: {error}. Create objects that cannot be pickled, such as locks and "
            "connections, inside the function"
        ) from error


def _dump(value: Any, by_value: tuple[type, ...]) -> bytes:
    """Pickle an object."""
    import cloudpickle

    with _registered() as register:

        class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
            def reducer_override(self, found: Any) -> Any:
                # Pickle calls this method for each object, just before cloudpickle asks its registry.
                if isinstance(found, by_value):
                    register(found.__name__ if isinstance(found, ModuleType) else found.__module__)
                return super().reducer_override(found)

        with io.BytesIO() as file:
            Pickler(file).dump(value)
            return file.getvalue()


@contextmanager
def _registered() -> Iterator[Any]:
    """Yield a function that makes cloudpickle pickle a module by value, until the ``with`` block ends."""
    import cloudpickle

    seen = set(cloudpickle.list_registry_pickle_by_value())
    mine: list[ModuleType] = []

    def register(name: Any) -> None:
        if name in seen:
            return
        seen.add(name)
        module = sys.modules.get(name)
        if module is not None and not is_installed(module):
            cloudpickle.register_pickle_by_value(module)
            mine.append(module)

    try:
        yield register
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)


def is_installed(module: ModuleType) -> bool:
    """Return whether the nodes have a module, so that its functions and classes are sent by their names."""
    file = getattr(module, "__file__", None)
    # Modules without a file need no registration with cloudpickle. They are either built into Python, so every node has
    # them, or they are the main module of an interactive session, which cloudpickle always pickles.
    if file is None or module.__name__.split(".")[0] == "shoal":
        return True
    if {"site-packages", "dist-packages"} & {*Path(file).parts}:
        return True
    return any(Path(file).is_relative_to(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib"))
