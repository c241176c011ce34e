"""Define the request for a boosting training and its result, as data that can be stored as JSON with a job."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from shoal.boosting_libraries import Framework, loaded
from shoal.data.checks import check_roles
from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import InvalidArgumentError
from shoal.option_validation import Settings, optional
from shoal.training.boosting.messages import Boosted, Columns, History
from shoal.training.boosting.params import Direction, json_params
from shoal.training.demand import GangDemand, ScalingConfig, gpu_wish
from shoal.training.run_config import RunConfig
from shoal.training.tracking import absolute_model, check_model_version

_FLOAT32_MAX = 3.4028234663852886e38


class TrainRequest(Settings):
    """Request for a boosting training: the datasets, the parameters, and the number and size of the workers.

    The estimators create this request. The spec of a job contains these fields and others.
    """

    framework: Framework = Field(
        default="xgboost", description="Boosting library that trains the model: xgboost or lightgbm."
    )
    dataset: DatasetSpec = Field(
        description="Dataset that the model is trained on. A `DataConnector` is accepted and converted to its spec."
    )
    input_cols: tuple[str, ...] = Field(
        min_length=1, description="Names of the feature columns, in the order in which the model uses them."
    )
    label_col: str = Field(
        min_length=1,
        description="Name of the column that contains the labels. If it is omitted, it is the first of label_cols, or "
        "label_lower_bound_col.",
    )
    label_cols: tuple[str, ...] = Field(
        default=(),
        description="Names of several label columns, for one XGBoost model with an output per column, in this order. "
        "The default is the single column label_col.",
    )
    label_lower_bound_col: str | None = optional(
        "Name of the column that contains the lower bound of each label, at least 0, for XGBoost's "
        "objective survival:aft. None: the labels have no bounds."
    )
    label_upper_bound_col: str | None = optional(
        "Name of the column that contains the upper bound of each label, for XGBoost's objective "
        "survival:aft: the lower bound if the label is known, or infinity if it is only known to be larger. None: the "
        "labels have no bounds."
    )
    categorical_cols: tuple[str, ...] = Field(
        default=(),
        description="Names of the feature columns whose values are categories: text, whole numbers or booleans. The "
        "default is no categorical column.",
    )
    eval_set: dict[str, DatasetSpec] = Field(
        default_factory=dict,
        description="Datasets, by name, on which the metrics are evaluated after each round. A single dataset gets "
        'the name "eval". The default is no evaluation.',
    )
    params: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Parameters under the names that the boosting library defines, including the objective.",
    )
    n_estimators: int = Field(default=100, ge=1, description="Number of boosting rounds.")
    weight_col: str | None = optional(
        "Name of the column that contains the weight of each row. None: all rows have the same weight."
    )
    base_margin_col: str | None = optional(
        "Name of the column that contains the score (margin) of each row from which boosting starts. "
        "None: all rows start from the same score."
    )
    base_margin_cols: tuple[str, ...] = Field(
        default=(),
        description="Names of the columns that contain the scores (margins) of each row from which boosting starts, "
        "for a model with several outputs: one column per class, in the order of the classes. The default is no such "
        "column.",
    )
    group_col: str | None = optional(
        "Name of the column that assigns each row to a group, such as a query. All rows of a group stay "
        "on one worker. A ranking objective needs this column. None: the rows have no groups."
    )
    init_model: str | None = Field(
        default=None,
        min_length=1,
        description="Model from which the training continues with `n_estimators` further rounds: models:/NAME@ALIAS, "
        "models:/NAME/VERSION, runs:/..., or the path or URI of a file that the library has written. A relative path "
        "starts at the working directory of the process that submits the job. None: the training starts anew.",
    )
    early_stopping_rounds: int | None = Field(
        default=None,
        ge=1,
        description="Number of rounds. The training stops when the last metric of the last eval set has not improved "
        "for this many rounds. LightGBM skips the training set if it is one of the eval sets. None: the training does "
        "not stop early.",
    )
    direction: Direction | None = Field(
        default=None,
        # A version of shoal that does not know this field can still read a spec that does not use it.
        exclude_if=lambda value: value is None,
        description="Whether early stopping minimizes or maximizes the metric: minimize or maximize. None: as the "
        "metric demands. Only a custom_metric of XGBoost, which does not tell it, needs this.",
    )
    missing: float | None = optional(
        "Value of the numeric features that counts as missing, as nulls and NaN do, such as -999. The "
        "model stores the value, so that predictions use it, too. Only with XGBoost. None: only nulls and NaN are "
        "missing."
    )
    feature_weights: dict[str, float] | tuple[float, ...] = Field(
        default=(),
        description="Weights with which XGBoost samples features, if a parameter colsample_* is below 1: one weight "
        "per feature in the order of input_cols, or a mapping from names to weights, in which all other features have "
        "the weight 1. The default is the same weight for all features.",
    )
    external_memory: bool | None = optional(
        "Whether XGBoost keeps the quantised rows (the rows after conversion to histogram bins) on the "
        "nodes' disks. None: only if the rows do not fit in memory."
    )
    verbose_eval: bool | Annotated[int, Field(ge=0)] | None = optional(
        "How often the metrics are printed: True prints them after every round, a number n after every n "
        "rounds. False, 0 and None print no metrics."
    )
    scaling_config: ScalingConfig = Field(
        default_factory=ScalingConfig, description="Number of workers, and the CPUs and GPUs of each worker."
    )
    run_config: RunConfig = Field(
        default_factory=RunConfig, description="Name of the pool that runs the training, and the limits of the run."
    )

    @model_validator(mode="before")
    @classmethod
    def _first_label(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping) or fields.get("label_col") is not None:
            return fields
        several = fields.get("label_cols")
        label = several[0] if isinstance(several, list | tuple) and several else fields.get("label_lower_bound_col")
        return {**fields, "label_col": label} if label else fields

    @field_validator("n_estimators", "early_stopping_rounds", "missing", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("must be a number, not True or False")
        return value

    @field_validator("missing")
    @classmethod
    def _missing(cls, value: float | None) -> float | None:
        if value is None or math.isnan(value):
            return None
        if abs(value) > _FLOAT32_MAX:
            raise ValueError(
                f"must be a number between {-_FLOAT32_MAX:.7g} and {_FLOAT32_MAX:.7g}, because XGBoost reads features "
                "as float32: write such values as nulls"
            )
        return value

    @field_validator("feature_weights", mode="before")
    @classmethod
    def _weights(cls, value: Any) -> Any:
        # NumPy arrays are accepted, too.
        value = () if value is None else value.tolist() if hasattr(value, "tolist") else value
        if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
            raise ValueError("must be a list of one weight per feature, or a mapping from names to weights")
        return value

    @field_validator("params", mode="before")
    @classmethod
    def _json_params(cls, value: Any) -> Any:
        return json_params(value) if isinstance(value, Mapping) else value

    @field_validator("eval_set", mode="before")
    @classmethod
    def _eval_set(cls, value: Any) -> Any:
        if value is None:
            return {}
        # A dict has the datasets by name, or the fields of one.
        is_one = isinstance(value, Mapping) and isinstance(value.get("paths") or value.get("sql"), Sequence)
        return {"eval": value} if is_one or isinstance(value, DatasetSpec) or hasattr(value, "to_spec") else value

    @field_validator("init_model")
    @classmethod
    def _named_model(cls, model: str | None) -> str | None:
        if model is None:
            return None
        check_model_version(model)
        return absolute_model(model)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.base_margin_col is not None and self.base_margin_cols:
            raise ValueError("base_margin_col and base_margin_cols are both set: name all columns in base_margin_cols")
        if (self.label_lower_bound_col is None) != (self.label_upper_bound_col is None):
            raise ValueError("label_lower_bound_col and label_upper_bound_col need each other: set both or none")
        if self.label_cols and (self.label_cols[0] != self.label_col or self.bound_cols):
            raise ValueError(
                "label_cols names all label columns of the model: remove "
                + ("the bounds of the labels" if self.bound_cols else f"label_col={self.label_col!r}")
            )
        extra = [*self.extra_cols, *([self.group_col] if self.group_col else [])]
        check_roles(self.input_cols, self.label_col, self.categorical_cols)
        loaded(self.framework).check_request(self)
        self._check_feature_weights()
        roles = [*self.input_cols, self.label_col, *extra]
        if twice := sorted({name for name in roles if roles.count(name) > 1}):
            raise ValueError(
                "a column may have only one role (feature, label, bound, weight, margin or group), but these "
                f"columns have more than one: {', '.join(twice)}"
            )
        if self.early_stopping_rounds and not self.eval_set:
            raise ValueError("early_stopping_rounds needs an eval_set: add one, or remove early_stopping_rounds")
        return self

    def _check_feature_weights(self) -> None:
        given = self.feature_weights
        if isinstance(given, dict):
            if unknown := [name for name in given if name not in self.input_cols]:
                raise ValueError(
                    f'feature_weights names "{unknown[0]}", which is not among input_cols: add it to input_cols, or '
                    "remove it from feature_weights"
                )
        elif given and len(given) != len(self.input_cols):
            raise ValueError(
                f"feature_weights has {len(given)} weights, but input_cols has {len(self.input_cols)} columns: give "
                "one weight per column, or a mapping from names to weights"
            )
        weights = self.weights_of_features
        for name, weight in zip(self.input_cols, weights, strict=False):
            if not 0 <= weight < math.inf:
                raise ValueError(f'feature_weights of "{name}" is {weight}: a weight must be finite and at least 0')
        if weights and not any(weights):
            raise ValueError("feature_weights are 0 for all features: give at least one feature a weight above 0")

    @property
    def weights_of_features(self) -> tuple[float, ...]:
        """One weight per feature, in the order of `input_cols`, from `feature_weights`; empty without weights."""
        given = self.feature_weights
        if isinstance(given, dict):
            return tuple(given.get(name, 1.0) for name in self.input_cols) if given else ()
        return given

    @property
    def columns(self) -> Columns:
        """Names of the columns that the training uses, by role: feature, label, bound, weight, margin or group."""
        return Columns(
            self.input_cols,
            self.label_col,
            self.weight_col,
            self.margin_cols,
            self.group_col,
            bounds=self.bound_cols,
            other_labels=self.label_cols[1:],
        )

    @property
    def bound_cols(self) -> tuple[str, ...]:
        """Names of the columns of the labels' lower and upper bounds; empty without bounds."""
        lower, upper = self.label_lower_bound_col, self.label_upper_bound_col
        return () if lower is None or upper is None else (lower, upper)

    @property
    def margin_cols(self) -> tuple[str, ...]:
        """Names of the columns of margins, from `base_margin_col` or `base_margin_cols`."""
        return self.base_margin_cols if self.base_margin_col is None else (self.base_margin_col,)

    @property
    def extra_cols(self) -> tuple[str, ...]:
        """Names of the weight, margin and bound columns and of further labels, without the first label column."""
        bounds = self.bound_cols[1:] if self.label_lower_bound_col == self.label_col else self.bound_cols
        return (
            *([] if self.weight_col is None else [self.weight_col]),
            *self.margin_cols,
            *bounds,
            *self.label_cols[1:],
        )

    def demand(self) -> GangDemand:
        """Return what the training needs of its pool's nodes."""
        return self.demand_of(self.scaling_config)

    def demand_of(self, scaling: ScalingConfig) -> GangDemand:
        """Return what workers of another number and size, such as those of a search, need for this training."""
        inputs = (self.dataset, *self.eval_set.values())
        library = loaded(self.framework)
        wish = gpu_wish(scaling, library.device(self))
        if wish is None and not library.gpus_by_default:
            wish = False
        gang = scaling.gang(use_gpu=wish)
        return GangDemand(
            gang,
            # A worker reads its datasets one after the other.
            partial(gang.size, ray_streams=int(any(each.ingester == "ray" for each in inputs))),
            self.run_config,
            inputs,
            # Only an import of XGBoost, which takes a second, shows whether it was built with CUDA.
            why_cpu=library.why_cpu if importlib.util.find_spec(self.framework) else lambda: None,
        )

    def check_margins(self, outputs: int) -> None:
        """Check that there is one column of margins per output of the model, if there are margins.

        Raises:
            InvalidArgumentError: The number of columns is wrong.
        """
        if self.margin_cols and len(self.margin_cols) != outputs:
            raise InvalidArgumentError(
                f"the model has {outputs} output(s) per row and needs as many columns of margins, but the number given "
                f"is {len(self.margin_cols)} ({', '.join(self.margin_cols)}): name one column per output in "
                "base_margin_cols, or the only column in base_margin_col"
            )


