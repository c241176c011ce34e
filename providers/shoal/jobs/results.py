"""Define the results of jobs, which are plain data that the store keeps as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator
from pydantic_core import from_json

from shoal.option_validation import Settings, optional
from shoal.secrets.redaction import redact_value

Reason = Literal[
    "first",
    "better",
    "champion_not_comparable",
    "metric_not_finite",
    "bound_missed",
    "baseline_not_beaten",
    "champion_not_beaten",
    "slice_worse",
    "champion_newer",
    "alias_moved",
    "champion_unread",
    "no_common_keys",
    "waiting",
]
"""Rule that decided whether the challenger (the newly trained model) was promoted. The first three rules promote the
challenger. All other rules keep the present champion. With `waiting`, nothing is decided until `promote_model` is
called for the challenger."""

WAITING: Reason = "waiting"

PROMOTING: frozenset[Reason] = frozenset({"first", "better", "champion_not_comparable"})
"""The rules that promote the challenger."""


DATA_TAGS = "shoal.data_"
"""Prefix of the names of the MLflow tags that describe the training rows of a registered version."""


def strict(value: Any) -> Any:
    """Replace NaN and infinity in plain data by the texts that `PlainResult.to_dict` writes, for strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if type(value) in (list, tuple):
        return type(value)(map(strict, value))
    if type(value) is dict:
        return {key: strict(item) for key, item in value.items()}
    return value


