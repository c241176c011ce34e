"""What is asked of the engine and what it answers: plain data, so that a job can carry it as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from shoal.data.spec import DatasetSpec
from shoal.training.pytorch.scaling import AnyScaling, PyTorchScalingConfig, SpreadScalingConfig
from shoal.training.run_config import RunConfig


class FunctionRequest(BaseModel):
    """A function to run in every worker of a gang; the function itself travels beside it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="What to call the function.")
    dataset_map: dict[str, DatasetSpec] = Field(default_factory=dict, description="Datasets by name.")
    hyper_params: dict[str, JsonValue] = Field(default_factory=dict, description="What `get_hyper_params` returns.")
    scaling: AnyScaling = Field(default_factory=PyTorchScalingConfig, description="Workers and their size.")
    room_for: SpreadScalingConfig | None = Field(
        default=None, description="Workers of the function's own, for which there has to be room."
    )
    run_config: RunConfig = Field(default_factory=RunConfig, description="Where and under which limits it runs.")


@dataclass(frozen=True, slots=True)
class RankStats:
    """What one worker used.

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
    """What a function's run came to.

    Args:
        results: What each rank returned, by rank.
        metrics: The last value of each metric that rank 0 logged.
        model_dir: The merged files of all ranks' model folders: a local path or a URI.
        num_workers: Workers that ran at the end.
        restarts: How often it went on from a checkpoint after a loss.
        seconds: From the call to the result.
        workers: What each worker used, by rank.
    """

    results: tuple[Any, ...]
    metrics: dict[str, float]
    model_dir: str
    num_workers: int
    restarts: int
    seconds: float
    workers: tuple[RankStats, ...]
