"""Where nodes run: one module per kind, behind the few methods of `base.Backend`."""

from __future__ import annotations

from collections.abc import Callable

from shoal.pool.backends.base import Backend, NodeRef
from shoal.pool.backends.local import LocalBackend

BACKENDS: dict[str, Callable[[], Backend]] = {"local": LocalBackend}
"""`PoolSpec.backend` -> what makes it."""

__all__ = ["BACKENDS", "Backend", "LocalBackend", "NodeRef"]
