"""Read the value that a call returns, such as a booster, from the result of the call's job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.redaction import redact_value
from shoal.training.locations import resolved
from shoal.training.pytorch.request import FunctionResult, MissingValue

if TYPE_CHECKING:
    from shoal.jobs import AnyJobSpec, JobResult, PredictResult

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
    from shoal.jobs import FunctionJobSpec, PredictJobSpec

    location = _location(spec.run_config.artifact_location, job_id, artifact_location)
    if isinstance(spec, PredictJobSpec):
        return partial(prediction, output_path=spec.output_path)
    read: Callable[[JobResult], Any] = partial(_booster, location=location)
    if isinstance(spec, FunctionJobSpec):
        read = partial(function_value, location=location, returns=spec.returns)
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
