"""Options of pools: those that all pools have, and those of each backend with their check. Other packages bring further
backends as entry points.

DAG files import this package, so it needs neither the store nor an HTTP client.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.option_validation import unknown_value
from shoal.pool.options.base import PoolOptions
from shoal.pool.options.kuberay import KubeRayOptions
from shoal.pool.options.local import LocalOptions
from shoal.pool.options.ray import RayOptions

OPTIONS: dict[str, type[PoolOptions]] = {"local": LocalOptions, "ray": RayOptions, "kuberay": KubeRayOptions}
"""Options of each backend of shoal, by its name."""

ENTRY_POINTS = "shoal.backends"
"""Group of entry points for the backends of other packages. The name of an entry point is the scheme of the pools'
URIs, and its object is a subclass of `PoolOptions`."""


@functools.cache
def options_of(backend: str) -> type[PoolOptions]:
    """Return the options of a backend's pools.

    Raises:
        InvalidArgumentError: No installed package has this backend, or the package cannot be imported.
    """
    if backend in OPTIONS:
        return OPTIONS[backend]
    others = _others()
    if backend not in others:
        allowed = " or ".join(map(repr, backend_names()))
        raise InvalidArgumentError(
            unknown_value("backend", backend, f"{allowed}, or the backend of a package that is installed here")
        )
    try:
        options = others[backend].load()
    except Exception as error:
        raise InvalidArgumentError(_cannot_import(backend, others[backend].value, error)) from error
    if not (isinstance(options, type) and issubclass(options, PoolOptions)):
        raise InvalidArgumentError(
            f'the backend "{backend}" ({others[backend].value}) is no subclass of shoal.pool.options.base.PoolOptions'
        )
    return options


def backend_class(backend: str) -> Callable[[], Any]:
    """Import the class of a backend.

    Raises:
        InvalidArgumentError: As :func:`options_of`.
    """
    name = options_of(backend).backend_class
    try:
        found: Callable[[], Any] = pkgutil.resolve_name(name)
    except Exception as error:
        raise InvalidArgumentError(_cannot_import(backend, name, error)) from error
    return found


def _cannot_import(backend: str, name: str, error: Exception) -> str:
    return f'the backend "{backend}" ({name}) cannot be imported: {type(error).__name__}: {error}'


def missing(backend: str) -> str | None:
    """Return why this process cannot use a backend, and what to do; None if it can."""
    try:
        backend_class(backend)
    except InvalidArgumentError as error:
        return str(error)
    return None


def backend_names() -> list[str]:
    """Return the names of all backends: those of shoal, and those of other installed packages."""
    return [*OPTIONS, *_others()]


def _others() -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=ENTRY_POINTS) if each.name not in OPTIONS}
