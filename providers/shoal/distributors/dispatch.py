"""Run a training in the Ray cluster that this process is connected to; without a connection, as a job on a pool."""

from __future__ import annotations

import os
import secrets

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.boosting.user_code import UserCode
from shoal.training.claims import Claim
from shoal.training.cluster import is_connected
from shoal.training.pytorch.request import FunctionRequest, FunctionResult
from shoal.training.run_config import RunConfig

__all__ = ["is_connected", "run", "run_function", "worker_environment"]


def run(request: TrainRequest, user_code: UserCode) -> TrainResult:
    """Run a training in the Ray cluster that this process is connected to; without a connection, as a job on a pool.

    Args:
        request: Description of the training.
        user_code: The user's callbacks, objective and metrics.

    Returns:
        The trained model and statistics of the training.
    """
    if is_connected():
        from shoal.training.boosting.engine import train

        return train(request, user_code=user_code, env=worker_environment(request.run_config))
    from shoal.distributors.as_job import run_as_job

    return run_as_job(request, user_code)


def run_function(request: FunctionRequest, program: bytes, *, embedded: bool = False) -> FunctionResult:
    """Run a function on all ranks, in the connected Ray cluster or, if there is no connection, as a job on a pool.

    Args:
        request: Workers, datasets and settings of the run.
        program: The function and its arguments, pickled.
        embedded: Whether to use an embedded pool (a pool with one node that ends with this process) even if another
            pool exists. The option has no effect if this process is connected to a Ray cluster.

    Returns:
        The return values of the function on all ranks, and statistics of the run.
    """
    if is_connected():
        from shoal.jobs.files import storage
        from shoal.training.pytorch.engine import run as run_here

        config = request.run_config
        job_id = config.job_id or f"pytorch-{secrets.token_hex(6)}"
        claim = Claim(job_id, f"python:{os.getuid()}")
        location = storage.root(config.artifact_location)
        return run_here(request, program, claim=claim, location=location, env=worker_environment(config))
    from shoal.distributors.as_job import run_function_as_job

    return run_function_as_job(request, program, embedded=embedded)


def worker_environment(config: RunConfig) -> dict[str, str]:
    """Return the environment variables for the workers that a call of this process starts in the connected Ray cluster.

    Raises:
        InvalidArgumentError: The run has packages or code, which only a job can bring with it; or a secret is not set.
    """
    if config.packages or config.code:
        raise InvalidArgumentError(
            "run_config.packages and run_config.code are for jobs, but this process is connected to a Ray cluster: "
            "give them to ray.init(runtime_env=...), or end the connection, so that the call becomes a job on a pool"
        )
    from shoal.jobs import credentials

    return {**config.env, **credentials.secrets_of(config.secret_env, os.environ)}
