"""What is asked of a boosting library and what it answers: plain data, so that a job can carry both as JSON."""

from __future__ import annotations

import importlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from shoal.data.spec import DatasetSpec
from shoal.redaction import RedactedRepr
from shoal.training.boosting.rows import Columns
from shoal.training.boosting.task import History
from shoal.training.run_config import RunConfig
from shoal.training.scaling import ScalingConfig

Framework = Literal["xgboost", "lightgbm"]
"""What boosts."""


class TrainRequest(RedactedRepr, BaseModel):
    """One training."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    framework: Framework = Field(default="xgboost", description="What trains.")
    dataset: DatasetSpec = Field(description="Rows to train on.")
    input_cols: tuple[str, ...] = Field(min_length=1, description="Feature columns, in the order the model takes them.")
    label_col: str = Field(description="Label column.")
    categorical_cols: tuple[str, ...] = Field(
        default=(), description="Those of the feature columns whose values are categories, not quantities."
    )
    eval_sets: dict[str, DatasetSpec] = Field(
        default_factory=dict, description="Rows to evaluate on after each round, by name."
    )
    n_estimators: int = Field(default=100, ge=1, description="Rounds of boosting.")
    params: dict[str, JsonValue] = Field(
        default_factory=dict, description="The library's own parameters, the objective among them."
    )
    weight_col: str | None = Field(default=None, description="Column of row weights.")
    base_margin_col: str | None = Field(default=None, description="Column of margins to boost from.")
    group_col: str | None = Field(
        default=None, description="Column of groups, such as queries, that stay together; ranking needs one."
    )
    early_stopping_rounds: int | None = Field(
        default=None,
        ge=1,
        description="Stop when the last metric of the last eval set has not improved for so many rounds.",
    )
    external_memory: bool | None = Field(
        default=None, description="Keep the quantised rows on the nodes' disks; None: where they do not fit in memory."
    )
    verbose_eval: bool | Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Print the metrics: True every round, n every n rounds."
    )
    scaling: ScalingConfig = Field(default_factory=ScalingConfig, description="How many workers of which size.")
    run_config: RunConfig = Field(default_factory=RunConfig, description="Where and under which limits it runs.")

    @property
    def columns(self) -> Columns:
        """What the columns are for."""
        return Columns(self.input_cols, self.label_col, self.weight_col, self.base_margin_col, self.group_col)

    @property
    def extra_cols(self) -> tuple[str, ...]:
        """The columns beside features and label."""
        return tuple(column for column in (self.weight_col, self.base_margin_col) if column is not None)


class WorkerStats(BaseModel):
    """What one worker did, by its own clock."""

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
    """A trained model and how it came about."""

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
        """Loads the model.

        Returns:
            An ``xgboost.Booster`` or ``lightgbm.Booster``, as the library's own ``train`` returns it.
        """
        library = importlib.import_module(f"shoal.training.{self.framework}.model")
        return library.load(self.model, self.best_iteration)
