"""Models for the dataset part of a job's JSON spec."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal.redaction import RedactedRepr


class SplitSpec(BaseModel):
    """One part of a random split, described by weights, index and seed; no row numbers are stored."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    weights: tuple[float, ...] = Field(min_length=1, description="Relative sizes of all the parts.")
    index: int = Field(ge=0, description="Index of this part, from 0.")
    seed: int = Field(description="Seed of the split.")


class DatasetSpec(RedactedRepr, BaseModel):
    """A dataset in a job's spec. `DataConnector.from_spec` builds a connector from it, on any machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    format: Literal["parquet"] = Field(default="parquet", description="File format.")
    paths: tuple[str, ...] = Field(min_length=1, description="Files, directories or globs: absolute paths or URIs.")
    ingester: Literal["arrow", "ray"] = Field(default="arrow", description="Ingester that reads the rows in workers.")
    sharded: bool = Field(default=False, description="Whether the connector is a `ShardedDataConnector`.")
    splits: tuple[SplitSpec, ...] = Field(
        default=(), description="Random splits in sequence: each one splits the part that the previous one selected."
    )
    staging: str | None = Field(
        default=None, description="Directory of the staged copy, which is removed when its job ends."
    )
