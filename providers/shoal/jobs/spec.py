"""Specs and results of jobs: plain data that is stored as JSON."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator
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

_LATER_OPTIONS = frozenset(
    {
        "metrics",
        "must_reach",
        "min_improvement",
        "baseline",
        "by",
        "slice_tolerance",
        "min_slice_rows",
        "overlap",
        "group_col",
    }
)
"""Options of `Register` that are newer than the first stored specs."""

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
    """Registration of the model in MLflow, and the rules by which it becomes the champion.

    Options that are at their defaults are not written into the stored spec, so that a spec of an earlier version keeps
    its fingerprint.
    """

    model: str = Field(description="Name of the registered model.")
    alias: str = Field(default="champion", description="Alias of the version that serves.")
    metric: str = Field(
        description="Metric that decides: rmse, mae, logloss, error, auc, accuracy, ndcg@10, or another one of "
        "scikit-learn by its name, such as f1_macro."
    )
    mode: Mode | None = Field(default=None, description="Whether less or more is better; the metric says it by itself.")
    holdout: DatasetSpec = Field(description="Rows that both are evaluated on, and neither was trained on.")
    metrics: tuple[str, ...] = Field(default=(), description="Further metrics to report; they decide nothing.")
    must_reach: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Bound on the metric, in its own unit: a model that is worse is not promoted.",
    )
    min_improvement: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="By how much a challenger has to be better than the champion, in the metric's own unit; 0: at all.",
    )
    baseline: Literal["auto", "mean", "median", "majority"] | None = Field(
        default="auto",
        description="Constant prediction that a first champion has to beat, computed from the holdout's labels; auto: "
        "the class frequencies for a classifier's metric, the median for absolute errors, else the mean; none: any "
        "model may be the first champion.",
    )
    by: str | None = Field(
        default=None, min_length=1, description="Column of the holdout: the metric is reported for each of its values."
    )
    slice_tolerance: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="By how much the metric of a slice may be worse than the champion's, in its own unit; none: slices "
        "decide nothing.",
    )
    min_slice_rows: int = Field(
        default=30, ge=1, description="Slices with fewer rows are reported, but decide nothing: their metric is noise."
    )
    overlap: Literal["refuse", "flag"] = Field(
        default="refuse",
        description="If rows of the holdout are in the training data: refuse the job, or go on and say so.",
    )

    @field_validator("holdout", mode="before")
    @classmethod
    def _holdout(cls, value: Any) -> Any:
        return as_dataset_spec(value)

    @field_validator("metrics", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f'a list of metrics is needed: ["{value}"]')
        return value

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
        for metric in self.all_metrics:
            metrics.best_mode(metric)
        if self.mode not in (None, self.best):
            raise ValueError(
                f'mode="{self.mode}" contradicts metric="{self.metric}", which is best at its {self.best}imum'
            )
        if self.slice_tolerance is not None and self.by is None:
            raise ValueError("slice_tolerance needs by, the column whose values are the slices")
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        fields = type(self).model_fields
        return {
            name: value
            for name, value in document.items()
            if name not in _LATER_OPTIONS or getattr(self, name) != fields[name].default
        }

    @property
    def best(self) -> Mode:
        """Whether less or more of the metric is better."""
        return metrics.best_mode(self.metric)

    @property
    def all_metrics(self) -> tuple[str, ...]:
        """The metric that decides, and those that are reported."""
        return tuple(dict.fromkeys((self.metric, *self.metrics)))

    @property
    def ranks(self) -> bool:
        """Whether a metric needs the column of groups."""
        return any(metrics.ranks(metric) for metric in self.all_metrics)


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

    @model_validator(mode="after")
    def _groups_to_rank(self) -> Self:
        if self.register_as is not None and self.register_as.ranks and self.group_col is None:
            raise ValueError("a ranking metric in register needs group_col, the column of groups")
        return self

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


Reason = Literal[
    "first",
    "better",
    "champion_not_comparable",
    "metric_not_finite",
    "bound_missed",
    "baseline_not_beaten",
    "champion_not_beaten",
    "slice_worse",
    "alias_moved",
]
"""Rule that decided about a challenger: the first three promote it."""


class ChampionResult(Settings):
    """Champion that a challenger was compared with."""

    version: str = Field(description="Its version in the registry.")
    value: float = Field(description="Its metric on the holdout.")


class DecisionResult(Settings):
    """Why a challenger became the champion or did not."""

    reason: Reason = Field(description="The rule that decided.")
    sentence: str = Field(description="The decision in one sentence, for people.")


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
    model_version: str | None = Field(default=None, description="Version in the registry; none: not registered.")
    promoted: bool | None = Field(default=None, description="Whether it has the alias now; none: not registered.")
    champion: ChampionResult | None = Field(
        default=None, description="What it was compared to; none: there was no champion."
    )
    decision: DecisionResult | None = Field(
        default=None, description="Why it has the alias or not; none: not registered."
    )

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
