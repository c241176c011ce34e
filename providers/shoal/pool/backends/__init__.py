"""Backends, which start and end the nodes of pools. Each subpackage contains one implementation of the interface
`interface.Backend`."""

from __future__ import annotations

import pkgutil

from shoal.pool.backends.interface import Backend
from shoal.pool.options import backend_names, options_of
from shoal.pool.spec import PoolSpec


def backend_of(spec: PoolSpec) -> Backend:
    """Return the backend of a pool."""
    return _made(spec.backend)


def all_backends() -> list[Backend]:
    """Return the backends of shoal and of all other installed packages."""
    return [_made(name) for name in backend_names()]


def _made(name: str) -> Backend:
    backend: Backend = pkgutil.resolve_name(options_of(name).backend_class)()
    return backend
