"""Backends, which start and end the nodes of pools. Each subpackage contains one implementation of the interface
`base.Backend`."""

from __future__ import annotations

from collections.abc import Callable

from shoal.pool.backends.base import Arrival, Backend, NodeRef, PoolRef, Seen, Waiting, pool_id
from shoal.pool.backends.local.backend import LocalBackend
from shoal.pool.spec import BackendName


def _ray() -> Backend:
    # Import the Ray backend only for `ray://` pools, because the import also loads an HTTP client, which local pools do
    # not need.
    from shoal.pool.backends.ray.backend import RayBackend

    return RayBackend()


def _kuberay() -> Backend:
    from shoal.pool.backends.kuberay.backend import KubeRayBackend

    return KubeRayBackend()


BACKENDS: dict[BackendName, Callable[[], Backend]] = {"local": LocalBackend, "ray": _ray, "kuberay": _kuberay}
"""Functions that create the backends, by the values of `PoolSpec.backend`."""

__all__ = ["BACKENDS", "Arrival", "Backend", "LocalBackend", "NodeRef", "PoolRef", "Seen", "Waiting", "pool_id"]
