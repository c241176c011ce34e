"""Where a training runs: in this process's own Ray cluster if it is connected to one, else on a pool, as a job."""

from __future__ import annotations

from shoal.training.cluster import is_connected
from shoal.training.request import TrainRequest, TrainResult
from shoal.training.user_code import UserCode


def run(request: TrainRequest, user_code: UserCode) -> TrainResult:
    """Runs a training where it belongs.

    Args:
        request: What to train.
        user_code: The user's callbacks, objective and metrics.

    Returns:
        The model and what it took.
    """
    if is_connected():
        from shoal.training.boosting import train

        return train(request, user_code=user_code)
    from shoal.distributors.elsewhere import run_as_job

    return run_as_job(request, user_code)
