"""Define the spec of a job that predicts the rows of a dataset, and the result of such a job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import InvalidArgumentError
from shoal.jobs.spec import OBJECT_STORE, AnyJobSpec
from shoal.option_validation import optional
from shoal.training import tracking
from shoal.training.demand import ScalingConfig
from shoal.training.locations import resolved


class PredictJobSpec(AnyJobSpec):
    """Spec of a job that predicts every row of a dataset with a model from MLflow.

    Example:
        >>> PredictJobSpec(
        ...     model="models:/delays@champion",
        ...     dataset=DataConnector.from_parquet("s3://bucket/today/"),
        ...     output_path="s3://bucket/predictions/2026-11-22",
        ... )
    """

    framework: Literal["predict"] = Field(
        default="predict", description="Kind of the job; the value marks a batch prediction."
    )
    model: str = Field(
        min_length=1,
        description="MLflow URI of the model: models:/NAME@ALIAS, models:/NAME/VERSION, runs:/... or the path of a "
        "model folder. A relative path starts at the working directory of the process that submits the job.",
    )
    dataset: DatasetSpec = Field(description="Dataset whose rows are predicted; a DataConnector is accepted too.")
    output_path: str = Field(
        min_length=1,
        description="Directory or URI that the predictions are written to. All nodes of the pool must be able to reach "
        "it.",
    )
    keep_cols: tuple[str, ...] | None = optional(
        "Columns of the dataset that are copied into the output beside the predictions. None: all columns."
    )
    prediction_col: str = Field(
        default="prediction",
        min_length=1,
        description="Name of the output column with the predictions. If the model returns several values per row, the "
        "columns are NAME_0, NAME_1 and so on.",
    )
    input_cols: tuple[str, ...] = Field(
        default=(),
        description="Names of the input columns, in order. Only a model that does not name its columns needs these "
        "names, such as a model whose MLflow signature is a tensor.",
    )
    category_codes: bool = Field(
        default=False,
        description="Whether the dataset contains the integer codes on which the model was trained, for categorical "
        "columns whose categories the model does not contain. Only a model that another program trained needs this.",
    )
    overwrite: bool = Field(
        default=False,
        description="Whether to replace other predictions that shoal has written to `output_path` before. False: the "
        "job fails if there are other predictions.",
    )
    scaling_config: ScalingConfig = Field(
        default_factory=ScalingConfig,
        description="Number of the workers and CPUs of each worker. Predictions use no GPUs.",
    )

    refused_by_for_each: ClassVar[str] = (
        "this is the spec of a batch prediction: write one prediction spec for each model"
    )

    @field_validator("model")
    @classmethod
    def _absolute_folder(cls, model: str) -> str:
        return tracking.absolute_model(model)

    @field_validator("output_path")
    @classmethod
    def _absolute(cls, output_path: str) -> str:
        return resolved(output_path, "output_path").rstrip("/")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        tracking.check_model_version(self.model)
        if self.keep_cols is not None and self.prediction_col in self.keep_cols:
            raise InvalidArgumentError(
                f'prediction_col "{self.prediction_col}" is also in keep_cols: choose another name for the predictions'
            )
        if self.register_as is not None:
            raise ValueError(
                "register is only for jobs that train a model, but a prediction trains no model: remove register"
            )
        if self.tracking is None and tracking.is_mlflow_uri(self.model):
            raise ValueError(
                f'"tracking" is null, but the model {self.model} is loaded from MLflow: leave the option "tracking" out'
            )
        return self

    @property
    def registered_model(self) -> str | None:
        """Return the name of the registered model that predicts; None if the model is not registered."""
        return tracking.registered_name(self.model)

    def _subject(self) -> str:
        """Return the model that predicts."""
        return f"predictions of {self.model}"

    def locations(self) -> Iterator[tuple[str, str, str]]:
        """Yield the model and the folder of the output."""
        if tracking.is_model_path(self.model):
            yield self.model, "the model", "name a registered model (models:/NAME@ALIAS) or a URI"
        yield self.output_path, "output_path", f"set it to a URI in {OBJECT_STORE}"


@dataclass(frozen=True, slots=True)
class PredictResult:
    """Result of a batch prediction.

    Args:
        output_path: Directory or URI with the predictions: Parquet files, whose names sort in the order of the dataset.
        rows: Number of predicted rows, which is the number of rows of the dataset.
        model_uri: URI of the model, with its version.
        num_workers: Number of workers; 0 if the output already had the same predictions.
        restarts: Number of restarts after a lost worker.
        seconds: Time from the call to the result.
        peak_memory_per_worker: Highest resident memory of each worker in bytes, in the order of the ranks.
    """

    output_path: str
    rows: int
    model_uri: str
    num_workers: int
    restarts: int
    seconds: float
    peak_memory_per_worker: tuple[int, ...] = ()