class WorkerStats(BaseModel):
    """Statistics of one worker: number of rows, times and memory. Each worker measures times with its own clock."""

    model_config = ConfigDict(frozen=True)

    rank: int = Field(description="Rank of the worker in the gang, from 0.")
    node: str = Field(description="Name of the node that the worker ran on.")
    rows: int = Field(description="Number of rows that the worker trained on.")
    passes: int = Field(
        description="Number of times that the worker decoded its training rows before the first round. The number is "
        "1 if the decoded rows fit in memory. Otherwise XGBoost needs 4 passes, or 3 with external "
        "memory, and LightGBM needs 2."
    )
    external_memory: bool = Field(default=False, description="Whether the worker kept its quantised rows on disk.")
    read_seconds: float = Field(description="Seconds that the worker spent reading and decoding rows.")
    quantise_seconds: float = Field(
        description="Seconds that the worker spent building the quantised matrices, including the time spent waiting "
        "for other workers."
    )
    train_seconds: float = Field(description="Seconds that the worker spent training and evaluating.")
    idle_rss_bytes: int = Field(
        description="Resident memory of the worker's process, in bytes, before the worker read any data."
    )
    peak_rss_bytes: int = Field(
        description="Highest resident memory of the worker's process during this training, in bytes."
    )
    predicted_bytes: int = Field(
        default=0, description="Highest resident memory that shoal had predicted for the worker's process, in bytes."
    )
    limit_bytes: int = Field(
        default=0,
        description="Largest resident memory that the worker's process could have, in bytes: its share of the free "
        "memory of its node, container and process when the training began.",
    )

    def after(self, boosted: Boosted) -> WorkerStats:
        """Return the statistics after a further segment (group of rounds)."""
        seconds = self.train_seconds + boosted.train_seconds
        peak = max(self.peak_rss_bytes, boosted.peak_rss_bytes)
        return self.model_copy(update={"train_seconds": seconds, "peak_rss_bytes": peak})


