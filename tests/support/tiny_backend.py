"""The local backend with tiny nodes, for processes that tests start."""

from __future__ import annotations

from shoal.pool.backends.local.backend import LocalBackend


class TinyBackend(LocalBackend):
    """The local backend whose nodes are no Ray nodes."""

    supervisor = "tests.support.tiny_node"

    def check_ray(self) -> None:
        """Tiny nodes need no Ray."""
