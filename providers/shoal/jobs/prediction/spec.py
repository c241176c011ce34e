"""The spec of a job that predicts a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from shoal.data.spec import DatasetSpec
from shoal.jobs.prediction.request import PredictRequest
from shoal.jobs.spec import AnySpec

FRAMEWORK: Final = "predict"
"""Value of the field `framework` that marks the spec of a batch prediction."""


class PredictJobSpec(PredictRequest, AnySpec):
    """A batch prediction.

    Example:
        >>> PredictJobSpec(
        ...     model="models:/delays@champion",
        ...     dataset=DataConnector.from_parquet("s3://bucket/today/"),
        ...     output="s3://bucket/predictions/2026-11-22",
        ... )
    """

    framework: Literal["predict"] = Field(default=FRAMEWORK, description="Kind of the job.")

    @model_validator(mode="after")
    def _registers_nothing(self) -> Self:
        if self.register_as is not None:
            raise ValueError("register is for models that a job trains; a prediction has none")
        return self

    def inputs(self) -> Iterator[DatasetSpec]:
        """Yield the dataset to predict."""
        yield self.dataset

    def comparable(self, by_content: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Build the spec that is fingerprinted; see :meth:`AnySpec.comparable`."""
        return super().comparable(by_content).model_copy(update={"dataset": by_content(self.dataset)})
