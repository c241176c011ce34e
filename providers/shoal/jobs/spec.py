"""What a job is asked to do and what it returns: plain data that is kept as JSON."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator
from pydantic_core import from_json, to_json

from shoal.data.spec import DatasetSpec
from shoal.errors import InvalidArgumentError
from shoal.jobs import ids, metrics
from shoal.jobs.metrics import Mode
from shoal.redaction import RedactedRepr, redact_value
from shoal.training.boosting.request import Framework, TrainRequest
from shoal.training.run_config import RunConfig
from shoal.training.scaling import ScalingConfig

_MODEL_NAME = re.compile(r"[^/:]{1,250}")
_ALIAS = re.compile(r"(?!v\d+$|latest$)[A-Za-z0-9_-]{1,255}", re.IGNORECASE)
_SQLITE = "sqlite:///"


_DEEPEST = 100
"""Levels of lists and objects in a spec. Python gives up at about 1,000, and several programs walk a spec."""

_LONGEST_INTEGER_BITS = 14_000
"""Of more than 4300 digits Python writes and reads no text."""


def check_json(fields: Any) -> None:
    """Refuse what no JSON document of a job can hold, before anything walks it.

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


class _Strict(RedactedRepr, BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def _as_dataset(value: Any) -> Any:
    """A `DataConnector` may stand where its spec is meant."""
    return value.to_spec() if hasattr(value, "to_spec") else value


class Register(_Strict):
    """How the model is registered in MLflow, and when it becomes the champion."""

    model: str = Field(description="Name of the registered model.")
    alias: str = Field(default="champion", description="Alias of the version that serves.")
    metric: str = Field(description=f"What decides between the two: {', '.join(sorted(metrics.METRICS))}.")
    mode: Mode | None = Field(default=None, description="Whether less or more is better; the metric says it by itself.")
    holdout: DatasetSpec = Field(description="Rows that both are evaluated on, and neither was trained on.")

    @field_validator("holdout", mode="before")
    @classmethod
    def _holdout(cls, value: Any) -> Any:
        return _as_dataset(value)

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


class Tracking(_Strict):
    """Where the job's run goes in MLflow. Credentials in the URI never reach the stored spec."""

    uri: str | None = Field(
        default=None,
        description="Tracking server or database; none: the submitter's MLFLOW_TRACKING_URI, else one in $SHOAL_HOME.",
    )
    experiment: str = Field(default="shoal", min_length=1, description="Experiment, made where there is none.")
    run_name: str | None = Field(default=None, description="Name of the run; none: the job and its attempt.")
    tags: dict[str, str] = Field(default_factory=dict, description="Further tags of the run.")


class AnySpec(_Strict, ABC):
    """What every job's spec says, whatever it runs."""

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
        """Make a spec of what a file or an operator's arguments say.

        Raises:
            InvalidArgumentError: Naming each field that is wrong.
        """
        check_json(fields)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise InvalidArgumentError(
                "; ".join(_said(problem["loc"], problem["msg"]) for problem in error.errors())
            ) from None

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
        """The spec with what the submitter's surroundings say: its pool, its tracking server."""
        changes: dict[str, Any] = {"run_config": self.run_config.model_copy(update={"pool_name": pool})}
        if self.tracking is not None:
            uri = self.tracking.uri or environment.get("MLFLOW_TRACKING_URI") or None
            if uri and uri.startswith(_SQLITE) and not uri.startswith(f"{_SQLITE}/"):
                uri = _SQLITE + str(Path(uri.removeprefix(_SQLITE)).absolute())  # the driver works in another folder
            changes["tracking"] = self.tracking.model_copy(update={"uri": uri})
        return self.model_copy(update=changes)

    def document(self) -> dict[str, Any]:
        """As JSON, credentials in it and all."""
        return self.model_dump(mode="json", by_alias=True)

    @abstractmethod
    def inputs(self) -> Iterator[DatasetSpec]:
        """The datasets that it trains on or evaluates with."""

    def datasets(self) -> Iterator[DatasetSpec]:
        """All datasets that it names."""
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
        """Copies of data that were written for this job alone."""
        return {dataset.staging for dataset in self.datasets() if dataset.staging}


class JobSpec(AnySpec):
    """A training run.

    Example:
        >>> JobSpec(
        ...     dataset=DataConnector.from_parquet("s3://bucket/train/"),
        ...     input_cols=["x", "y"], label_col="z",
        ...     params={"objective": "reg:squarederror"},
        ... )
    """

    framework: Framework = Field(default="xgboost", description="What trains.")
    dataset: DatasetSpec = Field(description="Rows to train on; a `DataConnector` will do.")
    input_cols: tuple[str, ...] = Field(min_length=1, description="Feature columns, in the order the model takes them.")
    label_col: str = Field(min_length=1, description="Label column.")
    categorical_cols: tuple[str, ...] = Field(
        default=(),
        description="Those of the feature columns whose values are categories: text, whole numbers, booleans.",
    )
    eval_set: dict[str, DatasetSpec] = Field(
        default_factory=dict,
        description='Rows to evaluate on after each round, by name; a single one is called "eval".',
    )
    params: dict[str, JsonValue] = Field(
        default_factory=dict, description="The library's own, the objective among them."
    )
    n_estimators: int = Field(default=100, ge=1, description="Rounds of boosting.")
    weight_col: str | None = Field(default=None, description="Column of row weights.")
    base_margin_col: str | None = Field(default=None, description="Column of margins to boost from.")
    group_col: str | None = Field(default=None, description="Column of groups that stay together; ranking needs one.")
    early_stopping_rounds: int | None = Field(
        default=None, ge=1, description="Rounds without improvement to stop after."
    )
    user_code: str | None = Field(
        default=None, description="Where callbacks, objective and metrics lie, by value; an estimator writes them."
    )
    external_memory: bool | None = Field(
        default=None, description="Keep the quantised rows on the nodes' disks; none: where they do not fit in memory."
    )
    verbose_eval: bool | int | None = Field(default=None, description="Print metrics: True every round, n every n.")
    scaling_config: ScalingConfig = Field(default_factory=ScalingConfig, description="Workers and their size.")

    @classmethod
    def of_request(
        cls, request: TrainRequest, *, pool_name: str, tracked: bool, user_code: str | None = None
    ) -> JobSpec:
        """The job that does what an estimator asks of the engine.

        Args:
            request: What to train.
            pool_name: Where.
            tracked: Whether it makes a run in MLflow.
            user_code: Where the user's callbacks, objective and metrics lie.
        """
        return cls(
            framework=request.framework,
            dataset=request.dataset,
            input_cols=request.input_cols,
            label_col=request.label_col,
            categorical_cols=request.categorical_cols,
            eval_set=request.eval_sets,
            params=request.params,
            n_estimators=request.n_estimators,
            weight_col=request.weight_col,
            base_margin_col=request.base_margin_col,
            group_col=request.group_col,
            early_stopping_rounds=request.early_stopping_rounds,
            external_memory=request.external_memory,
            user_code=user_code,
            verbose_eval=request.verbose_eval,
            scaling_config=request.scaling,
            run_config=request.run_config.model_copy(update={"pool_name": pool_name}),
            tracking=Tracking() if tracked else None,
        )

    @field_validator("n_estimators", "early_stopping_rounds", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"a number is needed, not {str(value).lower()}")
        return value

    @field_validator("dataset", mode="before")
    @classmethod
    def _dataset(cls, value: Any) -> Any:
        return _as_dataset(value)

    @field_validator("eval_set", mode="before")
    @classmethod
    def _eval_sets(cls, value: Any) -> Any:
        if value is None:
            return {}
        if isinstance(value, DatasetSpec) or hasattr(value, "to_spec"):
            return {"eval": _as_dataset(value)}
        return {name: _as_dataset(item) for name, item in value.items()} if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        named = [
            *self.input_cols,
            self.label_col,
            *filter(None, (self.weight_col, self.base_margin_col, self.group_col)),
        ]
        if twice := sorted({name for name in named if named.count(name) > 1}):
            raise ValueError(f"a column may have only one role, and {', '.join(twice)} is named for two")
        if strange := [name for name in self.categorical_cols if name not in self.input_cols]:
            raise ValueError(f"categorical_cols names {', '.join(strange)}, which is not among input_cols")
        if self.early_stopping_rounds and not self.eval_set:
            raise ValueError("early_stopping_rounds needs an eval_set to watch")
        return self

    def inputs(self) -> Iterator[DatasetSpec]:
        """The datasets that it trains on or evaluates with."""
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

    def to_request(self) -> TrainRequest:
        """What the training engine is asked."""
        return TrainRequest(
            framework=self.framework,
            dataset=self.dataset,
            input_cols=self.input_cols,
            label_col=self.label_col,
            categorical_cols=self.categorical_cols,
            eval_sets=self.eval_set,
            n_estimators=self.n_estimators,
            params=self.params,
            weight_col=self.weight_col,
            base_margin_col=self.base_margin_col,
            group_col=self.group_col,
            early_stopping_rounds=self.early_stopping_rounds,
            external_memory=self.external_memory,
            verbose_eval=self.verbose_eval,
            scaling=self.scaling_config,
            run_config=self.run_config,
        )


def _said(place: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, place))}: {message}" if place else message


class ChampionResult(_Strict):
    """The champion that a challenger was compared to."""

    version: str = Field(description="Its version in the registry.")
    value: float = Field(description="Its metric on the holdout.")


class JobResult(_Strict):
    """What a job returns: small enough for an XCom, and without the credentials of its `artifact_location`."""

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
    rows: int | None = Field(description="Rows trained on; none: a function reads what it likes.")
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
        """Return it as plain data for an XCom, which is strict JSON: NaN is "NaN" and infinity "Infinity".

        ``JobResult.model_validate`` takes both back as floats.
        """
        plain: dict[str, Any] = from_json(to_json(self.model_dump(), inf_nan_mode="strings"))
        return plain

    @field_validator("model_path", "model_uri", "results_path")
    @classmethod
    def _without_credentials(cls, value: str | None) -> str | None:
        return value and redact_value(value)
