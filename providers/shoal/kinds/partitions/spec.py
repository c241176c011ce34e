"""Define the spec of a job that calls a function for each partition of a dataset."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from shoal.boosting_libraries import Framework
from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import InvalidArgumentError
from shoal.jobs.register import Register
from shoal.jobs.spec import AnyJobSpec
from shoal.option_validation import Settings, optional, positive_or_all
from shoal.training.boosting.request import TrainRequest
from shoal.training.cluster import Node, workers_on
from shoal.training.demand import GangClaim, GangDemand, ScalingConfig
from shoal.training.gang.placement import GangShape
from shoal.training.pytorch.program import is_name
from shoal.training.run_config import RunConfig

PARTITIONS: Final = "partitions"
"""Value of the field `framework` that marks the spec of a job that calls a function for each partition."""


class PartitionsScalingConfig(ScalingConfig):
    """Number of workers that process partitions, and the CPUs of each worker.

    Example:
        >>> PartitionsScalingConfig(num_workers=4)
    """

    num_workers: Annotated[int, positive_or_all("for one worker per CPU of the active nodes")] = Field(
        default=-1,
        description="Number of workers. -1: as many as have room on the active nodes, which is one per CPU if each "
        "worker has one CPU.",
    )
    num_cpu_per_worker: Annotated[int, Field(ge=1)] = Field(
        default=1,
        description="Number of CPUs, and also of threads, of each worker. A worker processes one partition at a time.",
    )
    use_gpu: Literal[False] | None = optional(
        "Partitions are processed on CPUs, so the only values are false and null."
    )


class PartitionEstimator(Settings):
    """Boosting model that is trained for each partition, as the plain library trains it in one process."""

    framework: Framework = Field(
        default="xgboost", description="Boosting library that trains the models: xgboost or lightgbm."
    )
    input_cols: tuple[str, ...] = Field(min_length=1, description="Names of the feature columns, in order.")
    label_col: str = Field(min_length=1, description="Name of the column that contains the labels.")
    weight_col: str | None = optional(
        "Name of the column that contains the weight of each row. None: all weights are equal."
    )
    params: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Parameters under the names that the boosting library defines, including the objective.",
    )
    n_estimators: int = Field(default=100, ge=1, description="Number of boosting rounds.")

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of all columns that the training uses."""
        return (*self.input_cols, self.label_col, *([self.weight_col] if self.weight_col else []))

    def request(self, dataset: DatasetSpec, run_config: RunConfig) -> TrainRequest:
        """Return the request of a training on the whole dataset, by which columns and parameters are checked."""
        return TrainRequest(**dict(self), dataset=dataset, run_config=run_config)


class PartitionsRegister(Register):
    """Options to register the models of all partitions as one model, which predicts each row with its partition's
    model."""

    label_col: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the holdout's column with the labels. None: that of `estimator`.",
    )
    input_cols: tuple[str, ...] = Field(
        default=(), description="Names of the feature columns. Empty: those of `estimator`."
    )

    @model_validator(mode="after")
    def _suits_partitions(self) -> Self:
        if self.ranks:
            raise ValueError("a ranking metric is not possible for models of partitions: choose another metric")
        if self.skip_if_unchanged:
            raise ValueError("skip_if_unchanged is not possible for models of partitions: omit it, or set it to false")
        return self


