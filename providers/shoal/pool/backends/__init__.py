"""Backends, which start and end the nodes of pools. Each subpackage contains one backend, an implementation of the
interface `base.Backend`."""

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
"""Functions that create the backends, by the values of `PoolSpec.backend`."""

__all__ = ["BACKENDS", "Arrival", "Backend", "LocalBackend", "NodeRef", "PoolRef", "Seen"]
