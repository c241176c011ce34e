"""Where a training runs: in this process's own Ray cluster if it is connected to one, else on a pool, as a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.training.cluster import is_connected
from shoal.training.request import TrainRequest, TrainResult


def run(request: TrainRequest, callbacks: Sequence[Any] = ()) -> TrainResult:
    """Runs a training where it belongs.

    Args:
        request: What to train.
        callbacks: The library's callbacks.

    Returns:
        The model and what it took.
    """
    if is_connected():
        from shoal.training.boosting import train

        return train(request, callbacks=callbacks)
    from shoal.distributors.elsewhere import run_as_job

    return run_as_job(request, callbacks)
