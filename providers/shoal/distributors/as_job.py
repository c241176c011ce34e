"""Run a training, a function or a prediction as a job on a pool.

If no pool is named and none is up, an embedded pool is started: a pool with one node that belongs to this process and
ends with the run.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from shoal.distributors.embedded_pool import embedded_pool, pool_for
from shoal.jobs.specs.prediction import PredictJobSpec, PredictResult
from shoal.training import locations
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.boosting.user_code import UserCode
from shoal.training.context import say
from shoal.training.mlflow.tracking import Caller, Tracking
from shoal.training.progress import ProgressDisplay
from shoal.training.pytorch.request import FunctionRequest, FunctionResult

if TYPE_CHECKING:
    from shoal.jobs import JobHandle, JobResult


def run_as_job(request: TrainRequest, user_code: UserCode) -> TrainResult:
    """Submit a training as a job, print the job's log in this process, and return the training's result.

    Args:
        request: Description of the training.
        user_code: Callbacks, objective and metrics of the user.

    Raises:
        InvalidArgumentError: A callback or function cannot be pickled.
        DataError: The footers of the Parquet files show that the data cannot be used. Nothing was started then.
        JobFailedError: The training failed. The message ends with the cause.
    """
    from shoal.jobs import submit
    from shoal.jobs.files import code_store, storage
    from shoal.jobs.files.artifacts import load_training
    from shoal.jobs.specs.training import JobSpec
    from shoal.training.boosting.inputs import checked_data

    # The job makes the following checks, too. They are also made here, before a pool is started, so that no pool is
    # started in vain if the name of a column or folder is misspelt.
    checked_data(request)
    locations.try_out(storage.root(request.run_config.artifact_location))
    with pool_for(request.run_config.pool_name) as pool_name:
        along = code_store.store_user_code(user_code, request.run_config.artifact_location) if user_code else None
        spec = JobSpec(**_on_pool(request, pool_name), user_code=along)
        handle = submit(spec, returns_model=True)
        return load_training(_result(handle), request.run_config.artifact_location)


def run_function_as_job(request: FunctionRequest, program: bytes, *, embedded: bool = False) -> FunctionResult:
    """Run a function as a job: submit the job, print its log in this process, and return the function's results.

    Args:
        request: Workers, datasets and settings of the run.
        program: The function and its arguments, pickled.
        embedded: Whether to use an embedded pool (see this module's docstring) even if another pool exists.

    Raises:
        JobFailedError: A rank raised an error or was lost. The message ends with the cause.
    """
    from shoal.jobs import load_results, submit
    from shoal.jobs.files import code_store, storage
    from shoal.jobs.specs.function import FunctionJobSpec

    locations.try_out(storage.root(request.run_config.artifact_location))
    with embedded_pool() if embedded else pool_for(request.run_config.pool_name) as pool_name:
        stored = code_store.store(program, request.run_config.artifact_location)
        spec = FunctionJobSpec(**_on_pool(request, pool_name), program=stored)
        return load_results(_result(submit(spec)), request.run_config.artifact_location)


def _result(handle: JobHandle) -> JobResult:
    """Wait for a job, and return its result; meanwhile print the job's log, and show a progress bar in a terminal."""
    # Without a terminal, `ProgressDisplay` would print the progress as lines. The job's log already contains such
    # lines, so `first_line_s=math.inf` turns them off.
    with ProgressDisplay(first_line_s=math.inf) as display:
        return handle.wait(on_log=say, on_progress=display.show)


def predict_as_job(spec: PredictJobSpec) -> PredictResult:
    """Submit a batch prediction as a job, print the job's log in this process, and return the prediction's result.

    Args:
        spec: Spec of the prediction. If it names no pool, the pool in `$SHOAL_POOL`, the only pool that is up or an
            embedded one is used.

    Raises:
        JobFailedError: The prediction failed. The message ends with the cause.
    """
    from shoal.jobs import submit
    from shoal.jobs.files import storage

    with pool_for(spec.run_config.pool_name) as pool_name:
        result = submit(spec.on_pool(pool_name)).wait(on_log=say)
    assert result.output_path is not None
    assert result.rows is not None
    return PredictResult(
        storage.as_given(result.output_path, spec.output_path),
        result.rows,
        result.model_uri,
        result.num_workers,
        result.restarts,
        result.seconds,
        result.peak_memory_per_worker,
    )


def _on_pool(request: TrainRequest | FunctionRequest, pool_name: str) -> dict[str, Any]:
    """Return the spec fields of a job that runs a training or function (`request`) on the given pool.

    Unless the caller has said otherwise in `RunConfig.tracking`, a training records an MLflow run only if the caller
    uses MLflow. A function always has a run, because its own MLflow calls need one: without it, each rank would create
    a database in its current folder.
    """
    config = request.run_config
    fields = {**dict(request), "run_config": config.model_copy(update={"pool_name": pool_name})}
    if "tracking" not in config.model_fields_set and isinstance(request, TrainRequest):
        fields["tracking"] = Tracking() if Caller.of(os.environ).tracks else None
    return fields
