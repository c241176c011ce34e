"""How a dataset is written down in a job's JSON spec."""

from typing import Any, Literal

from pydantic import Field

from shoal.settings import Settings


class SplitSpec(Settings):
    """One part of a random split, by its recipe: no row number is stored."""

    weights: tuple[float, ...] = Field(min_length=1, description="Relative sizes of all the parts.")
    index: int = Field(ge=0, description="Which of the parts this is, from 0.")
    seed: int = Field(description="Seed of the split.")


class DatasetSpec(Settings):
    """A dataset as a job's spec holds it; `DataConnector.from_spec` makes the connector again, on any machine."""

    format: Literal["parquet"] = Field(default="parquet", description="How the files are written.")
    paths: tuple[str, ...] = Field(min_length=1, description="Files, directories or globs: absolute paths or URIs.")
    ingester: Literal["arrow", "ray"] = Field(default="arrow", description="What reads the rows in the workers.")
    sharded: bool = Field(default=False, description="Whether it is a `ShardedDataConnector`.")
    splits: tuple[SplitSpec, ...] = Field(default=(), description="Random splits, each of what the one before left.")
    staging: str | None = Field(default=None, description="Staged copy to remove when its job ends.")


def as_dataset_spec(value: Any) -> Any:
    """Return the spec of a `DataConnector`; any other value as it is, for pydantic to check."""
    return value.to_spec() if hasattr(value, "to_spec") else value
