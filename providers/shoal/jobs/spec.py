"""Specs and results of jobs: plain data that is stored as JSON."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import from_json, to_json

from shoal.data.spec import DatasetSpec, as_dataset_spec
from shoal.errors import InvalidArgumentError
from shoal.jobs import ids, metrics
from shoal.jobs.metrics import Mode
from shoal.redaction import redact_value
from shoal.settings import Settings
from shoal.training.boosting.request import TrainRequest
from shoal.training.run_config import RunConfig

_MODEL_NAME = re.compile(r"[^/:]{1,250}")
_ALIAS = re.compile(r"(?!v\d+$|latest$)[A-Za-z0-9_-]{1,255}", re.IGNORECASE)
_SQLITE = "sqlite:///"


_DEEPEST = 100
"""Levels of lists and objects in a spec. Python gives up at about 1,000, and several programs walk a spec."""

_LONGEST_INTEGER_BITS = 14_000
"""Of more than 4300 digits Python writes and reads no text."""


def check_json(fields: Any) -> None:
    """Refuse documents that are nested too deeply or have too long integers, before other code walks them.

    Raises:
        InvalidArgumentError: Nested too deeply, or with an integer that is too long.
    """
    left = [(fields, 0)]
    while left:
        value, depth = left.pop()
        if depth > _DEEPEST:
            raise InvalidArgumentError(f"the spec is nested more than {_DEEPEST} levels deep: make it flatter")
        if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER_BITS:
            raise InvalidArgumentError("the spec has an integer of more than 4000 digits: give it as text")
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        left += [(item, depth + 1) for item in items]


class Register(Settings):
    """Registration of the model in MLflow, and the metric that decides whether it becomes the champion."""

    model: str = Field(description="Name of the registered model.")
    alias: str = Field(default="champion", description="Alias of the version that serves.")
    metric: str = Field(description=f"What decides between the two: {', '.join(sorted(metrics.METRICS))}.")
    mode: Mode | None = Field(default=None, description="Whether less or more is better; the metric says it by itself.")
    holdout: DatasetSpec = Field(description="Rows that both are evaluated on, and neither was trained on.")

    @field_validator("holdout", mode="before")
    @classmethod
    def _holdout(cls, value: Any) -> Any:
        return as_dataset_spec(value)

    @model_validator(mode="after")
    def _legal(self) -> Self:
        if not _MODEL_NAME.fullmatch(self.model):
            raise InvalidArgumentError(
                f'model "{self.model}" is no legal name: 1 to 250 characters without "/" and ":"'
            )
        if not _ALIAS.fullmatch(self.alias):
            raise InvalidArgumentError(
                f'alias "{self.alias}" is not legal: letters, digits, "_", "-", and neither "latest" nor "v1"'
            )
        best = metrics.best_mode(self.metric)
        if self.mode not in (None, best):
            raise ValueError(f'mode="{self.mode}" contradicts metric="{self.metric}", which is best at its {best}imum')
        return self

    @property
    def best(self) -> Mode:
        """Whether less or more of the metric is better."""
        return metrics.best_mode(self.metric)


class Tracking(Settings):
    """The job's run in MLflow. Credentials in the URI are not stored with the spec."""

    uri: str | None = Field(
        default=None,
        description="Tracking server or database; none: the submitter's MLFLOW_TRACKING_URI, else one in $SHOAL_HOME.",
    )
    experiment: str = Field(default="shoal", min_length=1, description="Experiment, made where there is none.")
    run_name: str | None = Field(default=None, description="Name of the run; none: the job and its attempt.")
    tags: dict[str, str] = Field(default_factory=dict, description="Further tags of the run.")


