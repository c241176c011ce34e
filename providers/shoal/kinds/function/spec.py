"""Define the spec of a job that runs a training function or script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import InvalidArgumentError
from shoal.jobs.register import Register
from shoal.jobs.spec import AnyJobSpec
from shoal.option_validation import Memory, later_option, optional
from shoal.training.demand import GangDemand
from shoal.training.pytorch.program import is_name
from shoal.training.pytorch.request import FunctionRequest

_EVALUATION_NAMES = ("eval", "holdout", "test", "val")


def is_training_data(name: str) -> bool:
    """Return True unless the dataset's name begins with "eval", "holdout", "test" or "val".

    shoal does not know how a training function uses its datasets, so it decides by the name.
    """
    return not name.lower().startswith(_EVALUATION_NAMES)


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


class FunctionJobSpec(FunctionRequest, AnyJobSpec):
    """Spec of a job that runs a function or a script in each worker of a group. The workers of a group start together.

    Example:
        >>> FunctionJobSpec(train_func="pkg.module:train", hyper_params={"epochs": 3})
    """

    framework: Literal["pytorch"] = Field(
        default="pytorch", description="Kind of the job; the value marks a training function."
    )
    train_func: str | None = optional(
        "Import name of the function as pkg.module:name; the nodes must have the module installed. None: "
        "`program` has the function."
    )
    args: tuple[JsonValue, ...] = Field(default=(), description="Positional arguments of the function in `train_func`.")
    kwargs: dict[str, JsonValue] = Field(
        default_factory=dict, description="Keyword arguments of the function in `train_func`."
    )
    program: str | None = optional(
        "Path of the file with the pickled function and its arguments; `spec_of` or a distributor sets the "
        "path. None: `train_func` names the function."
    )
    arguments: str | None = optional(
        "Digest of the pickled function's arguments, by which the same job is recognised when it is "
        "submitted again; `spec_of` sets the digest."
    )
    register_as: FunctionRegister | None = Field(
        default=None,
        alias="register",
        description="Options to register the model that the function logs to MLflow. None: the model is not "
        "registered.",
    )

    returns: Literal["ranks", "rank-0"] | None = optional(
        "Value that `shoal.distributors.attach` returns for the job: `ranks` is the list of the return "
        "values of all ranks, `rank-0` the return value of rank 0. `submit` of a decorated function or a distributor "
        "sets this field. None: a `Response`, which has the metrics and the model folder, too."
    )

    memory_per_worker: Memory | None = later_option(
        "Memory that each worker needs, with its model, such as 4Gi: `shoal plan` counts it. None: that of "
        "the last run of the job.",
    )

    prints_notes: ClassVar[bool] = True
    may_call_ray: ClassVar[bool] = True

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

    def profiled(self) -> tuple[DatasetSpec, ...]:
        """Return the first dataset that counts as training data."""
        return tuple(each for name, each in self.dataset_map.items() if is_training_data(name))[:1]

    def _subject(self) -> str:
        """Return the name of the function or script."""
        return self.train_func or self.name

    def demand(self) -> GangDemand:
        """Return what the function needs of its pool's nodes. Ray tasks measure the usage of the nodes."""
        found = super().demand()
        measures_nodes = self.tracking is not None and self.tracking.system_metrics
        return replace(found, starts_ray_tasks=found.starts_ray_tasks or measures_nodes)

    def comparable(self, by_content: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Return a copy of the spec, to compute the job's fingerprint from it; see :meth:`AnyJobSpec.comparable`."""
        # These fields are left out, because they do not change what the function computes.
        equal = {"returns": None, "torch_distributor": None}
        return super().comparable(by_content).model_copy(update=equal)