class TrainResult(BaseModel):
    """Result of a boosting training: the model, its metrics, and the statistics of the training and of each worker."""

    # A metric may be NaN, such as the AUC of an eval set that contains only one class. JSON has no value for NaN, so
    # NaN and infinity are written as strings.
    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings")

    framework: Framework = Field(default="xgboost", description="Boosting library that trained the model.")
    model: bytes = Field(description="The trained model: UBJSON for XGBoost, text for LightGBM.")
    params: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="The user's parameters of the training.",
    )
    eval_results: History = Field(
        description="Values of the metrics after each round of this training: eval set -> metric -> one value per "
        "round."
    )
    init_rounds: int = Field(
        default=0,
        description="Number of rounds in the model from which the training continued; 0 if it started anew.",
    )
    best_iteration: int | None = optional(
        "Number of the best round, from 0, if the training used early stopping; otherwise None. The rounds "
        "of the model from which the training continued count, too."
    )
    best_score: float | None = optional(
        "Value of the metric in the best round, if the training used early stopping; otherwise None."
    )
    rounds: int = Field(description="Number of boosting rounds in the model.")
    rows: int = Field(description="Number of rows that the model was trained on.")
    num_workers: int = Field(description="Number of workers that trained the model.")
    threads_per_worker: int = Field(description="Number of threads of each worker.")
    seconds: float = Field(description="Time in seconds from the call of the training to its result.")
    restarts: int = Field(
        default=0, description="Number of times that the training continued from a checkpoint after a worker was lost."
    )
    workers: tuple[WorkerStats, ...] = Field(description="Statistics of each worker, ordered by rank.")

    @property
    def final_round(self) -> int:
        """Position, in the lists of `eval_results`, of the best round; without early stopping, of the last round."""
        return -1 if self.best_iteration is None else self.best_iteration - self.init_rounds

    def booster(self) -> Any:
        """Load the trained model into an object of the boosting library."""
        return loaded(self.framework).load(self)
