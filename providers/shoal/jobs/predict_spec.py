"""The spec of a job that predicts a dataset, and the result of the prediction."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from shoal.data.spec import DatasetSpec, as_dataset_spec
from shoal.errors import InvalidArgumentError
from shoal.jobs.spec import AnySpec
from shoal.training.locations import resolved
from shoal.training.scaling import ScalingConfig

PREDICT: Final = "predict"
"""Value of the field `framework` that marks the spec of a batch prediction."""

_REGISTERED = re.compile(r"models:/([^/@]+@[^/@]+|[^/@]+/[0-9]+|m-[0-9a-f]{32})")
"""URIs that name one version, or an alias. A stage or "latest" may name several versions during one run."""


class PredictJobSpec(AnySpec):
    """The prediction of every row of a dataset with a model of MLflow's registry.

    Example:
        >>> PredictJobSpec(
        ...     model="models:/delays@champion",
        ...     dataset=DataConnector.from_parquet("s3://bucket/today/"),
        ...     output_path="s3://bucket/predictions/2026-11-22",
        ... )
    """

    framework: Literal["predict"] = Field(default=PREDICT, description="Kind of the job.")
    model: str = Field(
        min_length=1,
        description="MLflow URI of the model: models:/NAME@ALIAS, models:/NAME/VERSION, runs:/... or a folder.",
    )
    dataset: DatasetSpec = Field(description="Rows to predict; a connector is accepted.")
    output_path: str = Field(min_length=1, description="Directory or URI for the predictions. All nodes must reach it.")
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
        default=False,
        description="Replace other predictions in `output_path` that shoal has written, instead of refusing.",
    )
    scaling_config: ScalingConfig = Field(
        default_factory=ScalingConfig, description="Number and CPUs of the workers; predictions use no GPUs."
    )

    @field_validator("dataset", mode="before")
    @classmethod
    def _dataset(cls, value: Any) -> Any:
        return as_dataset_spec(value)

    @field_validator("output_path")
    @classmethod
    def _absolute(cls, output_path: str) -> str:
        return resolved(output_path).rstrip("/")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model.startswith("models:/") and not _REGISTERED.fullmatch(self.model):
            raise InvalidArgumentError(
                f'model "{self.model}" names no version: write models:/NAME@ALIAS or models:/NAME/VERSION'
            )
        if self.keep_cols is not None and self.prediction_col in self.keep_cols:
            raise InvalidArgumentError(
                f'prediction_col "{self.prediction_col}" is also in keep_cols: choose another name for the predictions'
            )
        return self

    @model_validator(mode="after")
    def _uses_mlflow(self) -> Self:
        if self.register_as is not None:
            raise ValueError("register is for models that a job trains; a prediction has none")
        if self.tracking is None and self.model.startswith(("models:/", "runs:/")):
            raise ValueError(f"tracking is null, but {self.model} is a model in MLflow: leave tracking out")
        return self

    def inputs(self) -> Iterator[DatasetSpec]:
        """Yield the dataset to predict."""
        yield self.dataset

    def with_datasets(self, replaced: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Build a spec in which each dataset is replaced; see :meth:`AnySpec.with_datasets`."""
        return super().with_datasets(replaced).model_copy(update={"dataset": replaced(self.dataset)})


@dataclass(frozen=True, slots=True)
class PredictResult:
    """Result of a batch prediction.

    Args:
        output_path: Directory or URI with the predictions: Parquet files, whose names sort in the order of the dataset.
        rows: Number of predicted rows, which is the number of rows of the dataset.
        model_uri: The model that predicted, with its version.
        num_workers: Number of workers; 0 if the same predictions were there already.
        restarts: Number of restarts after a lost worker.
        seconds: Time from the call to the result.
        peak_memory_per_worker: Highest resident size in bytes, by rank.
    """

    output_path: str
    rows: int
    model_uri: str
    num_workers: int
    restarts: int
    seconds: float
    peak_memory_per_worker: tuple[int, ...] = ()
