"""Run a training, a function or a prediction as a job on a pool.

If no pool is named and none is up, the call uses an embedded pool with one node. If the call waits for the job, the
embedded pool belongs to this process and ends with this process. If the call does not wait, the embedded pool belongs
to the job and ends with the job.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shoal.distributors import submitted_call
from shoal.distributors.call_pool import pool_for_job
from shoal.distributors.submitted_call import Returns, SubmittedCall
from shoal.jobs.specs.partitions import PartitionsJobSpec
from shoal.jobs.specs.prediction import PredictJobSpec, PredictResult
from shoal.training import locations
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.boosting.user_code import UserCode
from shoal.training.pytorch.request import FunctionRequest
from shoal.training.reporting import ProgressDisplay, say
from shoal.training.run_config import RunConfig

if TYPE_CHECKING:
    from shoal.distributors.search_result import Prepared, SearchResult
    from shoal.jobs import AnyJobSpec, JobResult, TuneJobSpec
    from shoal.jobs.partitions.program import PartitionProgram
    from shoal.jobs.partitions.results import PartitionResults

T = TypeVar("T")

PoolOf = Callable[[str | None], AbstractContextManager[str]]
"""Type of a function that finds or starts the pool of a call, and returns a context manager that yields the pool's
name. The argument is the id of a job: an embedded pool, or leased nodes, then last until this job ends. If the argument
is None, the pool or the nodes last until the ``with`` block ends."""


@dataclass(frozen=True)
class JobCall(Generic[T]):
    """A call that runs as a job on a pool.

    Args:
        config: Pool and limits of the run.
        framework: First part of the id of the job.
        spec: Function that builds the job's spec from the name of the pool.
        read: Function that reads the value of the call from the result of the job.
        pool: Function that finds the pool, and starts an embedded pool if necessary.
        returns_model: Whether the value of the call is a model. To load the model, this process needs the same version
            of the model's library as the job.
    """

    config: RunConfig
    framework: str
    spec: Callable[[str], AnyJobSpec]
    read: Callable[[JobResult], T]
    pool: PoolOf
    returns_model: bool = False

    def run(self) -> T:
        """Submit the job, print the job's log in this process, and return the value of the call.

        Raises:
            JobFailedError: The job failed. The message ends with the cause.
        """
        from shoal.jobs import submit

        if self.returns_model:
            # The model's library is imported while the pool and the job start: the import takes 1.6 s of CPU time.
            Thread(target=self._import_library).start()
        with self.pool(None) as pool_name:
            call = SubmittedCall(submit(self.spec(pool_name), returns_model=self.returns_model), self.read)
            try:
                # Without a terminal, `ProgressDisplay` would print the progress as lines. The job's log already
                # contains lines about the progress, so `first_line_s=math.inf` turns the display's own lines off.
                with ProgressDisplay(first_line_s=math.inf) as display:
                    return call.result(on_log=say, on_progress=display.show)
            except KeyboardInterrupt:
                # `result` cancels the job on Ctrl-C. But Ctrl-C may have been pressed before `result` began, so the job
                # is cancelled here as well. Cancelling a job twice does no harm.
                call.cancel("the process that waited for the job was interrupted")
                raise

    def _import_library(self) -> None:
        # If the library is missing, `read` raises an error later.
        with suppress(ImportError):
            importlib.import_module(self.framework)

    def submit(self) -> SubmittedCall[T]:
        """Submit the job, and return without waiting for the job.

        The job goes on without a process that polls it, unless the caller has set `orphan_after`.
        """
        from shoal.jobs import ids, submit

        given = self.config.job_id
        job_id = ids.new_job_id(self.framework) if given is None else ids.checked(given)
        with self.pool(job_id) as pool_name:
            job = submit(self.spec(pool_name), returns_model=self.returns_model, job_id=job_id, detached=True)
        job.outlive_interrupts()
        return SubmittedCall(job, self.read)


def training(request: TrainRequest, user_code: UserCode, returned: Callable[[TrainResult], T]) -> JobCall[T]:
    """Return the `JobCall` object that trains a boosting model as a job.

    Raises:
        DataError: The footers of the Parquet files show that the data cannot be used.
        InvalidArgumentError: The folder for the model cannot be written, or early stopping needs `direction`.
    """
    from shoal.jobs import load_training, shipped_code
    from shoal.jobs.files import storage
    from shoal.jobs.specs.training import JobSpec
    from shoal.training.boosting.library import library_of
    from shoal.training.boosting.rows import checked_data

    config = request.run_config
    location = config.artifact_location
    # The job repeats the following checks. The checks here find errors, such as a misspelt column or folder, before a
    # pool is started.
    train, _ = checked_data(request)
    if request.early_stopping_rounds is not None:
        library_of(request.framework).refuse_untold(user_code, request.direction)
    if request.init_model is not None and importlib.util.find_spec(request.framework):
        init_model = library_of(request.framework).init_model(shipped_code.read(request.init_model))
        init_model.check(request, train.source)
    locations.try_out(storage.root(location))

    def spec(pool_name: str) -> JobSpec:
        stored = shipped_code.store_user_code(user_code) if user_code else None
        return JobSpec(**_on_pool(request, pool_name), user_code=stored)

    def read(result: JobResult) -> T:
        return returned(load_training(result, location))

    return JobCall(config, request.framework, spec, read, partial(pool_for_job, request), returns_model=True)


def function(
    request: FunctionRequest, program: bytes, *, pool: PoolOf | None = None, returns: Returns = None
) -> JobCall[Any]:
    """Return the `JobCall` object that runs a function on all ranks as a job.

    Raises:
        InvalidArgumentError: The folder for the results cannot be written.
    """
    from shoal.jobs import shipped_code
    from shoal.jobs.files import storage
    from shoal.jobs.specs.function import FunctionJobSpec
    from shoal.training.pytorch.program import FRAMEWORK, may_call_ray

    config = request.run_config
    location = config.artifact_location
    locations.try_out(storage.root(location))

    def spec(pool_name: str) -> FunctionJobSpec:
        stored = shipped_code.store(program)
        return FunctionJobSpec(**_on_pool(request, pool_name), program=stored, returns=returns)

    read = partial(submitted_call.function_value, location=location, returns=returns)
    pool = pool or partial(pool_for_job, request, may_call_ray=may_call_ray(program))
    return JobCall(config, FRAMEWORK, spec, read, pool)


def prediction(spec: PredictJobSpec) -> JobCall[PredictResult]:
    """Return the `JobCall` object that predicts the rows of a dataset as a job."""
    read = partial(submitted_call.prediction, output_path=spec.output_path)
    return JobCall(spec.run_config, spec.framework, spec.on_pool, read, partial(pool_for_job, spec))


def partitions(spec: PartitionsJobSpec, program: PartitionProgram | None) -> JobCall[PartitionResults]:
    """Return the `JobCall` object that calls a function for each partition of a dataset as a job.

    Raises:
        InvalidArgumentError: The folder for the results cannot be written.
    """
    from shoal.jobs import shipped_code
    from shoal.jobs.files import storage
    from shoal.jobs.mlflow import job_run
    from shoal.training.boosting.rows import checked_data
    from shoal.training.pytorch.program import may_call_ray

    location = spec.run_config.artifact_location
    locations.try_out(storage.root(location))
    if spec.estimator is not None:
        # The job repeats this check. Here it finds a misspelt column before a pool is started.
        checked_data(spec.estimator.request(spec.dataset, spec.run_config))

    def on_pool(pool_name: str) -> PartitionsJobSpec:
        changed: dict[str, Any] = {} if program is None else {"program": shipped_code.store(program.content)}
        if "tracking" not in spec.model_fields_set and spec.register_as is None:
            changed["tracking"] = job_run.tracking_of_training(os.environ)
        return spec.model_copy(update=changed).on_pool(pool_name)

    read = partial(submitted_call.partition_results, location=location)
    pool = partial(pool_for_job, spec, may_call_ray=program is not None and may_call_ray(program.content))
    return JobCall(spec.run_config, spec.framework, on_pool, read, pool)


def search(prepared: Prepared) -> JobCall[SearchResult]:
    """Return the `JobCall` object that searches for parameters as a job.

    Raises:
        DataError: The footers of the Parquet files show that the data cannot be used.
        InvalidArgumentError: The folder for the model cannot be written, or the search needs `direction`.
    """
    from shoal.jobs import shipped_code
    from shoal.jobs.files import storage
    from shoal.jobs.mlflow import job_run
    from shoal.training.boosting.library import library_of
    from shoal.training.boosting.rows import checked_data

    given = prepared.spec
    config = given.run_config
    # The job repeats the following checks, which find errors before a pool is started.
    if given.train is not None:
        checked_data(given.trial_request())
        if given.metric is None:
            library_of(given.train.framework).refuse_untold(
                prepared.user_code, given.direction or given.train.direction
            )
    locations.try_out(storage.root(config.artifact_location))
    if "tracking" not in given.model_fields_set and given.register_as is None and given.train is not None:
        given = given.model_copy(update={"tracking": job_run.tracking_of_training(os.environ)})

    def spec(pool_name: str) -> TuneJobSpec:
        stored = {
            "program": shipped_code.store(prepared.code.dumps()) if prepared.code else None,
            "user_code": shipped_code.store_user_code(prepared.user_code) if prepared.user_code else None,
        }
        return given.on_pool(pool_name).model_copy(update=stored)

    read = submitted_call.reader(given, "", config.artifact_location)
    return JobCall(config, given.framework, spec, read, partial(pool_for_job, given))


def _on_pool(request: TrainRequest | FunctionRequest, pool_name: str) -> dict[str, Any]:
    """Return the spec fields of a job that runs a training or function (`request`) on the given pool.

    If `RunConfig.tracking` is not set, `job_run.tracking_of_training` decides whether a training records an MLflow run.
    A function always gets an MLflow run for its own MLflow calls, because without a run each rank would create a
    database in its current folder.
    """
    from shoal.jobs.mlflow import job_run

    config = request.run_config
    fields = {**dict(request), "run_config": config.model_copy(update={"pool_name": pool_name})}
    if "tracking" not in config.model_fields_set and isinstance(request, TrainRequest):
        fields["tracking"] = job_run.tracking_of_training(os.environ)
    return fields
