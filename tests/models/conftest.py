from __future__ import annotations

from tests.support.gate import data, gate, uris

__all__ = ["data", "gate", "uris"]
