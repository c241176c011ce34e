"""Provide `SubmittedCall`, the handle of a call that runs as a job, and `attach`, which returns such a handle in any
process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.secrets.redaction import redact_value
from shoal.training.locations import resolved
from shoal.training.pytorch.request import FunctionResult, MissingValue

if TYPE_CHECKING:
    from shoal.jobs import AnyJobSpec, JobHandle, JobResult, JobStatus, PartitionResults, PredictResult
    from shoal.training.reporting import OnProgress

T = TypeVar("T")


class SubmittedCall(Generic[T]):
    """Handle of a call that runs as a job. The method `submit` of an estimator, a distributor or a decorated function
    returns such a handle.

    The job goes on when this process ends. Any process can get another handle of the call with
    ``shoal.distributors.attach(call.job_id)``.

    In an event loop, ``await call`` returns the same as :meth:`result`, and other tasks go on meanwhile. If the task
    that awaits the call is cancelled, the job goes on.

    Args:
        job: Handle of the job.
        read: Function that reads the value of the call from the result of the job.

    Attributes:
        job: Handle of the job.
    """

    def __init__(self, job: JobHandle, read: Callable[[JobResult], T]) -> None:
        self.job = job
        self._read = read

    def __repr__(self) -> str:
        return f"SubmittedCall({self.job_id!r})"

    @property
    def job_id(self) -> str:
        """Return the id of the job."""
        return self.job.job_id

    def result(
        self,
        timeout: float | None = None,
        *,
        on_log: Callable[[str], Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> T:
        """Wait until the call has ended, and return its value, such as the booster of an estimator. Ctrl-C ends the
        wait, but the job goes on.

        A call without `submit`, such as `fit` or `run`, returns the same value.

        Args:
            timeout: Seconds to wait; the job goes on after that time. None: wait without a limit.
            on_log: Function that is called with each line of the job's log, such as `print`. None: the log is not read.
            on_progress: Function that is called with the training's progress each time the progress has changed.

        Raises:
            JobFailedError: The job failed; the message ends with the cause.
            JobCancelledError: The job was cancelled.
            JobTimeoutError: The call has not ended within `timeout` seconds. The error is also a `TimeoutError`.
            FileNotFoundError: The files of the result are gone, or cannot be reached from this machine.
        """
        return self._read(self.job.wait(timeout, on_log, on_progress))

    def status(self) -> JobStatus:
        """Return the present status of the job."""
        return self.job.status()

    def cancel(self, reason: str = "cancelled on request") -> bool:
        """Cancel the job and end its workers; return False if the job had ended already.

        Args:
            reason: Reason of the cancellation, which is stored as the job's error.
        """
        return self.job.cancel(reason)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Return the lines of the job's log.

        Args:
            follow: Whether to wait for further lines until the job has ended, instead of returning only the present
                lines.
        """
        return self.job.logs(follow=follow)

    def __await__(self) -> Generator[Any, None, T]:
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        import asyncio

        return await asyncio.to_thread(self._read, await self.job)


def attach(job_id: str, *, artifact_location: str | None = None) -> SubmittedCall[Any]:
    """Return the handle of a call that was submitted before, by this process or another process.

    The handle's :meth:`~SubmittedCall.result` returns the same value as that of the handle from `submit`: the booster
    of an estimator, the `Response` of a `PyTorchDistributor`, the value of a decorated function or a
    `TorchDistributor`, the `PredictResult` of a prediction, or the `PartitionResults` of
    `shoal.many`. For a job that was submitted in another way, the kind of the job's spec determines the value.

    Args:
        job_id: Id of the job.
        artifact_location: The job's `artifact_location`. Needed only if the location contains credentials, because the
            store keeps no credentials.

    Raises:
        JobNotFoundError: There is no such job.
        InvalidArgumentError: `artifact_location` is not that of the job, apart from its credentials.

    Example:
        >>> from shoal.distributors import attach
        >>> attach("xgboost-2f1c9a64b0de").status().state
        'running'
    """
    from shoal import jobs
    from shoal.jobs.journal import attempts
    from shoal.jobs.journal.attempts import Key
    from shoal.state import Store

    job = jobs.attach(job_id)
    spec = jobs.parse_spec(attempts.load(Store(), Key(job.job_id, job.attempt)).spec)
    return SubmittedCall(job, reader(spec, job.job_id, artifact_location))


Returns = Literal["ranks", "rank-0"] | None
"""Value that the call of a function returns: ``ranks`` for the return values of all ranks, ``rank-0`` for the return
value of rank 0, None for a `Response`."""


