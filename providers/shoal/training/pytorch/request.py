"""Define the request to run a function in a gang (the workers of one run), and the result of the run.

The request can be stored as JSON with a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator

from shoal.data.spec import DatasetSpec, as_dataset_spec
from shoal.option_validation import Settings
from shoal.training.pytorch.scaling import AnyScaling, PyTorchScalingConfig, SpreadScalingConfig
from shoal.training.run_config import RunConfig


class FunctionRequest(Settings):
    """Request to run a user's function in several workers, with its datasets, hyperparameters and number of workers.

    The distributors create this request. The spec of a job contains these fields and others. The function itself is
    pickled and sent separately.
    """

    name: str = Field(default="function", min_length=1, description="Name of the function, which is shown to users.")
    dataset_map: dict[str, DatasetSpec] = Field(
        default_factory=dict, description="Datasets by name. A `DataConnector` is accepted and converted to its spec."
    )
    hyper_params: dict[str, JsonValue] = Field(
        default_factory=dict, description="Values that `get_hyper_params` returns in the workers."
    )
    scaling_config: AnyScaling = Field(
        default_factory=PyTorchScalingConfig, description="Number of workers, and the CPUs and GPUs of each worker."
    )
    room_for: SpreadScalingConfig | None = Field(
        default=None,
        description="Number and size of further workers that the function starts itself. The run starts only if the "
        "pool has room for these workers. None: the function starts no workers.",
    )
    torch_distributor: Literal["local", "distributed"] | None = Field(
        default=None,
        description="Mode of the `TorchDistributor` that has created the request. The run then prints PySpark's lines "
        "about the start and the end of the training. None: another program has created the request.",
    )
    run_config: RunConfig = Field(
        default_factory=RunConfig, description="Name of the pool that runs the function, and the limits of the run."
    )

    @field_validator("dataset_map", mode="before")
    @classmethod
    def _datasets(cls, value: Any) -> Any:
        return {name: as_dataset_spec(item) for name, item in value.items()} if isinstance(value, Mapping) else value


@dataclass(frozen=True, slots=True)
class RankStats:
    """Rank and node of one worker, and the peak memory of the worker's process.

    Args:
        rank: Rank of the worker.
        node: Name of the node that the worker ran on.
        peak_rss_bytes: Highest resident memory of the worker's process, in bytes.
    """

    rank: int
    node: str
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class MissingValue:
    """Stands in a result for a return value that cannot be pickled or unpickled.

    Args:
        reason: Type of the value, and the error.
    """

    reason: str

    @classmethod
    def of(cls, value: object, error: Exception) -> MissingValue:
        """Create the record of a value whose pickling has raised `error`."""
        return cls(f"a {type(value).__qualname__} cannot be pickled ({type(error).__name__}: {error})")


@dataclass(frozen=True, slots=True)
class FunctionResult:
    """Result of running a user's function in several workers.

    Args:
        results: Return values of the function, by rank; a `MissingValue` for a value that cannot be sent.
        metrics: The last value of each metric that rank 0 logged.
        model_dir: Path or URI of the folder with the merged model files of all ranks.
        num_workers: Number of workers that ran at the end.
        restarts: Number of times that the run resumed from a checkpoint after a worker was lost.
        seconds: Time in seconds from the call to the result.
        workers: Resources of each worker, by rank.
        start_seconds: Time in seconds from the call until all workers were ready to call the function; after a restart,
            until the new workers were ready.
    """

    results: tuple[Any, ...]
    metrics: dict[str, float]
    model_dir: str
    num_workers: int
    restarts: int
    seconds: float
    workers: tuple[RankStats, ...]
    start_seconds: float = 0.0
