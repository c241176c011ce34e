"""A call that runs a function or script on all ranks, in the process of its caller, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shoal.errors import TrainingError
from shoal.jobs import shipped_code
from shoal.jobs.files import storage
from shoal.jobs.kind import KindCall
from shoal.kinds.function.spec import FunctionJobSpec
from shoal.secrets.redaction import redact_value
from shoal.training.pytorch.request import FunctionResult, MissingValue

if TYPE_CHECKING:
    from shoal.jobs.results import JobResult
    from shoal.training.locations import Claim

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


class FunctionCall(KindCall[FunctionJobSpec, bytes, FunctionResult]):
    """A function; the code is the pickled program."""

    @property
    def may_call_ray(self) -> bool:  # type: ignore[override]
        """Whether the function may call Ray."""
        from shoal.training.pytorch.program import may_call_ray

        return may_call_ray(self.code)

    def stored(self) -> dict[str, Any]:
        """Store the function."""
        return {"program": shipped_code.store(self.code)}

    def read(self, result: JobResult, location: str | None) -> FunctionResult:
        """Load the return values, and what the job has recorded."""
        from shoal.jobs import load_results

        return load_results(result, location)

    def value(self, answer: FunctionResult) -> Any:
        """Return what the caller has asked for."""
        if self.spec.returns is None:
            return Response(answer)
        return Response(answer).get_results() if self.spec.returns == "ranks" else value_of(answer, 0)

    def run_here(self, env: Mapping[str, str], claim: Claim) -> FunctionResult:
        """Run the function in the connected Ray cluster."""
        from shoal.training.pytorch.engine import Run

        location = storage.root(self.spec.run_config.artifact_location)
        return Run(self.spec, self.code, claim=claim, location=location, env=env).result()
