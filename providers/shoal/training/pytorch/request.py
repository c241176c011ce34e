"""The request to run a function and its result: plain data, so that a job can carry the request as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, JsonValue, field_validator

from shoal.data.spec import DatasetSpec, as_dataset_spec
from shoal.settings import Settings
from shoal.training.pytorch.scaling import AnyScaling, PyTorchScalingConfig, SpreadScalingConfig
from shoal.training.run_config import RunConfig


class FunctionRequest(Settings):
    """The run of a function in every worker of a gang: the distributors build one, and a job's spec extends it.

    The function itself travels beside it, pickled.
    """

    name: str = Field(default="function", min_length=1, description="Name of the function, for people.")
    dataset_map: dict[str, DatasetSpec] = Field(
        default_factory=dict, description="Datasets by name; connectors are accepted."
    )
    hyper_params: dict[str, JsonValue] = Field(default_factory=dict, description="What `get_hyper_params` returns.")
    scaling_config: AnyScaling = Field(
        default_factory=PyTorchScalingConfig, description="Number and size of the workers."
    )
    room_for: SpreadScalingConfig | None = Field(
        default=None, description="Workers that the function starts by itself, for which there has to be room."
    )
    run_config: RunConfig = Field(default_factory=RunConfig, description="Pool to run on, and the limits of the run.")

    @field_validator("dataset_map", mode="before")
    @classmethod
    def _datasets(cls, value: Any) -> Any:
        return {name: as_dataset_spec(item) for name, item in value.items()} if isinstance(value, Mapping) else value


@dataclass(frozen=True, slots=True)
class RankStats:
    """Resources that one worker used.

    Args:
        rank: Its rank.
        node: Node that it ran on.
        peak_rss_bytes: Highest resident size of its process.
    """

    rank: int
    node: str
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class FunctionResult:
    """Result of a function's run.

    Args:
        results: Return values, by rank.
        metrics: The last value of each metric that rank 0 logged.
        model_dir: The merged files of all ranks' model folders: a local path or a URI.
        num_workers: Workers that ran at the end.
        restarts: How often the run resumed from a checkpoint after a lost worker.
        seconds: Time from the call to the result.
        workers: Resources of each worker, by rank.
    """

    results: tuple[Any, ...]
    metrics: dict[str, float]
    model_dir: str
    num_workers: int
    restarts: int
    seconds: float
    workers: tuple[RankStats, ...]