class PartitionsJobSpec(AnyJobSpec):
    """Spec of a job that calls a function for each partition of a dataset.

    Example:
        >>> PartitionsJobSpec(
        ...     function="forecasts.models:train",
        ...     dataset=DataConnector.from_parquet("s3://bucket/sales/"),
        ...     by="store",
        ... )
    """

    framework: Literal["partitions"] = Field(
        default=PARTITIONS, description="Kind of the job; the value marks a function that is called for each partition."
    )
    dataset: DatasetSpec = Field(
        description="Dataset that is divided into partitions; a DataConnector is accepted too."
    )
    by: tuple[str, ...] = Field(
        min_length=1,
        description="Name of the column whose values divide the rows into partitions, or the names of several columns. "
        "The rows with a null are a partition of their own, whose key is null.",
    )
    function: str | None = optional(
        "Import name of the function as pkg.module:name; the nodes must have the module installed. The "
        "function is called with the rows of a partition, a pandas DataFrame, and with its key. None: `program` has "
        "the function."
    )
    kwargs: dict[str, JsonValue] = Field(
        default_factory=dict, description="Keyword arguments of the function in `function`."
    )
    program: str | None = optional(
        "Path of the file with the pickled function; `shoal.many` sets the path. None: `function` names the function."
    )
    code_digest: str | None = optional("Digest of the code in `program`; `shoal.many` sets it.")
    estimator: PartitionEstimator | None = optional(
        "Boosting model that is trained for each partition. None: a function is called."
    )
    name: str = Field(default="function", description="Name of the function, for messages and lists of jobs.")
    columns: tuple[str, ...] | None = optional(
        "Names of the columns that the function gets, in order; the columns of `by` need not be among "
        "them. None: all columns."
    )
    register_as: PartitionsRegister | None = Field(
        default=None,
        alias="register",
        description="Options to register the models of all partitions in MLflow as one version, which predicts each "
        "row with the model of its partition. A partition whose training has failed keeps the model of the champion. "
        "None: the models are not registered.",
    )
    partition_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Maximum time in seconds that the function may take for one partition. A partition that takes "
        "longer fails. None: no limit.",
    )
    max_failed: int | float | None = Field(
        default=0,
        description="Number of partitions that may fail, or their share, such as 0.05; 1.0 is the share of all. If "
        "more fail, the job fails after all results are stored: the registered version waits for a decision, and a "
        "further attempt repeats only the failed partitions. None: no limit, as in `shoal.many`, whose results have "
        "`require_all`. If all partitions fail, the job always fails.",
    )
    scaling_config: PartitionsScalingConfig = Field(
        default_factory=PartitionsScalingConfig, description="Number of workers, and the CPUs of each worker."
    )

    refused_by_for_each: ClassVar[str] = (
        "this spec already divides its dataset into partitions: name further columns in its option by"
    )
    exchanges_files: ClassVar[bool] = True
    forks_workers: ClassVar[bool] = True

    @field_validator("by", "columns", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("max_failed", mode="before")
    @classmethod
    def _number_or_share(cls, value: Any) -> Any:
        with suppress(ValueError):  # the command line and templates give texts
            value = json.loads(value) if isinstance(value, str) else value
        is_share = isinstance(value, float) and 0 <= value <= 1
        if value is None or is_share or (type(value) is int and value >= 0):
            return value
        raise ValueError("use a number of partitions, such as 3, or their share, such as 0.05 (1.0: all partitions)")

    @field_validator("scaling_config", mode="before")
    @classmethod
    def _of_any_class(cls, value: Any) -> Any:
        is_other = isinstance(value, ScalingConfig) and not isinstance(value, PartitionsScalingConfig)
        return value.model_dump(exclude_unset=True) if is_other else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for option, names in (("by", self.by), ("columns", self.columns or ())):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{option} names a column twice: {', '.join(twice)}")
        if [self.function, self.program, self.estimator].count(None) != 2:
            raise ValueError(
                "give function (a function's name, as pkg.module:name), estimator (a boosting model) or program (the "
                "path of a pickled function): exactly one of them is required"
            )
        if self.estimator is not None:
            self.estimator.request(self.dataset, self.run_config)  # checks the fields together
        if self.function is not None and not is_name(self.function):
            raise InvalidArgumentError(f'function must look like pkg.module:name, not "{self.function}"')
        if self.function is None and self.kwargs:
            raise ValueError("kwargs can be given only with function: remove kwargs")
        if self.estimator is not None and self.columns is not None:
            raise ValueError(
                "columns can be given only with a function, because estimator names its columns: remove it"
            )
        if self.label_col in self.by:
            raise ValueError(
                f'by names the label column "{self.label_col}": the rows of a partition would all have the same label, '
                "so that there is nothing to learn. Divide the rows by another column"
            )
        if self.register_as is not None and not (self.label_col and self.input_cols):
            raise ValueError(
                "register needs the columns of the models: set register.label_col and register.input_cols, or train "
                "with an estimator"
            )
        return self

    @property
    def label_col(self) -> str | None:
        """Return the column of the labels of the models to register."""
        chosen = self.register_as.label_col if self.register_as else None
        return chosen or (self.estimator.label_col if self.estimator else None)

    @property
    def input_cols(self) -> tuple[str, ...]:
        """Return the feature columns of the models to register."""
        chosen = self.register_as.input_cols if self.register_as else ()
        return chosen or (self.estimator.input_cols if self.estimator else ())

    @property
    def function_name(self) -> str:
        """Return the name of the function, for messages."""
        return self.function or (self.estimator.framework if self.estimator else self.name)

    def trainings(self) -> Iterator[TrainRequest]:
        """Yield the training of the estimator on the whole dataset."""
        if self.estimator is not None:
            yield self.estimator.request(self.dataset, self.run_config)

    def _named_columns(self) -> Sequence[str] | None:
        """Return the columns of the keys and of the function or the estimator."""
        named = self.estimator.columns if self.estimator else self.columns
        return None if named is None else (*self.by, *named, *self.input_cols)

    def has_failed(self, counts: Mapping[str, int]) -> bool:
        """Return whether more partitions have failed than `max_failed` allows, from their numbers by status."""
        total = sum(counts.values())
        allowed = total if self.max_failed is None else self.max_failed
        return counts["failed"] > (allowed if isinstance(allowed, int) else allowed * total)

    def _subject(self) -> str:
        """Return the function and the columns of the keys."""
        return f"{self.function_name} by {', '.join(self.by)}"

    def demand(self) -> GangDemand:
        """Return what the workers need: without a number, as many as have room."""
        gang = self.scaling_config.gang(use_gpu=False)

        def fill(nodes: Sequence[Node], *, clamp: bool) -> GangShape:
            room = sum(workers_on(node, gang.cpus, 0) for node in nodes)
            return replace(gang, workers=max(1, room)).size(nodes, clamp=clamp)

        claimed, size = (GangClaim(), fill) if gang.workers == -1 else (gang, gang.size)
        return GangDemand(claimed, size, self.run_config, (self.dataset,))
