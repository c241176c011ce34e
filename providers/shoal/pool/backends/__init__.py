"""Where nodes run: one module per kind, behind the few methods of `base.Backend`."""

from __future__ import annotations

from shoal.pool.backends.base import Backend, NodeRef
from shoal.pool.backends.local import LocalBackend

__all__ = ["Backend", "LocalBackend", "NodeRef"]
