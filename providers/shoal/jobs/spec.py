"""Define the specs and results of jobs: plain data that the store keeps as JSON."""

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
"""Options of `Register` that the specs of the first versions did not have. They are left out of the stored spec while
they are at their defaults, so that an unchanged spec keeps its fingerprint."""

_DEEPEST = 100
"""Most levels of nested lists and objects in a spec. Recursive code that walks a spec fails at about 1,000 levels of
Python calls, so the limit is far below that."""

_LONGEST_INTEGER_BITS = 14_000
"""Most bits of an integer in a spec, about 4,200 digits. Python refuses to convert integers of more than 4,300 digits
to or from text, so a longer one could not be stored as JSON."""


def check_json(fields: Any) -> None:
    """Refuse a spec that is nested too deeply or has too long an integer, before other code walks through the spec.

    Args:
        fields: The spec's fields as plain data: nested mappings, lists and values.

    Raises:
        InvalidArgumentError: The spec is nested too deeply, or has an integer that is too long.
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
    """Options to register the trained model in MLflow, and the rules by which the model becomes the champion.

    The champion is the registered version that has the alias, and the challenger is the model that the job has trained.

    Newer options that are at their defaults are not written into the stored spec, so that a spec of an earlier version
    keeps its fingerprint.
    """

    model: str = Field(description="Name of the model in MLflow's registry under which the job registers a version.")
    alias: str = Field(
        default="champion",
        description="Alias in MLflow's registry that marks the champion, which is the version in use. A promotion "
        "moves the alias to the new version.",
    )
    metric: str = Field(
        description="Metric that decides whether the challenger replaces the champion: rmse, mae, logloss, error, auc, "
        "accuracy, ndcg@10, or another metric of scikit-learn by its name, such as f1_macro."
    )
    mode: Mode | None = Field(
        default=None,
        description='Whether a lower ("min") or a higher ("max") value of the metric is better. None: the metric '
        "determines it; any other value must agree with the metric.",
    )
    holdout: DatasetSpec = Field(
        description="Dataset on which the champion and the challenger are evaluated; neither should have been trained "
        "on its rows (see `overlap`).",
    )
    metrics: tuple[str, ...] = Field(
        default=(), description="Further metrics that are computed and reported, but do not affect the decision."
    )
    must_reach: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Worst value of the metric that is accepted, in the metric's own unit: a model with a worse value "
        "is not promoted. None: there is no such limit.",
    )
    min_improvement: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Amount by which the challenger must be better than the champion, in the metric's own unit. 0: any "
        "improvement is enough.",
    )
    baseline: Literal["auto", "mean", "median", "majority"] | None = Field(
        default="auto",
        description="Constant prediction, computed from the holdout's labels, that the challenger must beat if there "
        "is no champion to compare it with. auto: the class frequencies for a classifier's metric, the median for "
        "absolute errors, the mean for other metrics. None: any model may become the first champion.",
    )
    by: str | None = Field(
        default=None,
        min_length=1,
        description="Column of the holdout whose values divide the rows into slices; the metric is reported for each "
        "slice. None: there are no slices.",
    )
    slice_tolerance: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Amount by which the challenger's metric may be worse than the champion's on a slice, in the "
        "metric's own unit; above it the challenger is not promoted. None: slices do not affect the decision.",
    )
    min_slice_rows: int = Field(
        default=30,
        ge=1,
        description="Number of rows that a slice needs to affect the decision. A slice with fewer rows is reported "
        "only, because its metric is mostly noise.",
    )
    overlap: Literal["refuse", "flag"] = Field(
        default="refuse",
        description="What the job does if rows of the holdout are also in the training data. refuse: the job fails. "
        "flag: the job goes on and reports the overlap.",
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
        """Return "min" if a lower value of the metric is better, and "max" if a higher one is."""
        return metrics.best_mode(self.metric)

    @property
    def all_metrics(self) -> tuple[str, ...]:
        """Return the names of the metric that decides and of the metrics that are only reported, without duplicates."""
        return tuple(dict.fromkeys((self.metric, *self.metrics)))

    @property
    def ranks(self) -> bool:
        """Return whether one of the metrics is a ranking metric, which needs the column of groups."""
        return any(metrics.ranks(metric) for metric in self.all_metrics)


class Tracking(Settings):
    """Options for the MLflow run that the job records. Credentials in the URI are not stored with the spec."""

    uri: str | None = Field(
        default=None,
        description="URI of MLflow's tracking server or database. None: the submitter's MLFLOW_TRACKING_URI, or else a "
        "database in $SHOAL_HOME.",
    )
    experiment: str = Field(
        default="shoal",
        min_length=1,
        description="Name of the MLflow experiment, which is created if it does not exist.",
    )
    run_name: str | None = Field(
        default=None, description="Name of the MLflow run. None: the job's id and the number of the attempt."
    )
    tags: dict[str, str] = Field(
        default_factory=dict, description="Tags that are set on the MLflow run in addition to shoal's own."
    )


class AnySpec(Settings, ABC):
    """Base class of the specs of all kinds of jobs, with the fields that all of them have."""

    run_config: RunConfig = Field(
        default_factory=RunConfig,
        description="Options about the run: its pool, job id, priority, time limits and folder for artifacts.",
    )
    tracking: Tracking | None = Field(
        default_factory=Tracking,
        description="Options for the MLflow run that the job records. null: the job records nothing in MLflow.",
    )
    register_as: Register | None = Field(
        default=None,
        alias="register",
        description="Options to register the model in MLflow and to promote it. None: the model is not registered.",
    )
    fingerprint: str | None = Field(
        default=None,
        alias="question",
        description="Digest of the spec and of its data, by which the same job is recognised when it is submitted "
        "again. shoal sets the digest at the submission.",
    )

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """Build a spec from fields that come from a file or from an operator's arguments.

        Raises:
            InvalidArgumentError: At least one field is wrong; the message names each of them.
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
        """Return the spec with the submitter's pool and tracking server filled in.

        Args:
            pool: Name of the pool that the job is submitted to.
            environment: Environment variables of the submitter, for its MLFLOW_TRACKING_URI.
        """
        changes: dict[str, Any] = {"run_config": self.run_config.model_copy(update={"pool_name": pool})}
        if self.tracking is not None:
            uri = self.tracking.uri or environment.get("MLFLOW_TRACKING_URI") or None
            if uri and uri.startswith(_SQLITE) and not uri.startswith(f"{_SQLITE}/"):
                # The path is made absolute, because the driver's working directory is not the submitter's.
                uri = _SQLITE + str(Path(uri.removeprefix(_SQLITE)).absolute())
            changes["tracking"] = self.tracking.model_copy(update={"uri": uri})
        return self.model_copy(update=changes)

    def document(self) -> dict[str, Any]:
        """Return the spec as plain data for JSON; credentials in it are not removed."""
        return self.model_dump(mode="json", by_alias=True)

    @abstractmethod
    def inputs(self) -> Iterator[DatasetSpec]:
        """Yield the datasets that the job reads to train, to evaluate or to predict; not the holdout."""

    def datasets(self) -> Iterator[DatasetSpec]:
        """Yield all datasets that the spec names, the holdout included."""
        yield from self.inputs()
        if self.register_as is not None:
            yield self.register_as.holdout

    def comparable(self, by_content: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Build the spec that is fingerprinted.

        Two submissions of the same job give equal specs even if their data were staged in different folders, or their
        code was pickled at different times.

        Args:
            by_content: Returns the given dataset's spec with a digest of its content in place of its location.
        """
        return self.with_datasets(by_content)

    def with_datasets(self, replaced: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Build a spec in which each dataset is replaced.

        Args:
            replaced: Returns the new dataset for each one in the spec.
        """
        register = self.register_as
        if register is None:
            return self
        return self.model_copy(
            update={"register_as": register.model_copy(update={"holdout": replaced(register.holdout)})}
        )

    def staged(self) -> set[str]:
        """Return the directories of staged data: copies of in-memory data that were written for this job only."""
        return {dataset.staging for dataset in self.datasets() if dataset.staging}


class JobSpec(TrainRequest, AnySpec):
    """Spec of a job that trains an XGBoost or LightGBM model.

    Example:
        >>> JobSpec(
        ...     dataset=DataConnector.from_parquet("s3://bucket/train/"),
        ...     input_cols=["x", "y"], label_col="z",
        ...     params={"objective": "reg:squarederror"},
        ... )
    """

    user_code: str | None = Field(
        default=None,
        description="Path of the file with the pickled callbacks, objective and metrics; an estimator writes the file "
        "and sets the path.",
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
        return super().comparable(by_content).model_copy(update={"user_code": self.user_code and "by value"})

    def with_datasets(self, replaced: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Build a spec in which each dataset is replaced; see :meth:`AnySpec.with_datasets`."""
        return (
            super()
            .with_datasets(replaced)
            .model_copy(
                update={
                    "dataset": replaced(self.dataset),
                    "eval_set": {name: replaced(dataset) for name, dataset in self.eval_set.items()},
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
"""Rule that decided whether the challenger (the newly trained model) was promoted. The first three rules promote the
challenger, all others leave the champion as it is."""


class ChampionResult(Settings):
    """The registered version with the alias, with which the newly trained model was compared."""

    version: str = Field(description="Version number of the champion in MLflow's registry.")
    value: float = Field(description="Value of the deciding metric that the champion reaches on the holdout.")


class DecisionResult(Settings):
    """The reason why the newly trained model was promoted to champion, or why it was not."""

    reason: Reason = Field(description="Name of the rule that decided.")
    sentence: str = Field(description="Explanation of the decision in one sentence, for people.")


class DataResult(Settings):
    """Description of the rows that a model was trained on."""

    rows: int = Field(description="Number of rows that the model was trained on.")
    digest: str = Field(
        description="Fingerprint of the rows. For a dataset with filters or sql, equal rows have equal fingerprints, "
        "wherever they are stored."
    )
    time_from: str | None = Field(
        default=None,
        description="Smallest value of the time column, which is the dataset's `time_col` or the only time column in "
        "its filters. None: there is no such column.",
    )
    time_to: str | None = Field(default=None, description="Largest value of the time column; None as for `time_from`.")

    def tags(self) -> dict[str, str]:
        """Return the tags by which the registered version in MLflow describes its training rows."""
        return {f"shoal.data_{name}": str(value) for name, value in self.model_dump().items() if value is not None}


class JobResult(Settings):
    """Result of a job. It is small enough for an XCom, and contains no credentials of its `artifact_location`."""

    job_id: str = Field(description="Id of the job.")
    attempt: int = Field(description="Number of the attempt that has succeeded, counted from 1.")
    model_path: str = Field(
        description="Local path or URI of the model file in the library's own format, or of the model folder of a "
        "training function."
    )
    model_digest: str | None = Field(
        description="SHA-256 of the model file, by which equal models are recognised. None: the job ran a training "
        "function."
    )
    model_uri: str = Field(
        description="URI of the model in MLflow; for a job that records nothing in MLflow, the path of the model."
    )
    metrics: dict[str, float] = Field(
        description="Metrics of the model, named <set>-<metric> for evaluation sets and holdout-<metric> for the "
        "holdout.",
    )
    best_iteration: int | None = Field(
        description="Best boosting round that early stopping found, counted from 0. None: there was no early stopping."
    )
    rows: int | None = Field(
        description="Number of rows that were trained on or predicted. None: a training function reads its data "
        "itself, so the number is not known.",
    )
    output_path: str | None = Field(
        default=None, description="Folder with the output of a batch prediction. None: the job trained a model."
    )
    data: DataResult | None = Field(
        default=None, description="Description of the training rows. None: the job ran a training function."
    )
    results_path: str | None = Field(
        default=None,
        description="Path of the pickled return values of a training function, one per rank. None: the job ran no "
        "training function.",
    )
    num_workers: int = Field(description="Number of workers that the job ran on.")
    seconds: float = Field(description="Time in seconds from the driver's start to the result.")
    restarts: int = Field(description="Number of times that the job restarted after it had lost a worker.")
    peak_memory_per_worker: tuple[int, ...] = Field(
        description="Highest resident memory of each worker in bytes, in the order of the ranks."
    )
    mlflow_run_id: str | None = Field(
        description="Id of the MLflow run that the job recorded. None: the job recorded nothing in MLflow."
    )
    model_version: str | None = Field(
        default=None, description="Version number of the model in MLflow's registry. None: the model is not registered."
    )
    promoted: bool | None = Field(
        default=None,
        description="Whether the model became the champion, that is, has the alias. None: the model is not registered.",
    )
    champion: ChampionResult | None = Field(
        default=None, description="The champion with which the model was compared. None: there was no champion."
    )
    decision: DecisionResult | None = Field(
        default=None, description="The reason why the model was promoted or was not. None: the model is not registered."
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data for an XCom.

        An XCom is strict JSON, which has no NaN and no infinity: they become the texts "NaN" and "Infinity".
        ``JobResult.model_validate`` converts both back to floats.
        """
        plain: dict[str, Any] = from_json(to_json(self.model_dump(), inf_nan_mode="strings"))
        return plain

    @field_validator("model_path", "model_uri", "results_path", "output_path")
    @classmethod
    def _without_credentials(cls, value: str | None) -> str | None:
        return value and redact_value(value)
