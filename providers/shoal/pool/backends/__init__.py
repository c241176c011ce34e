"""Where nodes run: one module per kind, behind the few methods of `base.Backend`."""

from __future__ import annotations

from collections.abc import Callable

from shoal.pool.backends.base import Arrival, Backend, NodeRef, PoolRef, Seen
from shoal.pool.backends.local.backend import LocalBackend
from shoal.pool.spec import BackendName


def _ray() -> Backend:
    from shoal.pool.backends.ray.backend import RayBackend  # an HTTP client, which local pools do without

    return RayBackend()


BACKENDS: dict[BackendName, Callable[[], Backend]] = {"local": LocalBackend, "ray": _ray}
"""`PoolSpec.backend` -> what makes it."""

__all__ = ["BACKENDS", "Arrival", "Backend", "LocalBackend", "NodeRef", "PoolRef", "Seen"]
