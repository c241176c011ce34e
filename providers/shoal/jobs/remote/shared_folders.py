"""Decide which paths the nodes of a pool can reach: URIs, and folders that the nodes share with this machine."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.pool.backends import BACKENDS
from shoal.pool.spec import PoolSpec
from shoal.training.locations import local_path


def is_remote(spec: PoolSpec) -> bool:
    """Return whether the pool's nodes may be on hosts that share only the network with this process."""
    return not BACKENDS[spec.backend]().bound_to_host


def is_reachable(location: str, pool: PoolSpec) -> bool:
    """Return whether a location is a URI, or in a folder that the pool's nodes share with this machine."""
    path = path_here(location)
    return path is None or any(Path(path).is_relative_to(folder) for folder in pool.shared())


def path_here(location: str) -> str | None:
    """Return the path of a location on this machine; None if the location is a URI."""
    path = local_path(location)
    return None if "://" in path else os.path.normpath(Path(path).expanduser().absolute())
