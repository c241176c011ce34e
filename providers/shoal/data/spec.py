"""Models for the dataset part of a job's JSON spec."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from shoal.data.filters import Filters, parse_filters
from shoal.data.queries import check_connection_name, check_query
from shoal.settings import Settings


class SplitSpec(Settings):
    """One part of a random split, described by weights, index and seed; no row numbers are stored."""

    weights: tuple[float, ...] = Field(min_length=1, description="Relative sizes of all the parts.")
    index: int = Field(ge=0, description="Index of this part, from 0.")
    seed: int = Field(description="Seed of the split.")


class DatasetSpec(Settings):
    """A dataset in a job's spec. `DataConnector.from_spec` builds a connector from it, on any machine."""

    format: Literal["parquet"] = Field(default="parquet", description="File format.")
    paths: tuple[str, ...] = Field(
        default=(), description="Files, directories or globs: absolute paths or URIs. None with `sql`."
    )
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
    sql: str | None = Field(
        default=None,
        description="One SELECT, which the job runs, in place of `paths`; parameters are written as :name.",
    )
    connection: str | None = Field(
        default=None,
        description="Name of the connection of `sql`: the submitter's variable SHOAL_CONNECTION_<NAME> has its "
        "SQLAlchemy URL, or an Airflow connection or a Prefect Secret block of this name.",
    )
    params: dict[str, bool | int | Annotated[float, Field(allow_inf_nan=False)] | str | None] | None = Field(
        default=None, description="Values of the parameters of `sql`, which are bound and not pasted into the text."
    )
    time_col: str | None = Field(
        default=None,
        min_length=1,
        description="Column with the time of each row, whose range stands in the job's result; by default the date or "
        "timestamp column of the filters, if there is one.",
    )
    staging: str | None = Field(
        default=None, description="Directory of the staged copy, which is removed when its job ends."
    )

    @field_validator("filters", mode="before")
    @classmethod
    def _filters(cls, value: Any) -> Any:
        return None if value is None else parse_filters(value)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.sql is None:
            if not self.paths:
                raise ValueError("a dataset needs paths, or sql with a connection")
            if self.connection is not None or self.params is not None:
                raise ValueError("connection and params belong to sql, which is not given")
            return self
        if self.paths and self.staging is None:
            raise ValueError("paths and sql are both given: give one of them")
        if self.filters is not None:
            raise ValueError("filters are for paths: write them into the WHERE of sql")
        if self.connection is None:
            raise ValueError("sql needs a connection: the name of one")
        check_connection_name(self.connection)
        check_query(self.sql, self.params or {})
        return self

    @property
    def origin(self) -> tuple[str, ...]:
        """Where the rows come from: the paths, or the connection's name."""
        return self.paths if self.sql is None else (f"connection {self.connection}",)

    def query_key(self) -> str | None:
        """Return a text that is equal for equal queries; None if the dataset has no query."""
        return None if self.sql is None else json.dumps([self.connection, self.sql, self.params], sort_keys=True)

    @model_serializer(mode="wrap")
    def _without_unset(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out newer options that are not set: specs that earlier versions stored keep their fingerprints."""
        return {name: value for name, value in write(self).items() if value is not None or name not in _NEWER}


_NEWER = ("filters", "sql", "connection", "params", "time_col")
"""Options that were added after specs had been stored."""


def as_dataset_spec(value: Any) -> Any:
    """Return the spec of a `DataConnector`; any other value as it is, for pydantic to check."""
    return value.to_spec() if hasattr(value, "to_spec") else value
