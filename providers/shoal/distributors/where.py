"""Where a training runs: in this process's own Ray cluster if it is connected to one, else on a pool, as a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.training.cluster import is_connected
from shoal.training.request import XGBTrainRequest, XGBTrainResult


def run_xgboost(request: XGBTrainRequest, callbacks: Sequence[Any] = ()) -> XGBTrainResult:
    """Runs a training where it belongs.

    Args:
        request: What to train.
        callbacks: XGBoost's callbacks.

    Returns:
        The model and what it took.
    """
    if is_connected():
        from shoal.training.xgboost import train_xgboost

        return train_xgboost(request, callbacks=callbacks)
    from shoal.distributors.elsewhere import run_xgboost_as_job

    return run_xgboost_as_job(request, callbacks)