class AnySpec(Settings, ABC):
    """Fields that the specs of all jobs have."""

    run_config: RunConfig = Field(default_factory=RunConfig, description="Where and under which limits it runs.")
    tracking: Tracking | None = Field(
        default_factory=Tracking, description="Where its run goes in MLflow; null: nowhere, it runs untracked."
    )
    register_as: Register | None = Field(
        default=None, alias="register", description="Where the model goes; none: nowhere."
    )
    fingerprint: str | None = Field(
        default=None, alias="question", description="Digest of what is to be trained; set when it is submitted."
    )

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """Build a spec from the fields in a file or an operator's arguments.

        Raises:
            InvalidArgumentError: Naming each field that is wrong.
        """
        check_json(fields)
        return super().parse(fields)

    @model_validator(mode="after")
    def _legal_id(self) -> Self:
        if self.run_config.job_id is not None:
            ids.checked(self.run_config.job_id)
        return self

    @model_validator(mode="after")
    def _tracked_to_register(self) -> Self:
        if self.register_as is not None and self.tracking is None:
            raise ValueError("register needs tracking: a model is registered in MLflow out of its run")
        return self

    def completed(self, pool: str, environment: Mapping[str, str]) -> Self:
        """Return the spec with the submitter's pool and tracking server filled in."""
        changes: dict[str, Any] = {"run_config": self.run_config.model_copy(update={"pool_name": pool})}
        if self.tracking is not None:
            uri = self.tracking.uri or environment.get("MLFLOW_TRACKING_URI") or None
            if uri and uri.startswith(_SQLITE) and not uri.startswith(f"{_SQLITE}/"):
                uri = _SQLITE + str(Path(uri.removeprefix(_SQLITE)).absolute())  # the driver works in another folder
            changes["tracking"] = self.tracking.model_copy(update={"uri": uri})
        return self.model_copy(update=changes)

    def document(self) -> dict[str, Any]:
        """Return the spec as JSON, with its credentials."""
        return self.model_dump(mode="json", by_alias=True)

    @abstractmethod
    def inputs(self) -> Iterator[DatasetSpec]:
        """Yield the datasets to train on and to evaluate with."""

    def datasets(self) -> Iterator[DatasetSpec]:
        """Yield all datasets that the spec names."""
        yield from self.inputs()
        if self.register_as is not None:
            yield self.register_as.holdout

    def comparable(self, by_content: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Build the spec that is fingerprinted: the same for equal data and for code pickled at another time.

        Args:
            by_content: Names a dataset by what is in it.
        """
        register = self.register_as
        if register is None:
            return self
        return self.model_copy(
            update={"register_as": register.model_copy(update={"holdout": by_content(register.holdout)})}
        )

    def staged(self) -> set[str]:
        """Return the directories of staged data that were written for this job only."""
        return {dataset.staging for dataset in self.datasets() if dataset.staging}


class JobSpec(TrainRequest, AnySpec):
    """A training run.

    Example:
        >>> JobSpec(
        ...     dataset=DataConnector.from_parquet("s3://bucket/train/"),
        ...     input_cols=["x", "y"], label_col="z",
        ...     params={"objective": "reg:squarederror"},
        ... )
    """

    user_code: str | None = Field(
        default=None, description="Where callbacks, objective and metrics lie, by value; an estimator writes them."
    )

    def inputs(self) -> Iterator[DatasetSpec]:
        """Yield the datasets to train on and to evaluate with."""
        yield self.dataset
        yield from self.eval_set.values()

    def comparable(self, by_content: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Build the spec that is fingerprinted; see :meth:`AnySpec.comparable`."""
        return (
            super()
            .comparable(by_content)
            .model_copy(
                update={
                    "dataset": by_content(self.dataset),
                    "eval_set": {name: by_content(dataset) for name, dataset in self.eval_set.items()},
                    "user_code": self.user_code and "by value",
                }
            )
        )


class ChampionResult(Settings):
    """Champion that a challenger was compared with."""

    version: str = Field(description="Its version in the registry.")
    value: float = Field(description="Its metric on the holdout.")


class JobResult(Settings):
    """Result of a job: small enough for an XCom, without the credentials of its `artifact_location`."""

    job_id: str = Field(description="The job.")
    attempt: int = Field(description="Which attempt of it.")
    model_path: str = Field(
        description="The model in the library's own format, or a function's model folder: a local path or a URI."
    )
    model_digest: str | None = Field(
        description="SHA-256 of the model's bytes: the same model is the same digest; none: a function's."
    )
    model_uri: str = Field(description="The model in MLflow; untracked, its path.")
    metrics: dict[str, float] = Field(description="Of the model, as <set>-<metric> and holdout-<metric>.")
    best_iteration: int | None = Field(description="Best round, from 0, with early stopping.")
    rows: int | None = Field(description="Rows trained on, or predicted; none: a function reads what it likes.")
    output_path: str | None = Field(default=None, description="Folder of a batch prediction; none: a training.")
    results_path: str | None = Field(default=None, description="What each rank of a function returned, pickled.")
    num_workers: int = Field(description="Workers that trained.")
    seconds: float = Field(description="From the driver's start to its result.")
    restarts: int = Field(description="How often it resumed after a loss.")
    peak_memory_per_worker: tuple[int, ...] = Field(description="Highest resident size in bytes, by rank.")
    mlflow_run_id: str | None = Field(description="Its run; none: untracked.")
    model_version: str | None = Field(description="Version in the registry; none: not registered.")
    promoted: bool | None = Field(description="Whether it has the alias now; none: not registered.")
    champion: ChampionResult | None = Field(description="What it was compared to; none: there was no champion.")

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data for an XCom, which is strict JSON: NaN is "NaN" and infinity "Infinity".

        ``JobResult.model_validate`` takes both back as floats.
        """
        plain: dict[str, Any] = from_json(to_json(self.model_dump(), inf_nan_mode="strings"))
        return plain

    @field_validator("model_path", "model_uri", "results_path", "output_path")
    @classmethod
    def _without_credentials(cls, value: str | None) -> str | None:
        return value and redact_value(value)
