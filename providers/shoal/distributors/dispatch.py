"""Decide where a call runs. If this process is connected to a Ray cluster, the call runs there. Otherwise the call runs
as a job on a pool."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from shoal.errors import InvalidArgumentError
from shoal.secrets.hidden_output import SECRETS
from shoal.secrets.known_secrets import KnownSecrets
from shoal.secrets.redaction import hiding
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.boosting.user_code import UserCode
from shoal.training.cluster import is_connected
from shoal.training.locations import Claim
from shoal.training.pytorch.program import FRAMEWORK, Program
from shoal.training.pytorch.request import FunctionRequest
from shoal.training.run_config import RunConfig

if TYPE_CHECKING:
    from shoal.distributors.as_job import PoolOf
    from shoal.distributors.search_result import Prepared, SearchResult
    from shoal.distributors.submitted_call import Returns, SubmittedCall
    from shoal.jobs.partitions.program import PartitionProgram
    from shoal.jobs.partitions.results import PartitionResults
    from shoal.jobs.specs.partitions import PartitionsJobSpec
    from shoal.jobs.specs.prediction import PredictJobSpec, PredictResult

__all__ = [
    *("Call", "check_submit", "function", "is_connected", "packed", "partitions", "prediction", "search", "submitted"),
    *("training", "worker_environment"),
]

T = TypeVar("T")

_NO_JOB = (
    "submit needs a job on a pool, but this process is connected to a Ray cluster, where calls do not run as jobs: "
    "call fit, run, distributed or predict instead (in a thread, if this process has other work to do), or submit from "
    "a process that is not connected"
)


class Call(Protocol[T]):
    """Prepared call of an estimator, a distributor, a decorated function or `predict`. The methods `run` and `submit`
    start the call."""

    def run(self) -> T:
        """Run the call, and return its value."""

    def submit(self) -> SubmittedCall[T]:
        """Submit the call as a job, and return without waiting for the job."""


@dataclass(frozen=True)
class _ClusterCall(Generic[T]):
    """A call that runs in the Ray cluster that this process is connected to.

    Args:
        function: Function that runs the call and returns its value.
    """

    function: Callable[[], T]

    def run(self) -> T:
        return self.function()

    def submit(self) -> NoReturn:
        raise InvalidArgumentError(_NO_JOB)


def submitted(prepared: Callable[[ExitStack], Call[T]]) -> SubmittedCall[T]:
    """Submit a call, and return without waiting for its job.

    Args:
        prepared: Function that returns the call. It adds the removal of copies of DataFrames to the `ExitStack`: they
            are removed if the submission fails, and otherwise kept for the job.

    Raises:
        InvalidArgumentError: This process is connected to a Ray cluster.
    """
    check_submit()
    with ExitStack() as staged:
        call = prepared(staged).submit()
        staged.pop_all()
    return call


def check_submit() -> None:
    """Check that this process is not connected to a Ray cluster. The calls of a connected process run in the cluster,
    not as jobs, so they cannot be submitted.

    Raises:
        InvalidArgumentError: This process is connected to a Ray cluster.
    """
    if is_connected():
        raise InvalidArgumentError(_NO_JOB)


def packed(program: Program, config: RunConfig) -> bytes:
    """Pickle a program for the pool on which it will run.

    Raises:
        InvalidArgumentError: The program cannot be pickled, or is too large; or the folder of a script is too large to
            travel to the machines of the pool.
    """
    if is_connected():
        return program.dumps()

    def without_folder(folder: str) -> str | None:
        from shoal.pool.selection import pool_without_folder

        return pool_without_folder(folder, config.pool_name)

    return program.dumps(without_folder)


def training(request: TrainRequest, user_code: UserCode, returned: Callable[[TrainResult], T]) -> Call[T]:
    """Return the `Call` object that trains a boosting model."""
    if not is_connected():
        from shoal.distributors import as_job

        return as_job.training(request, user_code, returned)

    def train_here() -> T:
        from shoal.jobs import shipped_code
        from shoal.training.boosting.engine import train

        content = None if request.init_model is None else shipped_code.read(request.init_model)
        env = worker_environment(request.run_config)
        with _secrets_hidden(request.run_config):
            return returned(train(request, user_code=user_code, init_model=content, env=env))

    return _ClusterCall(train_here)


def function(
    request: FunctionRequest, program: bytes, *, pool: PoolOf | None = None, returns: Returns = None
) -> Call[Any]:
    """Return the `Call` object that runs a function on all ranks."""
    if not is_connected():
        from shoal.distributors import as_job

        return as_job.function(request, program, pool=pool, returns=returns)

    def run_here() -> Any:
        from shoal.distributors.submitted_call import Response
        from shoal.jobs.files import storage
        from shoal.training.pytorch.engine import run

        config = request.run_config
        location, env = storage.root(config.artifact_location), worker_environment(config)
        with _secrets_hidden(config):
            return Response(run(request, program, claim=_claim(config, FRAMEWORK), location=location, env=env))

    return _ClusterCall(run_here)


def prediction(spec: PredictJobSpec) -> Call[PredictResult]:
    """Return the `Call` object that predicts the rows of a dataset."""
    if not is_connected():
        from shoal.distributors import as_job

        return as_job.prediction(spec)

    def predict_here() -> PredictResult:
        import mlflow

        from shoal.jobs.prediction.engine import run

        env = worker_environment(spec.run_config) | {"MLFLOW_TRACKING_URI": mlflow.get_tracking_uri()}
        with _secrets_hidden(spec.run_config):
            return run(spec, claim=_claim(spec.run_config, spec.framework), env=env)

    return _ClusterCall(predict_here)


def partitions(spec: PartitionsJobSpec, program: PartitionProgram | None) -> Call[PartitionResults]:
    """Return the `Call` object that calls a function for each partition of a dataset. The program is None if the spec
    has the function."""
    if not is_connected():
        from shoal.distributors import as_job

        return as_job.partitions(spec, program)

    def run_here() -> PartitionResults:
        from shoal.jobs.files import artifacts
        from shoal.jobs.journal.attempts import Key
        from shoal.jobs.partitions.engine import run
        from shoal.jobs.partitions.program import program_of_spec
        from shoal.jobs.partitions.results import PartitionResults

        config = spec.run_config
        claim, env = _claim(config, spec.framework), worker_environment(config)
        folder = artifacts.folder(Key(claim.job_id, claim.attempt), config.artifact_location)
        artifacts.check(folder, claim, config.artifact_location)
        artifacts.mark(folder, claim)
        with _secrets_hidden(config):
            answer = run(spec, program or program_of_spec(spec), claim=claim, folder=folder, env=env)
        return PartitionResults(answer.manifest, answer.digest)

    return _ClusterCall(run_here)


def search(prepared: Prepared) -> Call[SearchResult]:
    """Return the `Call` object that searches for parameters."""
    if not is_connected():
        from shoal.distributors import as_job

        return as_job.search(prepared)

    def search_here() -> SearchResult:
        from shoal.distributors.search_result import here

        env = worker_environment(prepared.spec.run_config)
        with _secrets_hidden(prepared.spec.run_config):
            return here(prepared, env)

    return _ClusterCall(search_here)


def worker_environment(config: RunConfig) -> dict[str, str]:
    """Return the environment variables for the workers that this process starts in the connected Ray cluster.

    Raises:
        InvalidArgumentError: The run has packages or code, which only a job can bring to its workers; or the variable
            of a secret is not set.
    """
    if config.packages or config.code:
        raise InvalidArgumentError(
            "run_config.packages and run_config.code need a job, but this process is connected to a Ray cluster, where "
            "calls do not run as jobs: pass packages and code to ray.init(runtime_env=...), or disconnect with "
            "ray.shutdown(), so that the call runs as a job on a pool"
        )
    from shoal.jobs import credentials

    hidden = credentials.secrets_of(config.secret_env, os.environ)
    return {**config.env, **hidden, **({SECRETS: json.dumps(sorted(hidden.values()))} if hidden else {})}


def _secrets_hidden(config: RunConfig) -> AbstractContextManager[None]:
    """Hide the values of `secret_env` in the errors of a run in the connected Ray cluster."""
    return hiding(KnownSecrets(os.environ.get(name, "") for name in config.secret_env).hide)


def _claim(config: RunConfig, framework: str) -> Claim:
    """Return the `Claim` by which a run in the connected Ray cluster marks its folders as its own."""
    return Claim(config.job_id or f"{framework}-{secrets.token_hex(6)}", f"python:{os.getuid()}")
