"""Provide the public API for training and prediction.

Each training library has a module of its own, so that an import of the module loads only this library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.distributors.batch_prediction import predict
    from shoal.distributors.decorators import distributed, ray_launch

__all__ = ["distributed", "predict", "ray_launch"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from shoal.distributors import batch_prediction, decorators

        return getattr(batch_prediction if name == "predict" else decorators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
