"""The spec of a job that runs a function, and parsing a spec of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from shoal.data.spec import DatasetSpec
from shoal.errors import InvalidArgumentError
from shoal.jobs.predict_spec import PREDICT, PredictJobSpec
from shoal.jobs.spec import AnySpec, JobSpec, Register
from shoal.training.pytorch.request import FunctionRequest
from shoal.training.pytorch.train_func import FRAMEWORK, is_name


class FunctionRegister(Register):
    """Registration of the model that the function logs with ``mlflow.pytorch.log_model`` or another flavour's."""

    label_col: str = Field(min_length=1, description="Label column of the holdout.")
    input_cols: tuple[str, ...] = Field(
        default=(), description="Its feature columns, for a model whose signature is a tensor and names none."
    )
    group_col: str | None = Field(
        default=None, min_length=1, description="Its column of groups, such as queries, for a ranking metric."
    )

    @model_validator(mode="after")
    def _groups_to_rank(self) -> Self:
        if self.ranks and self.group_col is None:
            raise ValueError("a ranking metric needs group_col, the column of groups")
        return self


class FunctionJobSpec(FunctionRequest, AnySpec):
    """A function, or a script, that runs in every worker of a gang.

    Example:
        >>> FunctionJobSpec(train_func="pkg.module:train", hyper_params={"epochs": 3})
    """

    framework: Literal["pytorch"] = Field(default="pytorch", description="What trains.")
    train_func: str | None = Field(
        default=None, description="The function as pkg.module:name; the nodes must have it installed."
    )
    args: tuple[JsonValue, ...] = Field(default=(), description="Arguments of the function that is named.")
    kwargs: dict[str, JsonValue] = Field(default_factory=dict, description="Its arguments by name.")
    program: str | None = Field(
        default=None, description="Path of the pickled function and its arguments; `spec_of` or a distributor sets it."
    )
    arguments: str | None = Field(default=None, description="Digest of the program's arguments; `spec_of` sets it.")
    register_as: FunctionRegister | None = Field(
        default=None, alias="register", description="Where the model goes that the function logs; none: nowhere."
    )

    @model_validator(mode="after")
    def _one_function(self) -> Self:
        if (self.train_func is None) == (self.program is None):
            raise ValueError("give either train_func, as pkg.module:name, or a program")
        if self.train_func is not None and not is_name(self.train_func):
            raise InvalidArgumentError(f'train_func must look like pkg.module:name, not "{self.train_func}"')
        if self.program is not None and (self.args or self.kwargs):
            raise ValueError("args and kwargs are of a function that is named; the program has its own")
        return self

    def inputs(self) -> Iterator[DatasetSpec]:
        """Yield the datasets of the function."""
        yield from self.dataset_map.values()

    def comparable(self, by_content: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """Build the spec that is fingerprinted; see :meth:`AnySpec.comparable`."""
        return (
            super()
            .comparable(by_content)
            .model_copy(
                update={
                    "dataset_map": {name: by_content(dataset) for name, dataset in self.dataset_map.items()},
                    "program": self.program and "by value",
                }
            )
        )


AnyJobSpec = JobSpec | FunctionJobSpec | PredictJobSpec
"""Spec of a job of any kind."""


def parse_spec(fields: Mapping[str, Any]) -> AnyJobSpec:
    """Build the spec that a file, an operator's arguments or a job's row describe.

    Raises:
        InvalidArgumentError: Naming each field that is wrong.
    """
    kinds: dict[Any, type[FunctionJobSpec | PredictJobSpec]] = {FRAMEWORK: FunctionJobSpec, PREDICT: PredictJobSpec}
    framework = fields.get("framework")
    kind = kinds.get(framework, JobSpec) if isinstance(framework, str) else JobSpec
    return kind.parse(fields)
