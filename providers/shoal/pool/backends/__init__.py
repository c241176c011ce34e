"""Backends, which start and end the nodes of pools. Each subpackage contains one implementation of the interface
`interface.Backend`."""

from __future__ import annotations

from collections.abc import Callable

from shoal.pool.backends.interface import Backend
from shoal.pool.options import BackendName
from shoal.pool.spec import PoolSpec


def _local() -> Backend:
    from shoal.pool.backends.local.backend import LocalBackend

    return LocalBackend()


def _ray() -> Backend:
    from shoal.pool.backends.ray.backend import RayBackend

    return RayBackend()


def _kuberay() -> Backend:
    from shoal.pool.backends.kuberay.backend import KubeRayBackend

    return KubeRayBackend()


BACKENDS: dict[BackendName, Callable[[], Backend]] = {"local": _local, "ray": _ray, "kuberay": _kuberay}
"""Functions that create the backends. Each imports its backend only for its pools."""


def backend_of(spec: PoolSpec) -> Backend:
    """Return the backend of a pool."""
    return BACKENDS[spec.backend]()
