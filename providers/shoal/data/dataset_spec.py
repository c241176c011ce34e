"""Define the pydantic models that describe a dataset in a job's JSON spec, and identify its rows by the content of its
files, so that a retry may use what an earlier attempt wrote."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from shoal.data.connections import CATALOG_PREFIX, CONNECTION_PREFIX, STORAGE_PREFIX, in_storage, split_storage
from shoal.data.expectations import Expectations
from shoal.data.filters import Filters, parse_filters, parse_moment
from shoal.data.listing import TableLister
from shoal.data.parquet.files import PACKAGED_URI, list_files, resolve
from shoal.data.sql import check_connection_name, check_query
from shoal.data.staged_data import StagedCopy
from shoal.data.text_columns import ColumnType
from shoal.data.time_split import TimeSplit
from shoal.option_validation import Settings, later_option, optional


class SplitSpec(Settings):
    """Description of one part of a random split: weights, index and seed. The description contains no row numbers."""

    weights: tuple[float, ...] = Field(min_length=1, description="Relative sizes of all parts of the split.")
    index: int = Field(ge=0, description="Index of this part among the parts, from 0.")
    seed: int = Field(description="Seed of the random split. The same seed gives the same parts.")


class TorchDefaults(Settings):
    """Default values of arguments of ``to_torch_dataset()``."""

    expand_dims: bool = Field(
        default=False,
        description="Whether a column of numbers is a tensor of rows x 1 instead of rows, and a number of a single row "
        "a tensor of one value.",
    )
    drop_last_batch: bool = Field(
        default=False, description="Whether to leave out the last batch if it has fewer rows than the others."
    )


class DatasetSpec(Settings):
    """Description of a dataset in a job's spec; `DataConnector.from_spec` creates a connector from the description."""

    format: Literal["parquet", "delta", "iceberg", "csv", "json"] = Field(
        default="parquet",
        description="Format of the files: parquet; delta or iceberg for a table, whose directory is the only path; "
        "csv; json for one object per line. The job copies the rows of csv and json files to Parquet files before it "
        "reads them.",
    )
    catalog: str | None = later_option(
        "Name of the catalog that has the Iceberg table, in pyiceberg's configuration (the file "
        ".pyiceberg.yaml or environment variables), or in the submitter's environment variable SHOAL_CATALOG_<NAME>, "
        "an Airflow connection or a Prefect block. The path is then the table's name, such as namespace.table.",
        min_length=1,
        pattern="^[^/]+$",
    )
    storage: str | None = later_option(
        "Name of the storage whose settings open the paths: short for s3://NAME@bucket/key. The settings "
        "(keys or a role, region, endpoint) are read from the submitter's environment variable SHOAL_STORAGE_<NAME>, "
        "or from an Airflow connection or a Prefect block of this name.",
    )
    version: Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)] | None = later_option(
        "Version of the table to read: a number (of an Iceberg table the id of a snapshot), or the name of "
        "an Iceberg tag or branch. None: the newest when the job's first attempt starts; all attempts read this "
        "version.",
    )
    as_of: str | None = later_option(
        "Time in ISO 8601: read the newest version of the table that was written at or before this time. "
        "Without an offset, the time is UTC.",
    )
    paths: tuple[str, ...] = Field(
        default=(),
        description="Absolute paths or URIs of files, directories or glob patterns. Leave the list empty if `sql` "
        "selects the rows.",
    )
    columns: dict[str, ColumnType] | None = later_option(
        "Types of columns of csv and json files by name. The types of all other columns are found from the "
        "values of all rows.",
    )
    delimiter: str = later_option("Character between two fields of csv files.", default=",", min_length=1, max_length=1)
    stage: bool = later_option(
        "Whether the job copies all rows to Parquet files before it reads them. The row groups of the copy "
        "follow from the rows alone, so that equal rows in equal order train the same model whatever files they are "
        "in. Filters and splits select from the copy.",
        default=False,
    )
    ingester: Literal["arrow", "ray"] = Field(
        default="arrow",
        description="Library with which the workers read the rows: arrow (Arrow in the worker itself) or ray (Ray "
        "Data).",
    )
    sharded: bool = Field(
        default=False,
        description="Whether the connector is a `ShardedDataConnector`, of which each worker reads only its own shard.",
    )
    splits: tuple[SplitSpec, ...] = Field(
        default=(),
        description="Random splits in sequence. Each split is applied to the part that the previous split selected. "
        "The default is the whole dataset.",
    )
    filters: Filters | None = optional(
        'Conditions that the rows must match: a list of conditions such as [["month", ">=", 3]], or a '
        "list of such lists, of which a row must match at least one. A null value matches no condition. "
        "None: all rows."
    )
    time_split: TimeSplit | None = later_option(
        "Part of the rows that match the filters, divided by their time: the last days for the holdout, or "
        "the days before them for the training. Random splits are applied to the part. None: all these rows.",
    )
    expect: Expectations | None = later_option(
        "What the job checks of the selected rows before it starts workers. None: nothing.",
    )
    sql: str | None = optional(
        "SELECT statement that the job runs to get the rows; it is used instead of `paths`. Parameters "
        "are written as :name."
    )
    connection: str | None = optional(
        "Name of the connection that runs `sql`. The SQLAlchemy URL is read from the submitter's "
        "environment variable SHOAL_CONNECTION_<NAME>, or from an Airflow connection or a Prefect Secret "
        "block of this name."
    )
    params: dict[str, bool | int | Annotated[float, Field(allow_inf_nan=False)] | str | None] | None = optional(
        "Values of the parameters of `sql`. The values are passed to the database as bound parameters and"
        " are not inserted into the text of the statement."
    )
    partition_by: str | None = later_option(
        "Name of a column of `sql`, by whose ranges several connections read the rows, all of the same "
        "snapshot. The rows are in the order of this column, nulls last. Only with PostgreSQL and the extra adbc. "
        "None: one connection reads all rows.",
        min_length=1,
    )
    time_col: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the column that contains the time of each row: dates, timestamps or numbers, such as "
        "seconds since 1970. The job's result contains the range of these times. "
        "None: the date or timestamp column of the filters, if there is one.",
    )
    torch: TorchDefaults = later_option(
        "Default values of arguments of the connector's `to_torch_dataset`.", default=TorchDefaults()
    )
    staging: str | None = optional(
        "Directory of the Parquet files into which shoal has copied (staged) the rows. When the job ends, "
        "the directory is removed, unless the process that has staged the rows still holds them, or another job uses "
        "them."
    )
    _staged_copy: StagedCopy | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _of_connector(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        value = value.to_spec() if hasattr(value, "to_spec") else value
        if isinstance(value, Mapping) and isinstance(catalog := value.get("catalog"), str):
            from shoal.data.iceberg import address_of

            value = {**value, "paths": [address_of(catalog, path) for path in value.get("paths", ())]}
        if isinstance(value, Mapping) and isinstance(name := value.get("storage"), str) and not value.get("sql"):
            paths = [in_storage(name, str(path)) for path in value.get("paths", ())]
            value = {**value, "storage": None, "paths": paths}
        return validate(value)

    @field_validator("version", mode="before")
    @classmethod
    def _number(cls, value: Any, others: ValidationInfo) -> Any:
        # A template of Airflow gives a text. The name of an Iceberg tag may have only digits.
        is_number = others.data.get("format") == "delta" and isinstance(value, str) and value.isdecimal()
        return int(value) if is_number else value

    @field_validator("as_of", mode="before")
    @classmethod
    def _time_as_text(cls, value: Any) -> Any:
        text = value.isoformat() if isinstance(value, datetime) else value
        if isinstance(text, str):
            parse_moment(text)
        return text

    @field_validator("filters", mode="before")
    @classmethod
    def _filters(cls, value: Any) -> Any:
        return None if value is None else parse_filters(value)

    @model_validator(mode="after")
    def _options_of_format(self) -> Self:
        if self.is_table and len(self.paths) != 1:
            raise ValueError(f'format="{self.format}" needs one path: the directory of the table')
        if not self.is_table and (self.version is not None or self.as_of is not None):
            raise ValueError(
                'version and as_of can be given only for a table: add format="delta" or "iceberg", or omit them'
            )
        if self.catalog is not None and self.format != "iceberg":
            raise ValueError('catalog can be given only for an Iceberg table: add format="iceberg", or omit catalog')
        if self.format == "delta" and isinstance(self.version, str):
            raise ValueError(
                f"the version of a Delta table is a number, not {self.version!r}: give the number or as_of"
            )
        if self.version is not None and self.as_of is not None:
            raise ValueError("version and as_of are both given: give only one of these options")
        if self.format not in ("csv", "json") and self.columns is not None:
            raise ValueError("columns can be given only with format csv or json: the files have the types themselves")
        if self.format != "csv" and self.delimiter != ",":
            raise ValueError("delimiter can be given only with format csv: omit it, or set format to csv")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.sql is None:
            if not self.paths:
                raise ValueError(
                    "the dataset has neither paths nor sql: set the option paths, or the options sql and connection"
                )
            if any(option is not None for option in (self.connection, self.params, self.partition_by)):
                raise ValueError(
                    "connection, params and partition_by can be given only with the option sql: add sql, or omit these "
                    "options"
                )
            return self
        if (self.paths or self.storage is not None) and self.staging is None:
            raise ValueError("sql is given together with paths or storage: give only one of these options")
        if self.filters is not None:
            raise ValueError("filters can be given only with paths: write the conditions into the WHERE clause of sql")
        if self.connection is None:
            raise ValueError("sql requires the option connection: set connection to the name of a database connection")
        check_connection_name(self.connection)
        check_query(self.sql, self.params or {})
        return self

    @property
    def is_table(self) -> bool:
        """Whether the dataset is a table with versions, such as a Delta table."""
        return self.format in ("delta", "iceberg")

    @property
    def origin(self) -> tuple[str, ...]:
        """Source of the rows: the paths of the files, the table with its version, or the name of the database
        connection."""
        if self.version is not None:
            return (f"{self.paths[0]}, version {self.version}",)
        return self.paths if self.sql is None else (f"connection {self.connection}",)

    def connections(self) -> Iterator[tuple[str, str]]:
        """Yield each database connection, storage and catalog that opens the dataset: the prefix of its environment
        variable, and its name."""
        storages = ((STORAGE_PREFIX, split_storage(path)[0]) for path in self.paths)
        named = ((CONNECTION_PREFIX, self.connection), (CATALOG_PREFIX, self.catalog), *storages)
        yield from ((prefix, name) for prefix, name in named if name)

    def selects_as(self, other: DatasetSpec) -> bool:
        """Return whether the options of another dataset select the same rows of the same files or database."""
        names = ("splits", "filters", "time_split", *_SOURCE)
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def located(self) -> Self:
        """Return a copy of the spec with absolute paths. Relative paths start at the working folder of this process."""
        paths = tuple(os.path.abspath(path) if is_relative(path) else path for path in self.paths)
        return self.model_copy(update={"paths": paths})

    @property
    def staged_copy(self) -> StagedCopy | None:
        """Object that prevents the removal of the staged copy while this spec exists; None if this process has staged
        no files for this spec.

        A staged copy consists of Parquet files that shoal wrote for the workers.
        """
        return self._staged_copy

    def holding(self, staged_copy: StagedCopy | None) -> Self:
        """Prevent the removal of a staged copy while this spec exists, and return this spec.

        A staged copy consists of Parquet files that shoal wrote for the workers.
        """
        self._staged_copy = staged_copy
        return self

    @property
    def is_stream(self) -> bool:
        """Whether the number of rows is known only after they were copied: those of a query, or of CSV or JSON
        files."""
        return self.sql is not None or self.format in ("csv", "json")

    @property
    def is_copied(self) -> bool:
        """Whether the job copies the rows to Parquet files, which are then in the directory `staging`."""
        return self.stage or self.is_stream

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the Parquet files with the rows: those of the copy, if the job has made one."""
        return (self.staging,) if self.is_copied and self.staging is not None else self.paths

    def whole(self) -> Self:
        """Return the description of all rows of the files, without filters and splits."""
        return self.model_copy(update={"filters": None, "splits": (), "time_split": None})

    def source_key(self) -> str:
        """Return as JSON text what determines the rows before filters and splits."""
        return json.dumps({name: getattr(self, name) for name in _SOURCE}, sort_keys=True)

    @model_serializer(mode="wrap")
    def _as_document(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        if self._staged_copy is not None:
            self._staged_copy.written()
        document: dict[str, Any] = write(self)
        return document


_SOURCE = (
    "format", "paths", "catalog", "version", "as_of", "columns", "delimiter", "sql", "connection", "params",
    "partition_by",
)  # fmt: skip
"""Fields that determine the rows before filters and splits."""


def is_relative(path: str) -> bool:
    """Return whether a path depends on the working folder; False for URIs and for paths in a home folder (``~``)."""
    return "://" not in path and not path.startswith(("/", "~"))


def lister_of(spec: DatasetSpec) -> TableLister | None:
    """Return the lister of the table that a spec describes; None for Parquet files and copies."""
    if spec.staging is not None or not spec.is_table:
        return None
    if spec.format == "delta":
        from shoal.data.delta import DeltaFiles

        return DeltaFiles(spec.paths[0], spec.version, spec.as_of)
    from shoal.data.iceberg import IcebergFiles

    return IcebergFiles(spec.paths[0], spec.version, spec.as_of)


def version_of(table: DatasetSpec) -> tuple[int | str, str]:
    """Return the version of a table that is read now, and the id of the table; see `TableLister.find_version`."""
    lister = lister_of(table)
    assert lister is not None
    return lister.find_version()


def content_of(dataset: DatasetSpec) -> Sequence[object] | None:
    """Return values that differ if the files of a dataset have changed; None if a change could remain unnoticed.

    A file counts as changed if it was written again. Of rows that shoal has written for the job, such as those of a
    DataFrame, the content counts, because each submission writes them anew.
    """
    if dataset.is_table and dataset.staging is None:
        return [*dataset.paths, *version_of(dataset)]
    files = list_files(dataset.files)
    # A staged or packaged file is a copy that the next attempt gets anew, at another path and time.
    if dataset.staging is not None or all(path.startswith(PACKAGED_URI) for path in dataset.files):
        digests = []
        for file in files:
            filesystem, inner = resolve(file.path)
            with filesystem.open_input_stream(inner) as stream:
                digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
        return digests
    return None if any(file.modified_ns is None for file in files) else files
