"""Models for the dataset part of a job's JSON spec."""

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from shoal.data.filters import Filters, parse_filters
from shoal.settings import Settings


class SplitSpec(Settings):
    """One part of a random split, described by weights, index and seed; no row numbers are stored."""

    weights: tuple[float, ...] = Field(min_length=1, description="Relative sizes of all the parts.")
    index: int = Field(ge=0, description="Index of this part, from 0.")
    seed: int = Field(description="Seed of the split.")


class DatasetSpec(Settings):
    """A dataset in a job's spec. `DataConnector.from_spec` builds a connector from it, on any machine."""

    format: Literal["parquet"] = Field(default="parquet", description="File format.")
    paths: tuple[str, ...] = Field(min_length=1, description="Files, directories or globs: absolute paths or URIs.")
    ingester: Literal["arrow", "ray"] = Field(default="arrow", description="Ingester that reads the rows in workers.")
    sharded: bool = Field(default=False, description="Whether the connector is a `ShardedDataConnector`.")
    splits: tuple[SplitSpec, ...] = Field(
        default=(), description="Random splits in sequence: each one splits the part that the previous one selected."
    )
    filters: Filters | None = Field(
        default=None,
        description='Only rows that match: [["month", ">=", 3]], or a list of such lists for alternatives. Null '
        "matches nothing.",
    )
    staging: str | None = Field(
        default=None, description="Directory of the staged copy, which is removed when its job ends."
    )

    @field_validator("filters", mode="before")
    @classmethod
    def _filters(cls, value: Any) -> Any:
        return None if value is None else parse_filters(value)

    @model_serializer(mode="wrap")
    def _without_unset(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out newer options that are not set: specs that earlier versions stored keep their fingerprints."""
        return {name: value for name, value in write(self).items() if value is not None or name not in _NEWER}


_NEWER = ("filters",)
"""Options that were added after specs had been stored."""


def as_dataset_spec(value: Any) -> Any:
    """Return the spec of a `DataConnector`; any other value as it is, for pydantic to check."""
    return value.to_spec() if hasattr(value, "to_spec") else value
