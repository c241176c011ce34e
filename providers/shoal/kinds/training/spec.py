"""Define the spec of a job that trains an XGBoost or LightGBM model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import ClassVar, Self

from pydantic import model_validator

from shoal.data.dataset_spec import DatasetSpec
from shoal.jobs.spec import AnyJobSpec
from shoal.option_validation import optional
from shoal.training.boosting.request import TrainRequest
from shoal.training.reporting import HOLDOUT
from shoal.training.tracking import is_mlflow_uri

_STORED = re.compile(r".*/_code/[0-9a-f]{64}", re.DOTALL)
"""Pattern of the paths of the files that `shoal.jobs.shipped_code` writes, also after they were sent to a pool."""


def is_stored(init_model: str) -> bool:
    """Return whether a model to continue from is a file that an estimator has stored for the job."""
    return _STORED.fullmatch(init_model) is not None


class JobSpec(TrainRequest, AnyJobSpec):
    """Spec of a job that trains an XGBoost or LightGBM model.

    Example:
        >>> JobSpec(
        ...     dataset=DataConnector.from_parquet("s3://bucket/train/"),
        ...     input_cols=["x", "y"], label_col="z",
        ...     params={"objective": "reg:squarederror"},
        ... )
    """

    user_code: str | None = optional(
        "Path of the file with the pickled callbacks, objective and metrics; an estimator writes the file "
        "and sets the path."
    )
    forks_workers: ClassVar[bool] = True

    @property
    def skips_by_default(self) -> bool:  # type: ignore[override]
        """Whether a task skips the job without new rows: shoal would not notice a change of the user's code."""
        return self.user_code is None

    def locations(self) -> Iterator[tuple[str, str, str]]:
        """Yield the model to continue from. A file that an estimator has stored is sent with the job."""
        if self.init_model is not None and not is_stored(self.init_model):
            yield self.init_model, "init_model", "name a registered model (models:/NAME@ALIAS) or a URI"

    def trainings(self) -> Iterator[TrainRequest]:
        """Yield this training."""
        yield self

    def profiled(self) -> tuple[DatasetSpec, ...]:
        """Return the training dataset."""
        return (self.dataset,)

    def _subject(self) -> str:
        """Return the library and the column that the model predicts."""
        return f"{self.framework}: {self.label_col}"

    @model_validator(mode="after")
    def _consistent_job(self) -> Self:
        if self.register_as is not None and self.register_as.ranks and self.group_col is None:
            raise ValueError(
                "a ranking metric in register needs group_col as well: set group_col to the name of the column that "
                "assigns rows to groups, such as queries"
            )
        # The stored spec of an earlier version may have this name. Only a stored spec has a fingerprint.
        if self.register_as is not None and HOLDOUT in self.eval_set and self.fingerprint is None:
            raise ValueError(
                f'an eval set has the name "{HOLDOUT}", under which the metrics on register.holdout are stored: rename '
                "the eval set"
            )
        if self.register_as is not None and self.label_cols:
            raise ValueError(
                "register compares the predictions of one label column, and label_cols names several: train without "
                "register, or train one model per label column"
            )
        if self.register_as is not None and self.label_col == self.label_lower_bound_col:
            raise ValueError(
                "register compares predictions with label_col, but no metric takes the bounds of labels into account: "
                "set label_col to a column whose values the metric may use, or remove register"
            )
        if self.user_code is not None and self.register_as is not None and self.register_as.skip_if_unchanged:
            raise ValueError(
                "skip_if_unchanged is not possible with callbacks or functions of your own: shoal cannot know whether "
                "their code has changed. Omit skip_if_unchanged, or set it to false"
            )
        if self.tracking is None and self.init_model is not None and is_mlflow_uri(self.init_model):
            raise ValueError(
                f'"tracking" is null, but init_model {self.init_model} is loaded from MLflow: leave the option '
                '"tracking" out'
            )
        return self

    def comparable(self, by_content: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Return a copy of the spec, to compute the job's fingerprint from it; see :meth:`AnyJobSpec.comparable`."""
        # The name of a stored file is the digest of its content; its folder may differ between hosts.
        stored = self.init_model is not None and is_stored(self.init_model)
        init_model = self.init_model.rpartition("/")[2] if self.init_model and stored else self.init_model
        return super().comparable(by_content).model_copy(update={"init_model": init_model})
