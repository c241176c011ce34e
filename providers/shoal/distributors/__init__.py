"""Provide the public API for training and prediction.

Each training library has a module of its own, so that an import of the module loads only this library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.distributors.batch_prediction import predict, submit_predict
    from shoal.distributors.decorators import distributed, ray_launch
    from shoal.distributors.submitted_call import SubmittedCall, attach

_MODULES = {
    "SubmittedCall": "submitted_call",
    "attach": "submitted_call",
    "distributed": "decorators",
    "predict": "batch_prediction",
    "ray_launch": "decorators",
    "submit_predict": "batch_prediction",
}
"""Module of each public name. A module is imported when one of its names is used."""

__all__ = ["SubmittedCall", "attach", "distributed", "predict", "ray_launch", "submit_predict"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