def finite(value: float | None) -> float | None:
    """Return the value of a metric for people and for plots; None if it is unknown, NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


class PlainResult(Settings):
    """Base class of results and their parts. Unknown fields are ignored, because a later version of shoal may have
    stored the result."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="strings")

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data for an XCom, or for the result of a Prefect task.

        NaN and infinity become the texts "NaN" and "Infinity", because JSON has no such numbers. The method
        ``model_validate`` converts these texts back to floats.
        """
        plain: dict[str, Any] = from_json(self.model_dump_json())
        return plain


class ChampionResult(PlainResult):
    """The champion (the registered version with the alias) with which the newly trained model was compared."""

    version: str = Field(description="Version number of the champion in MLflow's registry.")
    value: float = Field(description="Value of the deciding metric that the champion reaches on the holdout.")
    unseen_rows: int | None = optional(
        "Number of the holdout's rows on which the models were compared, if there are others, on which one was "
        "trained, or whose keys only one knows. The values that the models reach on other rows then say nothing "
        "about the decision. None: all rows count."
    )


class RecentVersion(PlainResult):
    """A version of the model that was registered before the version that this job has trained."""

    version: str = Field(description="Version number in MLflow's registry.")
    value: float | None = Field(
        description="Value of the deciding metric that the version reached on its own holdout when it was registered. "
        "None: the value is not recorded."
    )
    promoted: bool = Field(description="Whether the version became the champion.")


class DecisionResult(PlainResult):
    """The reason why the newly trained model was promoted to champion, or why it was not."""

    reason: Reason = Field(description="Name of the rule that decided.")
    sentence: str = Field(description="Explanation of the decision in one sentence, for people.")

    @property
    def promote(self) -> bool:
        """Return whether the model became the champion."""
        return self.reason in PROMOTING

    @property
    def promoted(self) -> bool | None:
        """Whether the model became the champion; None if the model waits for a decision."""
        return None if self.reason == WAITING else self.promote


class DataResult(PlainResult):
    """Description of the rows that a model was trained on."""

    rows: int = Field(description="Number of rows that the model was trained on.")
    digest: str = Field(
        description="Fingerprint of the rows. For a dataset with filters or sql, equal rows have equal fingerprints, "
        "wherever they are stored."
    )
    version: str | None = optional(
        "Version of the table that was read. None: the dataset is not a table with versions."
    )
    time_col: str | None = optional(
        "Name of the time column, which is the dataset's `time_col` or the only time column in its filters. None: "
        "there is no such column."
    )
    time_from: str | None = optional("Smallest value of the time column. None: there is no such column.")
    time_to: str | None = optional("Largest value of the time column. None: there is no such column.")

    def tags(self) -> dict[str, str]:
        """Return the MLflow tags that describe the training rows of the registered version."""
        return {f"{DATA_TAGS}{name}": str(value) for name, value in self.model_dump().items() if value is not None}


class JobTimes(PlainResult):
    """Seconds that each step of a job took. The sum of all steps is the time from the submission to the result.

    If the workers do a step at the same time, the step counts with the seconds of the slowest worker. The time for work
    that was lost together with a worker counts as `start`.
    """

    queue: float = Field(description="Seconds in the pool's queue.")
    start: float = Field(
        description="Seconds until the workers read: the start of the driver, the MLflow run and the workers, imports, "
        "and checks of the data."
    )
    read: float | None = Field(
        description="Seconds in which the workers read rows and built their matrices. None: the job ran a function "
        "or a prediction, and the reading is part of `train`."
    )
    train: float = Field(description="Seconds in which the workers trained, ran the function, or predicted.")
    score: float | None = Field(
        description="Seconds of the comparison with the champion and of the registration. None: the job registered no "
        "model."
    )
    upload: float = Field(description="Seconds in which the model, its metrics and its results were saved and logged.")

    @field_validator("*")
    @classmethod
    def _rounded(cls, value: float | None) -> float | None:
        return None if value is None else round(value, 2)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.1f}" for name, value in self.measured().items())

    def measured(self) -> dict[str, float]:
        """Return a dict from the name of each step to its seconds. Steps that the job did not have are left out."""
        return self.model_dump(exclude_none=True)


class SearchSummary(PlainResult):
    """What a search for parameters has found."""

    best_params: dict[str, Any] = Field(description="Parameters of the best trial.")
    best_value: float = Field(description="Value of the deciding metric in the best trial.")
    best_trial: int = Field(description="Number of the best trial, from 0.")
    metric: str | None = Field(
        description="Name of the deciding metric. None: the last metric of the holdout, or a function's only value."
    )
    direction: Literal["minimize", "maximize"] = Field(description="Whether a lower or a higher value is better.")
    trials: dict[str, int] = Field(description="Number of trials by their state: complete, pruned or failed.")
    study: int = Field(description="Number of the attempt that has begun the study, which later attempts continue.")


class FailedPartition(PlainResult):
    """A partition for which the function has failed."""

    key: str = Field(description="Key of the partition, as text.")
    cause: str = Field(description="Error of the function in one line.")

    def __str__(self) -> str:
        return f"{self.key}: {self.cause}"


class JobResult(PlainResult):
    """Result of a job. It is small enough for an XCom, and its paths and URIs contain no credentials."""

    job_id: str = Field(description="Id of the job.")
    attempt: int = Field(description="Number of the attempt that has succeeded, counted from 1.")
    model_path: str = Field(
        description="Local path or URI of the model file in the library's own format, or of the model folder of a "
        "training function."
    )
    model_digest: str | None = optional(
        "SHA-256 of the model file, by which equal models are recognised. None: the job ran a training function."
    )
    model_uri: str = Field(
        description="URI of the model in MLflow; for a job that records nothing in MLflow, the path of the model."
    )
    metrics: dict[str, float] = Field(
        default={},
        description="Metrics of the model, named <set>-<metric> for evaluation sets and holdout-<metric> for the "
        "holdout.",
    )
    best_iteration: int | None = optional(
        "Best boosting round that early stopping found, counted from 0. None: there was no early stopping."
    )
    rows: int | None = optional(
        "Number of rows that were trained on or predicted. None: a training function reads its data itself, so the "
        "number is not known."
    )
    output_path: str | None = optional("Folder with the output of a batch prediction. None: the job trained a model.")
    data: DataResult | None = optional("Description of the training rows. None: the job ran a training function.")
    results_path: str | None = optional(
        "Path of the pickled return values of a training function, one per rank. None: the job ran no training "
        "function."
    )
    partitions: dict[str, int] | None = optional(
        "Number of partitions by status, `succeeded` and `failed`. None: the job was not divided into partitions."
    )
    failed_partitions: tuple[FailedPartition, ...] = Field(
        default=(), description="The first failed partitions in the order of their keys, at most five."
    )
    num_workers: int = Field(default=0, description="Number of workers that the job ran on.")
    seconds: float = Field(description="Time in seconds from the driver's start to the result.")
    node_seconds: float | None = optional(
        "Number of nodes that the job has used, multiplied by the seconds: the nodes of its workers, or one node "
        "(the head with the driver) while it has no workers."
    )
    times: JobTimes | None = optional("Seconds of each step of the job. None: the training was skipped.")
    restarts: int = Field(default=0, description="Number of times that the job restarted after it had lost a worker.")
    peak_memory_per_worker: tuple[int, ...] = Field(
        default=(), description="Highest resident memory of each worker in bytes, in the order of the ranks."
    )
    idle_memory_per_worker: tuple[int, ...] = Field(
        default=(), description="Resident memory of each worker of a boosting training in bytes before it read any row."
    )
    predicted_memory_per_worker: tuple[int, ...] = Field(
        default=(),
        description="Highest resident memory that was predicted for each worker of a boosting training, in bytes, in "
        "the order of the ranks.",
    )
    memory_limit_per_worker: tuple[int, ...] = Field(
        default=(),
        description="Largest resident memory that each worker of a boosting training could have in bytes, in the order "
        "of the ranks.",
    )
    peak_usage_per_worker: tuple[dict[str, float], ...] = Field(
        default=(),
        description="Highest CPU, memory and GPU usage of each worker of a training function, in the order of the "
        "ranks, by the names of the metrics `system/worker-N/...` in the MLflow run. Empty: the job ran no training "
        "function.",
    )
    mlflow_run_id: str | None = Field(
        description="Id of the MLflow run that the job recorded. None: the job recorded nothing in MLflow."
    )
    model_name: str | None = optional("Name of the model in MLflow's registry. None: the model is not registered.")
    model_version: str | None = optional(
        "Version number of the model in MLflow's registry. None: the model is not registered."
    )
    promoted: bool | None = optional(
        "Whether the model became the champion, that is, has the alias. None: the model is not registered, the "
        "training was skipped, or the version waits for a decision (the reason of `decision` is `waiting`)."
    )
    champion: ChampionResult | None = optional(
        "The champion with which the model was compared. None: there was no champion."
    )
    recent: tuple[RecentVersion, ...] = Field(
        default=(),
        description="The versions of the model that were registered before this one, the newest first, at most ten. "
        "Empty: there are none, or the model is not registered.",
    )
    decision: DecisionResult | None = optional(
        "The reason why the model was promoted or was not. None: the model is not registered."
    )
    drift: dict[str, float] = Field(
        default={},
        description="Population stability index (PSI) of the columns whose values differ most from the training rows "
        "of the champion before this training, at most ten. Empty: there was no champion with a profile.",
    )
    failure: str | None = optional(
        "Reason why the job has failed although it has results: more partitions have failed than the spec allows. "
        "None: the job has succeeded."
    )
    search: SearchSummary | None = optional("What a search for parameters has found. None: the job was no search.")
    plan: dict[str, Any] | None = optional(
        "Plan of the number of nodes that a training needs, as `shoal plan --json` prints it. None: the job was no "
        "plan."
    )
    skipped: str | None = optional(
        "Reason why the job trained no model: rows and settings are those of the newest registered version, which "
        "`model_version` and `model_uri` name. None: the job was not skipped."
    )

    @property
    def failed_text(self) -> str:
        """Say how many partitions have failed, and why the first ones; empty if none has failed."""
        return failed_text(self.partitions or {"failed": 0}, map(str, self.failed_partitions))

    def document(self) -> dict[str, Any]:
        """Return the result as plain data for the store."""
        return self.model_dump(mode="json")

    @field_validator("model_path", "model_uri", "results_path", "output_path")
    @classmethod
    def _without_credentials(cls, value: str | None) -> str | None:
        return value and redact_value(value)


def failed_text(counts: Mapping[str, int], first: Iterable[str]) -> str:
    """Say how many partitions have failed, and why the first three; empty if none has failed.

    Args:
        counts: Number of partitions by status.
        first: Key and error of the first failed partitions, as text.
    """
    if not counts["failed"]:
        return ""
    named = "; ".join([*first][:3])
    return f"{counts['failed']:,} of {sum(counts.values()):,} partitions have failed{named and f': {named}'}"


class PromotionResult(PlainResult):
    """Result of `promote_model`: whether a registered version became the champion, and why."""

    model_name: str = Field(description="Name of the model in MLflow's registry.")
    model_version: str = Field(description="Version number of the model in MLflow's registry.")
    model_uri: str = Field(description="URI of the version in MLflow: ``models:/NAME/VERSION``.")
    alias: str = Field(description="Alias in MLflow's registry that marks the champion.")
    promoted: bool = Field(description="Whether the version became the champion, now or in an earlier call.")
    decision: DecisionResult = Field(description="The reason why the version was promoted or was not.")
    champion: ChampionResult | None = optional(
        "The champion with which the version was compared. None: there was no champion, or an earlier call has decided."
    )
    metric: str | None = optional("Name of the metric that decides. None: MLflow does not have the name.")
    metrics: dict[str, float] = Field(default={}, description="Metrics of the version, named holdout-<metric>.")
    recent: tuple[RecentVersion, ...] = Field(
        default=(),
        description="The versions of the model that were registered before this one, the newest first, at most ten. "
        "Empty: there are none, or an earlier call has decided.",
    )
    job_id: str = Field(description="Id of the job that has trained the version.")
    mlflow_run_id: str | None = optional(
        "Id of the MLflow run in which the version was trained. None: MLflow does not have it."
    )
