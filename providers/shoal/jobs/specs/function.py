"""Define the spec of a job that runs a training function or script, and parse specs of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Self, get_args

from pydantic import Field, JsonValue, model_validator

from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import InvalidArgumentError
from shoal.jobs.specs.base import AnySpec
from shoal.jobs.specs.partitions import PARTITIONS, PartitionsJobSpec
from shoal.jobs.specs.prediction import PREDICT, PredictJobSpec
from shoal.jobs.specs.register import Register
from shoal.jobs.specs.training import JobSpec
from shoal.jobs.specs.tuning import TUNE, TuneJobSpec
from shoal.option_validation import unknown_value
from shoal.redaction import redact
from shoal.training.boosting.request import Framework
from shoal.training.pytorch.program import FRAMEWORK, is_name
from shoal.training.pytorch.request import FunctionRequest


class FunctionRegister(Register):
    """Options to register the model that a training function logs to MLflow.

    The function logs the model with ``mlflow.pytorch.log_model`` or with the same function of another MLflow flavour.
    """

    label_col: str = Field(min_length=1, description="Name of the holdout's column with the labels.")
    input_cols: tuple[str, ...] = Field(
        default=(),
        description="Names of the holdout's feature columns, in order. Only a model whose MLflow signature is a tensor "
        "needs these names, because such a signature has no column names.",
    )
    group_col: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the holdout's column that assigns rows to groups, such as queries. Ranking metrics need "
        "this column.",
    )

    @model_validator(mode="after")
    def _suits_functions(self) -> Self:
        if self.ranks and self.group_col is None:
            raise ValueError(
                "a ranking metric in register needs group_col as well: set group_col to the name of the holdout's "
                "column that assigns rows to groups, such as queries"
            )
        if self.skip_if_unchanged:
            raise ValueError(
                "skip_if_unchanged is not possible for a training function: shoal cannot know whether its code, or "
                "other data that it reads, has changed. Omit skip_if_unchanged, or set it to false"
            )
        return self


class FunctionJobSpec(FunctionRequest, AnySpec):
    """Spec of a job that runs a function or a script in each worker of a group. The workers of a group start together.

    Example:
        >>> FunctionJobSpec(train_func="pkg.module:train", hyper_params={"epochs": 3})
    """

    framework: Literal["pytorch"] = Field(
        default="pytorch", description="Kind of the job; the value marks a training function."
    )
    train_func: str | None = Field(
        default=None,
        description="Import name of the function as pkg.module:name; the nodes must have the module installed. None: "
        "`program` has the function.",
    )
    args: tuple[JsonValue, ...] = Field(default=(), description="Positional arguments of the function in `train_func`.")
    kwargs: dict[str, JsonValue] = Field(
        default_factory=dict, description="Keyword arguments of the function in `train_func`."
    )
    program: str | None = Field(
        default=None,
        description="Path of the file with the pickled function and its arguments; `spec_of` or a distributor sets the "
        "path. None: `train_func` names the function.",
    )
    arguments: str | None = Field(
        default=None,
        description="Digest of the pickled function's arguments, by which the same job is recognised when it is "
        "submitted again; `spec_of` sets the digest.",
    )
    register_as: FunctionRegister | None = Field(
        default=None,
        alias="register",
        description="Options to register the model that the function logs to MLflow. None: the model is not "
        "registered.",
    )

    returns: Literal["ranks", "rank-0"] | None = Field(
        default=None,
        description="Value that `shoal.distributors.attach` returns for the job: `ranks` is the list of the return "
        "values of all ranks, `rank-0` the return value of rank 0. `submit` of a decorated function or a distributor "
        "sets this field. None: a `Response`, which has the metrics and the model folder, too.",
    )

    @model_validator(mode="after")
    def _one_function(self) -> Self:
        if (self.train_func is None) == (self.program is None):
            raise ValueError(
                "give train_func (a function's name, as pkg.module:name) or program (the path of a pickled "
                "function): exactly one of them is required"
            )
        if self.train_func is not None and not is_name(self.train_func):
            raise InvalidArgumentError(f'train_func must look like pkg.module:name, not "{self.train_func}"')
        if self.program is not None and (self.args or self.kwargs):
            raise ValueError(
                "args and kwargs can be given only with a function's name in train_func. If program is given, its file "
                "contains the arguments already: leave args and kwargs out"
            )
        return self

    def _subject(self) -> str:
        """Return the name of the function or script."""
        return self.train_func or self.name

    def inputs(self) -> Iterator[DatasetSpec]:
        """Yield the datasets that the training function gets."""
        yield from self.dataset_map.values()

    def comparable(self, by_content: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Return a copy of the spec, to compute the job's fingerprint from it; see :meth:`AnySpec.comparable`."""
        # `returns` and `torch_distributor` are left out, because they do not change what the function computes.
        equal = {"program": self.program and "by value", "returns": None, "torch_distributor": None}
        return super().comparable(by_content).model_copy(update=equal)

    def with_datasets(self, replaced: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Return a copy of the spec with `replaced(x)` for every dataset x; see :meth:`AnySpec.with_datasets`."""
        datasets = {name: replaced(dataset) for name, dataset in self.dataset_map.items()}
        return super().with_datasets(replaced).model_copy(update={"dataset_map": datasets})


AnyJobSpec = JobSpec | FunctionJobSpec | PredictJobSpec | PartitionsJobSpec | TuneJobSpec
"""Spec of any job: a boosting training, a training function, a batch prediction, a function for each partition, or a
search for parameters."""

_KINDS: dict[str, type[AnyJobSpec]] = {
    **dict.fromkeys(get_args(Framework), JobSpec),
    FRAMEWORK: FunctionJobSpec,
    PREDICT: PredictJobSpec,
    PARTITIONS: PartitionsJobSpec,
    TUNE: TuneJobSpec,
}
"""The class of a spec, by the value of its field `framework`."""


def parse_spec(fields: Mapping[str, Any]) -> AnyJobSpec:
    """Build the spec of a job from fields that come from a file, an operator's arguments or a job's row in the store.

    The field `framework` selects the kind of the spec.

    Raises:
        InvalidArgumentError: At least one field is wrong; the message names each of them.
    """
    return kind_of(fields).parse(fields)


def kind_of(fields: Mapping[str, Any]) -> type[AnyJobSpec]:
    """Return the class of the spec that the field `framework` selects.

    Raises:
        InvalidArgumentError: The framework is unknown.
    """
    framework = fields.get("framework", "xgboost")
    # If the framework is not a text, `JobSpec` raises the error when it parses the fields.
    if not isinstance(framework, str):
        return JobSpec
    if framework not in _KINDS:
        *most, last = (f"'{name}'" for name in _KINDS)
        raise InvalidArgumentError(unknown_value("framework", redact(framework), f"{', '.join(most)} or {last}"))
    return _KINDS[framework]
