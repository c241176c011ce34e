"""What a job is asked to do that runs a function, and how a spec is told from another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from shoal.data.spec import DatasetSpec
from shoal.jobs.spec import AnySpec, JobSpec
from shoal.training.pytorch.scaling import AnyScaling, PyTorchScalingConfig

_IMPORTABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class FunctionJobSpec(AnySpec):
    """A function, or a script, that runs in every worker of a gang.

    Example:
        >>> FunctionJobSpec(train_func="pkg.module:train", hyper_params={"epochs": 3})
    """

    framework: Literal["pytorch"] = Field(default="pytorch", description="What trains.")
    name: str = Field(default="function", min_length=1, description="What to call the function.")
    train_func: str | None = Field(
        default=None, description="The function as pkg.module:name; the nodes must have it installed."
    )
    program: str | None = Field(
        default=None, description="Where function and arguments lie, by value; a distributor writes them."
    )
    dataset_map: dict[str, DatasetSpec] = Field(
        default_factory=dict, description="Datasets by name; connectors will do."
    )
    hyper_params: dict[str, JsonValue] = Field(default_factory=dict, description="What `get_hyper_params` returns.")
    scaling_config: AnyScaling = Field(default_factory=PyTorchScalingConfig, description="Workers and their size.")

    @field_validator("dataset_map", mode="before")
    @classmethod
    def _datasets(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {name: item.to_spec() if hasattr(item, "to_spec") else item for name, item in value.items()}

    @model_validator(mode="after")
    def _one_function(self) -> Self:
        if (self.train_func is None) == (self.program is None):
            raise ValueError("train_func names the function as pkg.module:name")
        if self.train_func is not None and not _IMPORTABLE.fullmatch(self.train_func):
            raise ValueError(f'train_func must look like pkg.module:name, not "{self.train_func}"')
        return self

    def datasets(self) -> Iterator[DatasetSpec]:
        """All datasets that it names."""
        yield from self.dataset_map.values()

    def asked(self, by_content: Callable[[DatasetSpec], DatasetSpec]) -> Self:
        """The spec as a question; see :meth:`AnySpec.asked`."""
        return self.model_copy(
            update={
                "dataset_map": {name: by_content(dataset) for name, dataset in self.dataset_map.items()},
                "program": self.program and "by value",
            }
        )


def parse_spec(fields: Mapping[str, Any]) -> JobSpec | FunctionJobSpec:
    """Make the spec that a file, an operator's arguments or a job's row describe.

    Raises:
        InvalidArgumentError: Naming each field that is wrong.
    """
    return (FunctionJobSpec if fields.get("framework") == "pytorch" else JobSpec).parse(fields)
