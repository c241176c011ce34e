"""The request to a boosting library and its result: plain data, so that a job can carry both as JSON."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from shoal.data.checks import check_roles
from shoal.data.spec import DatasetSpec, as_dataset_spec
from shoal.settings import Settings
from shoal.training.boosting.rows import Columns
from shoal.training.boosting.task import History
from shoal.training.run_config import RunConfig
from shoal.training.scaling import ScalingConfig

Framework = Literal["xgboost", "lightgbm"]
"""Boosting library."""


class TrainRequest(Settings):
    """What a boosting library is to train, and how: the estimators build one, and a job's spec extends it."""

    framework: Framework = Field(default="xgboost", description="Library that trains.")
    dataset: DatasetSpec = Field(description="Rows to train on; a `DataConnector` is accepted.")
    input_cols: tuple[str, ...] = Field(min_length=1, description="Feature columns, in the order the model takes them.")
    label_col: str = Field(min_length=1, description="Label column.")
    categorical_cols: tuple[str, ...] = Field(
        default=(), description="Feature columns whose values are categories: text, whole numbers or booleans."
    )
    eval_set: dict[str, DatasetSpec] = Field(
        default_factory=dict,
        description='Rows to evaluate on after each round, by name; a single dataset is called "eval".',
    )
    params: dict[str, JsonValue] = Field(
        default_factory=dict, description="The library's own parameters, the objective among them."
    )
    n_estimators: int = Field(default=100, ge=1, description="Rounds of boosting.")
    weight_col: str | None = Field(default=None, description="Column of row weights.")
    base_margin_col: str | None = Field(default=None, description="Column of margins to boost from.")
    group_col: str | None = Field(
        default=None, description="Column of groups, such as queries, whose rows stay together; ranking needs one."
    )
    early_stopping_rounds: int | None = Field(
        default=None,
        ge=1,
        description="Stop when the last metric of the last eval set has not improved for this many rounds.",
    )
    external_memory: bool | None = Field(
        default=None,
        description="Keep the quantised rows on the nodes' disks; None: only where they do not fit in memory.",
    )
    verbose_eval: bool | Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Print the metrics: True every round, n every n rounds."
    )
    scaling_config: ScalingConfig = Field(default_factory=ScalingConfig, description="Number and size of the workers.")
    run_config: RunConfig = Field(default_factory=RunConfig, description="Pool to run on, and the limits of the run.")

    @field_validator("n_estimators", "early_stopping_rounds", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("a number is needed, not a truth value")
        return value

    @field_validator("input_cols", "categorical_cols", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f'a list of column names is needed: ["{value}"]')
        return value

    @field_validator("dataset", mode="before")
    @classmethod
    def _dataset(cls, value: Any) -> Any:
        return as_dataset_spec(value)

    @field_validator("eval_set", mode="before")
    @classmethod
    def _eval_set(cls, value: Any) -> Any:
        if value is None:
            return {}
        if isinstance(value, DatasetSpec) or hasattr(value, "to_spec"):
            return {"eval": as_dataset_spec(value)}
        return {name: as_dataset_spec(item) for name, item in value.items()} if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        extra = [name for name in (self.weight_col, self.base_margin_col, self.group_col) if name]
        check_roles(self.input_cols, self.label_col, extra, self.categorical_cols)
        roles = [*self.input_cols, self.label_col, *extra]
        if twice := sorted({name for name in roles if roles.count(name) > 1}):
            raise ValueError(f"a column may have only one role, and {', '.join(twice)} is named for two")
        if self.early_stopping_rounds and not self.eval_set:
            raise ValueError("early_stopping_rounds needs an eval_set to watch")
        return self

    @property
    def columns(self) -> Columns:
        """Roles of the columns."""
        return Columns(self.input_cols, self.label_col, self.weight_col, self.base_margin_col, self.group_col)

    @property
    def extra_cols(self) -> tuple[str, ...]:
        """The columns beside features and label."""
        return tuple(column for column in (self.weight_col, self.base_margin_col) if column is not None)


class WorkerStats(BaseModel):
    """Statistics of one worker, in seconds of its own clock."""

    model_config = ConfigDict(frozen=True)

    rank: int = Field(description="Rank of the worker.")
    node: str = Field(description="Node that it ran on.")
    rows: int = Field(description="Rows that it trained on.")
    passes: int = Field(
        description="How often it decoded its training rows before the first round: 1 where they were kept, else 4 "
        "(from external memory 3; LightGBM: 2)."
    )
    external_memory: bool = Field(default=False, description="Whether its quantised rows were on disk.")
    read_seconds: float = Field(description="Seconds spent reading and decoding.")
    quantise_seconds: float = Field(
        description="Seconds spent building the quantised matrices, waiting for peers included."
    )
    train_seconds: float = Field(description="Seconds spent boosting and evaluating.")
    idle_rss_bytes: int = Field(description="Resident size of its process before it read anything.")
    peak_rss_bytes: int = Field(description="Highest resident size of its process during this training.")


class TrainResult(BaseModel):
    """Trained model and training statistics."""

    # A metric may be NaN, such as the AUC of a set of one class; JSON itself has no word for it.
    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings")

    framework: Framework = Field(default="xgboost", description="What trained.")
    model: bytes = Field(description="The booster: UBJSON of XGBoost, text of LightGBM.")
    eval_results: History = Field(description="Eval set -> metric -> value per round.")
    best_iteration: int | None = Field(default=None, description="Best round, from 0, with early stopping; else None.")
    best_score: float | None = Field(
        default=None, description="Metric of the best round, with early stopping; else None."
    )
    rounds: int = Field(description="Rounds of boosting in the model.")
    rows: int = Field(description="Rows trained on.")
    num_workers: int = Field(description="Workers that trained.")
    threads_per_worker: int = Field(description="Threads of each.")
    seconds: float = Field(description="Seconds from the call to the result.")
    restarts: int = Field(default=0, description="How often it went on from a checkpoint after a loss.")
    workers: tuple[WorkerStats, ...] = Field(description="What each worker did, by rank.")

    def booster(self) -> Any:
        """Load the model.

        Returns:
            An ``xgboost.Booster`` or ``lightgbm.Booster``, as the library's own ``train`` returns it.
        """
        library = importlib.import_module(f"shoal.training.{self.framework}.model")
        return library.load(self.model, self.best_iteration)
