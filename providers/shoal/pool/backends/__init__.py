"""Backends that start and end nodes. Each subpackage contains one backend, which implements the interface
`base.Backend`."""

from __future__ import annotations

from collections.abc import Callable

from shoal.pool.backends.base import Arrival, Backend, NodeRef, PoolRef, Seen
from shoal.pool.backends.local.backend import LocalBackend
from shoal.pool.spec import BackendName


def _ray() -> Backend:
    # The Ray backend is imported only when it is needed, because it imports an HTTP client that local pools do not use.
    from shoal.pool.backends.ray.backend import RayBackend

    return RayBackend()


BACKENDS: dict[BackendName, Callable[[], Backend]] = {"local": LocalBackend, "ray": _ray}
"""For each value of `PoolSpec.backend`: a function that returns the backend."""

__all__ = ["BACKENDS", "Arrival", "Backend", "LocalBackend", "NodeRef", "PoolRef", "Seen"]
