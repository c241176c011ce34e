"""The public training API. One module per library, so that importing one loads nothing of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.distributors.decorators import distributed

__all__ = ["distributed"]


def __getattr__(name: str) -> Any:
    if name == "distributed":
        from shoal.distributors.decorators import distributed

        return distributed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
