"""Provide the public API for training and prediction.

Each training library has a module of its own, so that an import of the module loads only this library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shoal.distributors.batch_prediction import predict, submit_predict
    from shoal.distributors.call import SubmittedCall, attach
    from shoal.distributors.decorators import distributed, ray_launch

__all__ = ["SubmittedCall", "attach", "distributed", "predict", "ray_launch", "submit_predict"]

__getattr__ = lazy_exports(__name__)
