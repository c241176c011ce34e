from __future__ import annotations

from tests.prefect.conftest import logged, server, tiny

__all__ = ["logged", "server", "tiny"]
