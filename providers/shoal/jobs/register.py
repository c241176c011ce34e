"""Define the options to register a model in MLflow, and to promote it to champion."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import InvalidArgumentError
from shoal.models.metrics import Mode, Takes, best_mode, metric_named
from shoal.option_validation import Settings, optional

DEFAULT_ALIAS = "champion"
"""Alias that marks the champion, unless the options of the job name another alias."""

_MODEL_NAME = re.compile(r"[^/:]{1,250}")
_ALIAS = re.compile(r"(?!v\d+$|latest$)[A-Za-z0-9_-]{1,255}", re.IGNORECASE)


class Register(Settings):
    """Options to register the trained model in MLflow, and the rules by which the model becomes the champion.

    The champion is the registered version that has the alias, and the challenger is the model that the job has trained.
    """

    model: str = Field(description="Name of the model in MLflow's registry under which the job registers a version.")
    alias: str = Field(
        default=DEFAULT_ALIAS,
        description="Alias in MLflow's registry that marks the champion, which is the version in use. A promotion "
        "moves the alias to the new version.",
    )
    metric: str = Field(
        description="Metric that decides whether the challenger replaces the champion: rmse, mae, logloss, error, auc, "
        "accuracy, ndcg@10, mean_pinball_loss@0.9, or another metric of scikit-learn by its name, such as f1_macro."
    )
    mode: Mode | None = optional(
        'Whether a lower ("min") or a higher ("max") value of the metric is better. None: the metric '
        "determines the direction; any other value must agree with the metric."
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
        description="Largest amount by which the challenger's metric on a slice may be worse than the champion's, in "
        "the metric's own unit. None: slices do not affect the decision.",
    )
    min_slice_rows: int = Field(
        default=30,
        ge=1,
        description="Number of rows that a slice needs to affect the decision. A slice with fewer rows is reported "
        "only, because its metric is mostly noise.",
    )
    overlap: Literal["refuse", "flag"] = Field(
        default="refuse",
        description="Reaction if rows of the holdout are also in the training data, or if both have the same time "
        "column and their time ranges overlap. Rows on which a search chooses the parameters count as training data. "
        "refuse: the job fails. flag: the job goes on and reports the overlap.",
    )
    late_run: Literal["compare", "keep", "replace"] = Field(
        default="compare",
        description="Rule for a champion that was trained on newer rows than the challenger, for example because an "
        "older interval is run again; both datasets need a time column. compare: the models are compared on the rows "
        "of the holdout that neither was trained on, and if these are too few, the champion stays. keep: the champion "
        "stays without a comparison. replace: as compare, but if the rows are too few, a challenger that beats the "
        "baseline replaces the champion.",
    )
    skip_if_unchanged: bool | None = optional(
        "Whether to skip the training if its rows, holdout and settings are those of the newest registered version. "
        "None: the tasks of Airflow and Prefect skip such a training, and other submitters do not."
    )

    promote: bool = Field(
        default=True,
        # A version of shoal that does not know this field can still read a spec that does not use it, and the spec's
        # fingerprint stays the same.
        exclude_if=bool,
        description="Whether the job promotes the new version if it is better than the champion. False: the job "
        "registers and evaluates the version, and the alias stays where it is until `promote_model` is called for the "
        "version, for example when a person has approved it.",
    )
    category_codes: bool = Field(
        default=False,
        description="Whether the holdout contains the integer codes on which the champion was trained, for categorical "
        "columns whose categories the champion does not contain. Only a champion that another program trained needs "
        "this.",
    )

    @model_validator(mode="after")
    def _legal(self) -> Self:
        if not _MODEL_NAME.fullmatch(self.model):
            raise InvalidArgumentError(
                f'model "{self.model}" is not a legal name: use 1 to 250 characters without "/" and ":"'
            )
        if not _ALIAS.fullmatch(self.alias):
            raise InvalidArgumentError(
                f'alias "{self.alias}" is not legal: use letters, digits, "_" and "-", but neither the name "latest" '
                'nor a version such as "v1"'
            )
        for metric in self.all_metrics:
            best_mode(metric)
        if self.mode not in (None, self.best):
            raise ValueError(
                f'mode="{self.mode}" contradicts metric="{self.metric}", whose best value is the {self.best}imum: '
                "leave mode out"
            )
        if self.slice_tolerance is not None and self.by is None:
            raise ValueError(
                'slice_tolerance needs the option "by" as well: set "by" to the name of the column whose values divide '
                "the holdout into slices"
            )
        if not self.promote and self.holdout.staging is not None and not self.holdout.is_copied:
            raise ValueError(
                "promote=false needs a holdout that exists until the promotion, but rows that are copied for a job, as "
                "those of a DataFrame, are removed when the job ends: write them to Parquet files, and pass "
                "DataConnector.from_parquet(...) as holdout, or name a query with sql and connection"
            )
        return self

    @property
    def best(self) -> Mode:
        """Return "min" if a lower value of the metric is better, and "max" if a higher value is better."""
        return best_mode(self.metric)

    @property
    def all_metrics(self) -> tuple[str, ...]:
        """Return the names of the deciding metric and of the metrics that are only reported, without duplicates."""
        return tuple(dict.fromkeys((self.metric, *self.metrics)))

    @property
    def ranks(self) -> bool:
        """Return whether one of the metrics is a ranking metric, which needs the option `group_col`."""
        return any(metric_named(metric).takes is Takes.RANKS for metric in self.all_metrics)
