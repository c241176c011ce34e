"""The request to predict a dataset, and its result: plain data, so that a job can carry the request as JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from shoal.data.spec import DatasetSpec, as_dataset_spec
from shoal.errors import InvalidArgumentError
from shoal.settings import Settings
from shoal.training.locations import resolved
from shoal.training.run_config import RunConfig
from shoal.training.scaling import ScalingConfig

_LATEST = re.compile(r"models:/[^/@]+(/latest)?", re.IGNORECASE)
_LOGGED_MODEL = re.compile(r"models:/m-[0-9a-f]{32}")


class PredictRequest(Settings):
    """The prediction of every row of a dataset, with its settings."""

    model: str = Field(
        min_length=1,
        description="MLflow URI of the model: models:/NAME@ALIAS, models:/NAME/VERSION, runs:/... or a folder.",
    )
    dataset: DatasetSpec = Field(description="Rows to predict; a connector is accepted.")
    output: str = Field(min_length=1, description="Directory or URI for the predictions. All nodes must reach it.")
    keep_cols: tuple[str, ...] | None = Field(
        default=None, description="Columns of the dataset that the output has as well; None: all of them."
    )
    prediction_col: str = Field(
        default="prediction",
        min_length=1,
        description="Column of the predictions. A model with several values per row gets NAME_0, NAME_1 and so on.",
    )
    input_cols: tuple[str, ...] = Field(
        default=(), description="Input columns of a model whose signature is a tensor, which names no columns."
    )
    overwrite: bool = Field(
        default=False, description="Replace other predictions in `output` that shoal has written, instead of refusing."
    )
    scaling_config: ScalingConfig = Field(
        default_factory=ScalingConfig, description="Number and CPUs of the workers; predictions use no GPUs."
    )
    run_config: RunConfig = Field(default_factory=RunConfig, description="Pool to run on, and the limits of the run.")

    @field_validator("dataset", mode="before")
    @classmethod
    def _dataset(cls, value: Any) -> Any:
        return as_dataset_spec(value)

    @field_validator("output")
    @classmethod
    def _absolute(cls, output: str) -> str:
        return resolved(output).rstrip("/")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if _LATEST.fullmatch(self.model) and not _LOGGED_MODEL.fullmatch(self.model):
            raise InvalidArgumentError(
                f'model "{self.model}" names no version: write models:/NAME@ALIAS or models:/NAME/VERSION'
            )
        if self.keep_cols is not None and self.prediction_col in self.keep_cols:
            raise InvalidArgumentError(
                f'prediction_col "{self.prediction_col}" is also in keep_cols: choose another name for the predictions'
            )
        return self


@dataclass(frozen=True, slots=True)
class PredictResult:
    """Result of a batch prediction.

    Args:
        output: Directory or URI with the predictions: Parquet files, whose names sort in the order of the dataset.
        rows: Number of predicted rows, which is the number of rows of the dataset.
        model_uri: The model that predicted, with its version.
        num_workers: Number of workers; 0 if the same predictions were there already.
        restarts: Number of restarts after a lost worker.
        seconds: Time from the call to the result.
        peak_memory_per_worker: Highest resident size in bytes, by rank.
    """

    output: str
    rows: int
    model_uri: str
    num_workers: int
    restarts: int
    seconds: float
    peak_memory_per_worker: tuple[int, ...] = ()