@dataclass(frozen=True)
class Response:
    """Result of `PyTorchDistributor.run`: the model's location, the metrics and the return values.

    Args:
        result: The training engine's result. The methods return parts of this result.
    """

    result: FunctionResult

    def get_model_dir(self) -> str:
        """Return the local path or URI of the folder with the merged model files of all ranks."""
        return self.result.model_dir

    def get_metrics(self) -> dict[str, float]:
        """Return the last value of each metric that rank 0 logged."""
        return dict(self.result.metrics)

    def get_results(self) -> list[Any]:
        """Return the return values of the function on all ranks, in the order of the ranks.

        Raises:
            TrainingError: A rank returned a value that cannot be pickled. The other methods still work.
        """
        return [value_of(self.result, rank) for rank in range(len(self.result.results))]


def value_of(result: FunctionResult, rank: int) -> Any:
    """Return the value that the function has returned on a rank.

    Raises:
        TrainingError: The value cannot be pickled.
    """
    value = result.results[rank]
    if isinstance(value, MissingValue):
        raise TrainingError(
            f"the function has ended on all ranks, but the return value of rank {rank} is lost: {value.reason}. Return "
            "plain data, tensors or a state_dict; files of the model folder are saved in "
            f"{redact_value(result.model_dir)}"
        )
    return value


def reader(spec: AnyJobSpec, job_id: str, artifact_location: str | None = None) -> Callable[[JobResult], Any]:
    """Return the function that reads the value of a call from the result of the call's job.

    Raises:
        InvalidArgumentError: `artifact_location` is not that of the job.
    """
    from shoal.jobs import FunctionJobSpec, PartitionsJobSpec, PredictJobSpec, TuneJobSpec

    location = _location(spec.run_config.artifact_location, job_id, artifact_location)
    if isinstance(spec, PredictJobSpec):
        return partial(prediction, output_path=spec.output_path)
    read: Callable[[JobResult], Any] = partial(_booster, location=location)
    if isinstance(spec, FunctionJobSpec):
        read = partial(function_value, location=location, returns=spec.returns)
    elif isinstance(spec, PartitionsJobSpec):
        read = partial(partition_results, location=location)
    if isinstance(spec, TuneJobSpec):
        from shoal.distributors.search_result import of_job

        read = partial(of_job, location=location, trains=spec.train is not None)
    may_lack_credentials = artifact_location is None and location is not None and "://" in location
    return partial(_with_advice, read) if may_lack_credentials else read


def _location(stored: str | None, job_id: str, given: str | None) -> str | None:
    """Return a job's `artifact_location`: the location that the user has given, else the location in the store."""
    if given is None:
        return stored
    location = resolved(given)
    if stored is None or redact_value(location).rstrip("/") != stored.rstrip("/"):
        raise InvalidArgumentError(
            f"artifact_location={redact_value(location)!r} is not the location of job {job_id}, whose files are in "
            f"{stored or '$SHOAL_HOME/jobs'}: give the location with which the job was submitted"
        )
    return location


def _with_advice(read: Callable[[JobResult], Any], result: JobResult) -> Any:
    """Read the value of a call. If reading fails, add a note to the error that says how to pass credentials."""
    try:
        return read(result)
    except Exception as error:
        error.add_note(
            f"The store keeps no credentials: if the artifact_location of job {result.job_id} contains credentials, "
            f'pass this location to attach("{result.job_id}", artifact_location=...)'
        )
        raise


def prediction(result: JobResult, *, output_path: str) -> PredictResult:
    """Convert the result of a prediction job to the return value of `predict`."""
    from shoal.jobs import PredictResult
    from shoal.jobs.files import storage

    assert result.output_path is not None
    assert result.rows is not None
    return PredictResult(
        storage.as_given(result.output_path, output_path),
        result.rows,
        result.model_uri,
        result.num_workers,
        result.restarts,
        result.seconds,
        result.peak_memory_per_worker,
    )


def partition_results(result: JobResult, *, location: str | None) -> PartitionResults:
    """Read the results of a job that has called a function for each partition of a dataset."""
    from shoal.jobs import load_partitions

    return load_partitions(result, location)


def function_value(result: JobResult, *, location: str | None, returns: Returns) -> Any:
    """Read the return value of a function from the result of the job that has run the function."""
    from shoal.jobs import load_results

    answer = load_results(result, location)
    if returns == "ranks":
        return Response(answer).get_results()
    return value_of(answer, 0) if returns == "rank-0" else Response(answer)


def _booster(result: JobResult, *, location: str | None) -> Any:
    from shoal.jobs import load_training

    return load_training(result, location).booster()
