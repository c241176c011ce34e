"""Define data connectors, which describe datasets for estimators and specs."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shoal.data.checks import check_same_schema
from shoal.data.connections import in_storage
from shoal.data.dataset_spec import DatasetSpec, SplitSpec, TorchDefaults, lister_of
from shoal.data.expectations import Expectations
from shoal.data.filters import Filters, TimeRange, check_present, columns_of, parse_filters, time_column
from shoal.data.ingest import INGESTERS, ArrowIngester, Ingester, IngesterClass, RayDataIngester, ranges_dataset
from shoal.data.parquet.files import need, normalise
from shoal.data.parquet.reading import take_rows
from shoal.data.parquet.source import ParquetSource, find_groups
from shoal.data.planning import Shard, Split, current_position, deal_rows, plan_groups, plan_shards
from shoal.data.shards import DataShard
from shoal.data.staged_data import StagedCopy, discard, staged
from shoal.data.time_split import TimeSplit, newest_time
from shoal.errors import DataError, InvalidArgumentError
from shoal.lazy_imports import pa, pc, pd

if TYPE_CHECKING:
    import pyarrow.dataset

    from shoal.data.torch_dataset import TorchDataset


PathLike = str | os.PathLike[str]


def _parsed(filters: Sequence[Any] | None) -> Filters | None:
    return None if filters is None else parse_filters(filters)


def _listed(paths: PathLike | Iterable[PathLike], storage: str | None) -> list[str]:
    several = paths if isinstance(paths, Iterable) and not isinstance(paths, str) else [paths]
    return [in_storage(storage, normalise(path)) for path in several]


class DataConnector:
    """Dataset in Parquet files, whose rows are read only when they are needed.

    Create a connector with one of the ``from_...`` methods.

    Args:
        source: The Parquet files.
        ingestor_class: Class that reads the rows in the workers.
        staging: Directory of a staged copy (Parquet files that shoal wrote for the workers); None if the files belong
            to the user. The directory is removed when no connector and no job uses the copy any longer.
        torch_defaults: Default values of arguments of :meth:`to_torch_dataset`; by default those of the class.

    Example:
        >>> from shoal.data import DataConnector
        >>> train, holdout = DataConnector.from_parquet("flights/").random_split([0.9, 0.1], seed=0)
    """

    sharded: ClassVar[bool] = False
    TORCH_DEFAULTS: ClassVar[TorchDefaults] = TorchDefaults()
    _expect: Expectations | None = None  # of the spec that this connector was made from

    def __init__(
        self,
        source: ParquetSource,
        ingestor_class: IngesterClass = ArrowIngester,
        staging: str | None = None,
        torch_defaults: TorchDefaults | None = None,
    ) -> None:
        if ingestor_class not in INGESTERS.values():
            raise InvalidArgumentError(
                f"ingestor_class must be ArrowIngester or RayDataIngester, not {ingestor_class!r}"
            )
        self.source = source
        self.ingestor_class = ingestor_class
        self.staging = staging
        self.torch_defaults = torch_defaults or self.TORCH_DEFAULTS
        if staging is not None:
            source.staged = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source!r}, ingestor_class={self.ingestor_class.__name__})"

    # Constructors

    @classmethod
    def from_parquet(
        cls,
        path_or_paths: PathLike | Iterable[PathLike],
        *,
        storage: str | None = None,
        filters: Sequence[Any] | None = None,
        ingestor_class: IngesterClass = ArrowIngester,
    ) -> Self:
        """Connect to existing Parquet files, without copying them.

        Args:
            path_or_paths: One or several files, directories or globs: local paths or URIs that Arrow or fsspec can open
                (``s3://``, ``gs://``). Partition directories (``month=1/``) become columns. The files of a directory
                are sorted by path.
            storage: Name of the storage whose settings open the paths: short for ``s3://NAME@bucket/key``. This process
                has the settings in its environment variable ``SHOAL_STORAGE_<NAME>``; a job takes them along.
            filters: Conditions that the rows must match: a list of terms ``(column, operator, value)``, which are
                joined with AND, or a list of such lists, which are joined with OR. Operators: ``=``, ``!=``, ``<``,
                ``>``, ``<=``, ``>=``, ``in``, ``not in``. Dates and timestamps are given as ISO text or as date and
                datetime; without an offset, a timestamp is UTC. A null matches no term, not even ``!=`` and ``not in``.
            ingestor_class: Class that reads the rows in the workers.

        Returns:
            A connector. No file is read yet, so a wrong path raises an error only at the first use.

        Raises:
            InvalidArgumentError: If a path, the form of the filters, an operator or a value is wrong.

        Example:
            >>> DataConnector.from_parquet("flights/", filters=[("month", ">=", 3), ("month", "<", 6)])
        """
        return cls(ParquetSource(_listed(path_or_paths, storage), filters=_parsed(filters)), ingestor_class)

    @classmethod
    def from_delta(
        cls,
        path: PathLike,
        *,
        storage: str | None = None,
        version: int | None = None,
        as_of: str | datetime | None = None,
        filters: Sequence[Any] | None = None,
        ingestor_class: IngesterClass = ArrowIngester,
    ) -> Self:
        """Connect to a Delta table, without copying it. This process needs the library deltalake, the workers do not.

        Columns have the names and types of the table, also in files that were written before a column was renamed,
        added or widened. Rows that the table has deleted are left out.

        Args:
            path: Directory of the table: a local path or a URI such as ``s3://bucket/table``.
            storage: As in :meth:`from_parquet`.
            version: Number of the version to read; the newest by default.
            as_of: Read the newest version that was written at or before this time, as ISO 8601 text or as a datetime;
                without an offset, the time is UTC.
            filters: Conditions that the rows must match, as in :meth:`from_parquet`.
            ingestor_class: Class that reads the rows in the workers.

        Returns:
            A connector. The log of the table is read at the first use.

        Raises:
            InvalidArgumentError: If `version` and `as_of` are both given, or an argument is wrong.

        Example:
            >>> DataConnector.from_delta("s3://lake/flights", as_of="2024-03-31T00:00:00+00:00")
        """
        table = {"format": "delta", "paths": _listed([path], storage), "version": version, "as_of": as_of}
        return cls._of_table(table, filters, ingestor_class)

    @classmethod
    def from_iceberg(
        cls,
        table: PathLike,
        *,
        catalog: str | None = None,
        storage: str | None = None,
        version: int | str | None = None,
        as_of: str | datetime | None = None,
        filters: Sequence[Any] | None = None,
        ingestor_class: IngesterClass = ArrowIngester,
    ) -> Self:
        """Connect to an Iceberg table, without copying it. This process needs the library pyiceberg, the workers do
        not.

        Columns have the names and types of the table, also in files that were written before a column was renamed,
        added or widened. Rows that the table has deleted by their position are left out. A table with equality deletes,
        as Flink writes them, is refused.

        Args:
            table: With `catalog`, the name of the table, such as ``namespace.table``. Otherwise the directory of the
                table or one of its metadata files: a local path or a URI.
            catalog: Name of a catalog in pyiceberg's configuration (the file ``.pyiceberg.yaml`` or environment
                variables), or in the environment variable ``SHOAL_CATALOG_<NAME>``.
            storage: As in :meth:`from_parquet`; also for the files of a table of a catalog.
            version: Id of the snapshot to read, or name of a tag or branch; the current snapshot by default.
            as_of: Read the snapshot that was the current one at this time, as ISO 8601 text or as a datetime; without
                an offset, the time is UTC.
            filters: Conditions that the rows must match, as in :meth:`from_parquet`.
            ingestor_class: Class that reads the rows in the workers.

        Returns:
            A connector. The metadata of the table is read at the first use.

        Raises:
            InvalidArgumentError: If `version` and `as_of` are both given, or an argument is wrong.

        Example:
            >>> DataConnector.from_iceberg("lake.flights", catalog="prod", version="release-12")
        """
        path = normalise(table) if catalog is None else os.fspath(table)
        given = {"catalog": catalog, "storage": storage, "version": version, "as_of": as_of}
        return cls._of_table({"format": "iceberg", "paths": [path], **given}, filters, ingestor_class)

    @classmethod
    def from_dataframe(
        cls,
        df: Any,
        *,
        ingestor_class: IngesterClass = ArrowIngester,
        staging_location: PathLike | None = None,
    ) -> Self:
        """Write a DataFrame as Parquet to a staging location, from which the workers read.

        Args:
            df: pandas DataFrame (its index is left out), ``pyarrow.Table`` or ``RecordBatchReader``, or any object with
                ``__arrow_c_stream__`` or a method ``to_arrow()`` or ``toArrow()``, such as the DataFrames of Polars,
                Snowpark and PySpark. Of a LazyFrame, a DuckDB relation, a Dask DataFrame and a dataset of Hugging Face,
                only a part is in memory at a time.
            ingestor_class: Class that reads the rows in the workers.
            staging_location: Directory or URI that all nodes can reach; ``$SHOAL_HOME/staging`` by default.

        Raises:
            DataError: If a column cannot be written as Parquet, or the staging location is not writable.
            InvalidArgumentError: If `df` is not a table.
        """
        from shoal.data.frames import stage_dataframe

        return cls._of_staged(stage_dataframe(df, staging_location), ingestor_class)

    @classmethod
    def from_csv(
        cls,
        path_or_paths: PathLike | Iterable[PathLike],
        *,
        storage: str | None = None,
        columns: Mapping[str, str] | None = None,
        delimiter: str = ",",
        ingestor_class: IngesterClass = ArrowIngester,
        staging_location: PathLike | None = None,
    ) -> Self:
        """Convert CSV files in UTF-8 to Parquet in a staging location, one block at a time.

        Each file has a header with the same columns, and may be compressed (``.gz``, ``.zst``, ``.bz2``). An empty
        field is null; ``""`` is an empty text. In columns that are no text, NA, N/A, NULL and None are null, too.

        Args:
            path_or_paths: One or several files, directories or globs; the files of a directory are sorted by path.
            storage: As in :meth:`from_parquet`.
            columns: Types of columns by name: bool, int32, int64, float32, float64, string, date32, timestamp[us] or
                timestamp[us, UTC]. Other columns have the narrowest of int64, float64, bool, date32 and the timestamps
                that holds the values of all rows, else string. Numbers with leading zeros or a plus sign, and whole
                numbers that no int64 holds, are texts.
            delimiter: Character between two fields.
            ingestor_class: Class that reads the rows in the workers.
            staging_location: Directory or URI that all nodes can reach; ``$SHOAL_HOME/staging`` by default.

        Raises:
            DataError: If a file has another header, or a value is not of its column's type; the message names file,
                line, column and value.

        Example:
            >>> DataConnector.from_csv("export/*.csv.gz", columns={"zip": "string"}, delimiter=";")
        """
        from shoal.data.csv_files import stage_csv

        spec = DatasetSpec.parse(
            {"format": "csv", "paths": _listed(path_or_paths, storage), "columns": columns, "delimiter": delimiter}
        )
        with staged(staging_location) as directory:
            stage_csv(spec.paths, spec.columns, delimiter, directory)
        return cls._of_staged(directory, ingestor_class)

    @classmethod
    def from_json(
        cls,
        path_or_paths: PathLike | Iterable[PathLike],
        *,
        storage: str | None = None,
        columns: Mapping[str, str] | None = None,
        ingestor_class: IngesterClass = ArrowIngester,
        staging_location: PathLike | None = None,
    ) -> Self:
        """Convert files with one JSON object per line to Parquet in a staging location, one block at a time.

        Objects become structs, and a missing key is null. Whole numbers beyond int64 are refused.

        Args:
            path_or_paths: As in :meth:`from_csv`.
            storage: As in :meth:`from_parquet`.
            columns: As in :meth:`from_csv`. Texts that are dates or timestamps in all rows become such columns.
            ingestor_class: Class that reads the rows in the workers.
            staging_location: Directory or URI that all nodes can reach; ``$SHOAL_HOME/staging`` by default.

        Raises:
            DataError: If a line is no JSON object, or the values of a column have no common type; the message names
                file, line, column and value.
        """
        from shoal.data.json_files import stage_json

        spec = DatasetSpec.parse({"format": "json", "paths": _listed(path_or_paths, storage), "columns": columns})
        with staged(staging_location) as directory:
            stage_json(spec.paths, spec.columns, directory)
        return cls._of_staged(directory, ingestor_class)

    @classmethod
    def from_sql(
        cls,
        query: Any,
        connection: Any,
        *,
        partition_by: str | None = None,
        ingestor_class: IngesterClass = ArrowIngester,
        staging_location: PathLike | None = None,
    ) -> Self:
        """Run a query in this process and stream its rows as Parquet to a staging location.

        With the extra `adbc`, a SELECT in text form is read from the URL of a PostgreSQL database in Arrow's columns,
        which takes a fraction of the time, and each column has the type of the server.

        Args:
            query: SQL text or a SQLAlchemy selectable.
            connection: SQLAlchemy URL, Engine or Connection. Only this process uses the connection, and the connection
                is never stored.
            partition_by: Column by whose ranges several connections read the rows from PostgreSQL, all of the same
                snapshot. The rows are in the order of this column, nulls last.
            ingestor_class: Class that reads the rows in the workers.
            staging_location: Directory or URI that all nodes can reach; ``$SHOAL_HOME/staging`` by default.

        Raises:
            DataError: If the query fails, or a column cannot be written.
            InvalidArgumentError: If `partition_by` is given for another database or an Engine.
            MissingExtraError: If `partition_by` is given, and the extra `adbc` is not installed.
        """
        from shoal.data.sql import stage_query

        return cls._of_staged(stage_query(query, connection, staging_location, partition_by), ingestor_class)

    @classmethod
    def from_dataset(
        cls,
        dataset: pyarrow.dataset.Dataset,
        *,
        ingestor_class: IngesterClass = ArrowIngester,
        staging_location: PathLike | None = None,
    ) -> Self:
        """Create a connector from a ``pyarrow.dataset.Dataset``, and copy the rows to a staging location if necessary.

        A dataset of local Parquet files is read without a copy. All other datasets are streamed to a staging location:
        other formats, datasets with a filter or a changed schema, and datasets on remote filesystems, whose credentials
        the workers may not have. To read an ``s3://`` path without a copy, use :meth:`from_parquet`.

        Args:
            dataset: The dataset.
            ingestor_class: Class that reads the rows in the workers.
            staging_location: Directory or URI that all nodes can reach; ``$SHOAL_HOME/staging`` by default.
        """
        from shoal.data.frames import source_in_place, stage_arrow_dataset

        if (source := source_in_place(dataset)) is not None:
            return cls(source, ingestor_class)
        return cls._of_staged(stage_arrow_dataset(dataset, staging_location), ingestor_class)

    @classmethod
    def from_ray_dataset(
        cls,
        ds: Any,
        *,
        ingestor_class: IngesterClass = RayDataIngester,
        staging_location: PathLike | None = None,
    ) -> Self:
        """Run a Ray Data pipeline, write its rows as Parquet files to a staging location, and connect to these files.

        Ray tasks write the files. The pipeline's transformations run once, not in every epoch. Shards are planned from
        the footers of the staged files.

        Args:
            ds: A ``ray.data.Dataset``.
            ingestor_class: Class that reads the rows in the workers.
            staging_location: Directory or URI that all nodes can reach. The default ``$SHOAL_HOME/staging`` is allowed
                only if all nodes are on one host.
        """
        from shoal.data.frames import stage_ray_dataset

        return cls._of_staged(stage_ray_dataset(ds, staging_location), ingestor_class)

    @classmethod
    def from_sources(
        cls,
        sources: PathLike | ParquetSource | Iterable[PathLike | ParquetSource],
        ingestor_class: IngesterClass = ArrowIngester,
    ) -> Self:
        """Combine paths or ``ParquetSource`` objects into one dataset, whose rows are in the order of `sources`.

        Args:
            sources: Paths or ``ParquetSource`` objects.
            ingestor_class: Class that reads the rows in the workers.
        """
        several = [sources] if isinstance(sources, str | os.PathLike | ParquetSource) else list(sources)
        if len(several) == 1 and isinstance(several[0], ParquetSource):
            return cls(several[0], ingestor_class)
        paths: list[PathLike] = []
        for source in several:
            if not isinstance(source, ParquetSource):
                paths.append(source)
                continue
            if source.splits:
                raise InvalidArgumentError(
                    "sources contains a part of a random split, and such a part cannot be combined with other sources: "
                    "combine the sources first, then call random_split()"
                )
            if source.is_table:
                raise InvalidArgumentError(
                    f"sources contains the table {source.place}, which cannot be combined with other sources: give "
                    "only the table"
                )
            if source.filters:
                raise InvalidArgumentError(
                    "sources contains a source with filters, which cannot be combined with other sources: give all "
                    "paths and the filters to DataConnector.from_parquet"
                )
            paths += source.paths
            # A source can refer to only one staged copy, but the combined source uses several copies. The copies are
            # therefore kept until this process exits.
            if source.staged_copy is not None:
                source.staged_copy.keep()
        return cls(ParquetSource(paths), ingestor_class)

    @classmethod
    def from_spec(cls, spec: DatasetSpec | Mapping[str, Any]) -> DataConnector:
        """Create a connector from the description of a dataset in a job's spec.

        Args:
            spec: Result of :meth:`to_spec`, or its JSON as a dict.

        Returns:
            A `ShardedDataConnector` if ``spec.sharded`` is true, else a `DataConnector`.

        Raises:
            InvalidArgumentError: If the spec is invalid, or contains a SQL query that no job has run yet.
        """
        if not isinstance(spec, DatasetSpec):
            spec = DatasetSpec.model_validate(spec)
        if spec.staging is None and spec.is_stream:
            what = "sql" if spec.sql is not None else spec.format
            raise InvalidArgumentError(
                f"the {what} of a dataset spec can be read only by a job: submit the spec as a job, use "
                f"DataConnector.from_{what}, or, to plan a training with XGBoost or LightGBM, give the number of rows"
            )
        kind = ShardedDataConnector if spec.sharded else DataConnector
        source = ParquetSource(spec.files, spec.filters, lister=lister_of(spec))
        if spec.time_split is not None:
            source = source.restricted_to(spec.time_split.filters(source))
        source.splits = tuple(Split(split.weights, split.index, split.seed) for split in spec.splits)
        source.staged_copy = spec.staged_copy
        connector = kind(source, INGESTERS[spec.ingester], spec.staging, spec.torch)
        connector._expect = spec.expect
        return connector

    @classmethod
    def _of_table(cls, table: dict[str, Any], filters: Sequence[Any] | None, ingestor_class: IngesterClass) -> Self:
        spec = DatasetSpec.parse(table)
        return cls(ParquetSource(spec.paths, filters=_parsed(filters), lister=lister_of(spec)), ingestor_class)

    @classmethod
    def _of_staged(cls, directory: str, ingestor_class: IngesterClass) -> Self:
        source = ParquetSource(directory)
        source.staged_copy = StagedCopy(directory)
        return cls(source, ingestor_class, directory)

    def to_spec(self) -> DatasetSpec:
        """Return the description of this dataset for a job's spec.

        The description contains paths, filters and splits, but no rows and no credentials.
        """
        return DatasetSpec(
            paths=self.source.paths,
            ingester="ray" if self.ingestor_class is RayDataIngester else "arrow",
            sharded=self.sharded,
            splits=tuple(SplitSpec.model_validate(split, from_attributes=True) for split in self.source.splits),
            filters=self.source.filters,
            torch=self.torch_defaults,
            staging=self.staging,
            expect=self._expect,
            **self.source.lister.options,
        ).holding(self.source.staged_copy)

    # Facts about the dataset

    @property
    def version(self) -> str | None:
        """The version of the table that is read; None for files that belong to no table."""
        return self.source.version

    def schema(self) -> pa.Schema:
        """Return the schema of the dataset: the columns of the first file that has rows, then the partition columns.

        If files store a column in different types, the column has the type that holds the values of all files.
        """
        return self.source.schema()

    def num_rows(self) -> int:
        """Return the number of rows, from the Parquet footers.

        If the dataset has filters, the footers may not show how many rows of a row group match. The filter columns of
        this row group are then read.
        """
        return self.source.num_rows()

    def digest(self) -> str:
        """Return a fingerprint of the dataset: 32 hex digits that do not depend on the location of the files.

        The fingerprint of rows that shoal has staged is that of their values, and was computed while they were written.
        That of other Parquet files is computed from the footers. With filters, all rows are read and the fingerprint is
        computed from their values.
        """
        return self.source.digest()

    def write_times(self) -> tuple[int | None, ...]:
        """Return the time of each file's last change, in nanoseconds since the epoch. Return an empty tuple if
        :meth:`digest` is computed from the rows: such a digest shows every change, so the times are not needed.

        A digest that is computed from the footers may stay the same when values in the rows change, but the write
        times change. The write time of a file is None if the filesystem does not report it.
        """
        return self.source.write_times()

    def time_range(self, column: str | None = None, *, without: Collection[str] = ()) -> TimeRange | None:
        """Read a column and return its smallest and its largest value.

        Args:
            column: Column whose type has an order. By default, the date or timestamp column of the filters, if there is
                exactly one.
            without: Canonical paths of files whose rows are ignored.

        Returns:
            The range; None if `column` is None and the filters do not name exactly one date or timestamp column, or if
            the column has only nulls.

        Raises:
            DataError: If there is no column of this name, or its values have no order.
        """
        schema = self.schema()
        column = column or time_column(columns_of(self.source.filters or ()), schema)
        if column is None:
            return None
        check_present(self.source.reference().path, column, schema.names)
        ends: list[Any] = []
        ranges = [rows for rows in self.source.ranges() if rows.path not in without]
        try:
            for table in self.source.read(ranges, [column]):
                found = pc.min_max(table.column(column)).as_py()
                ends += [end for end in found.values() if end is not None]
        except pa.ArrowNotImplementedError:
            raise DataError(
                f'column "{column}" is of type {schema.field(column).type}, which has no order: name a '
                "column of dates, timestamps or numbers"
            ) from None
        return TimeRange.of(column, (min(ends), max(ends))) if ends else None

    def value_counts(self, column: str) -> dict[Any, int]:
        """Count how many rows have each value of a column.

        For a partition column (``month=1/``), only the footers are read; otherwise the column is read.

        Args:
            column: Name of the column.

        Returns:
            Number of rows by value, in order of the first row; the key None is for nulls.

        Raises:
            DataError: If there is no column of this name, or its values cannot be compared, such as the values of a
                list column.
        """
        schema = self.schema()
        check_present(self.source.reference().path, column, schema.names)
        counts: dict[Any, int] = {}
        if column in self.source.partition_fields():
            for group in self.source.row_groups():
                if group.rows:
                    value = self.source.partition_value(group.path, column)
                    counts[value] = counts.get(value, 0) + group.rows
            return counts
        try:
            for table in self.iter_batches([column]):
                for entry in pc.value_counts(table.column(column)).to_pylist():
                    counts[entry["values"]] = counts.get(entry["values"], 0) + entry["counts"]
        except (pa.ArrowNotImplementedError, TypeError):
            # A value that is a list or a dict raises TypeError, because it cannot be a key of `counts`.
            raise DataError(
                f'column "{column}" is of type {schema.field(column).type}, whose values cannot be compared: name a '
                "column of numbers, text, booleans or dates"
            ) from None
        return counts

    def plan(self, num_workers: int, seed: int, group_col: str | None = None) -> tuple[Shard, ...]:
        """Assign the rows to the workers of a boosting training: compute one shard (list of row ranges) per worker.

        Each worker gets a fair sample of the dataset in its order; see :func:`shoal.data.planning.deal_rows`.

        Args:
            num_workers: Number of shards.
            seed: Seed of the random orders.
            group_col: Column with the group of each row; a group is never split between workers. The whole column is
                read for the plan; see :mod:`shoal.data.planning`.

        Returns:
            One shard per worker, by rank.

        Raises:
            DataError: If there are fewer rows (or groups) than workers, or a file is missing or corrupt.
        """
        if group_col is not None:
            groups = [group for group in self.source.row_groups() if group.rows]
            return plan_groups(groups, find_groups(self.source, group_col), num_workers, seed)
        return deal_rows(self.source.row_groups(), num_workers, seed)

    def num_groups(self, group_col: str) -> int:
        """Return the number of groups of rows that the column `group_col` defines. The whole column is read."""
        return sum(int(begins.sum()) for begins in find_groups(self.source, group_col))

    def ingester(self) -> Ingester:
        """Return a new ingester that reads shards of this dataset."""
        return self.ingestor_class(self.source)

    # Rows

    def iter_batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows in the order of the files, one table per row group.

        The rows are always read by Arrow in this process, even if `ingestor_class` is `RayDataIngester`.

        Args:
            columns: Columns to read, in this order; all by default.
        """
        return self.source.read(self.source.ranges(), columns)

    def to_arrow(self) -> pa.Table:
        """Read all rows, in the order of the files, into one table.

        Raises:
            DataError: If a file lacks a column, or a column's types in the files have no common type.
        """
        return self._read(None)

    def to_pandas(self, limit: int | None = None) -> pd.DataFrame:
        """Read all rows, or the first `limit` rows, in the order of the files, into a DataFrame.

        As with ``pandas.read_parquet``, the index and nullable types are restored that pandas has stored in the files.
        A partition column (``month=1/``) is int32, int64 or text, and not a categorical column.

        Args:
            limit: Maximum number of rows to read; all by default. Only the row groups with these rows are read.
        """
        if limit is not None and limit < 0:
            raise InvalidArgumentError(f"limit must not be negative, but is {limit}")
        need("pandas")
        from shoal.data.output_tables import to_frame

        return to_frame(self._read(limit), self.source)

    def to_torch_dataset(
        self,
        batch_size: int | None = None,
        shuffle: bool = False,
        drop_last_batch: bool | None = None,
        columns: Sequence[str] | None = None,
        expand_dims: bool | None = None,
    ) -> TorchDataset:
        """Return a torch ``IterableDataset`` of all rows. If several workers call this method, each worker reads all
        rows.

        To read only the rows of one rank, use :meth:`ShardedDataConnector.get_shard`.

        Args:
            batch_size: Number of rows per item. An item is a dict of column -> tensor ``[batch_size]`` (a list for text
                and bytes). With None, an item is one row: a dict of column -> int, float, bool, str or bytes.
            shuffle: Whether each ``iter()`` is a new epoch with its own order, which depends on the gang's seed, the
                rank and the epoch.
            drop_last_batch: Whether to leave out the last batch if it has fewer rows. Ignored without `batch_size`. By
                default False, unless the connector is one of `shoal.compat.snowflake`.
            columns: Columns to return, in this order; all by default.
            expand_dims: Whether a column of numbers is a tensor ``[batch_size, 1]``, and a number of a single row a
                tensor ``[1]``. By default False, unless the connector is one of `shoal.compat.snowflake`.

        Returns:
            A :class:`shoal.data.torch_dataset.TorchDataset`. Pass this dataset to a DataLoader, or iterate over the
            dataset directly.

        Raises:
            DataError: If a column is missing, has a type that torch does not support, or differs between files, or if
                the dataset has no rows.
        """
        return self._everything().to_torch_dataset(
            batch_size, shuffle, drop_last_batch, columns, expand_dims=expand_dims
        )

    def to_huggingface_dataset(
        self,
        *,
        streaming: bool = False,
        limit: int | None = None,
        batch_size: int = 1024,
        shuffle: bool = False,
        drop_last_batch: bool = False,
    ) -> Any:
        """Return the rows as a dataset of Hugging Face's library `datasets`, which has to be installed.

        Nulls are None. If several workers call this method, each worker gets all rows.

        Args:
            streaming: Whether to return an ``IterableDataset``, which reads one row group at a time, instead of a
                ``Dataset`` in memory.
            limit: Maximum number of rows; all by default.
            batch_size: Number of rows of a batch, for `drop_last_batch`. An item is one row in any case.
            shuffle: Whether the rows are in an order that the gang's seed determines. A stream shuffles its row groups,
                and the rows of a buffer; ``set_epoch`` of the dataset gives another order.
            drop_last_batch: Whether to leave out the last rows if they do not fill a batch.

        Raises:
            MissingExtraError: If `datasets` is not installed.
            InvalidArgumentError: If `limit` is negative, or `batch_size` is not positive.
        """
        return self._everything().to_huggingface_dataset(
            streaming=streaming,
            limit=limit,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last_batch=drop_last_batch,
        )

    def to_ray_dataset(self) -> Any:
        """Return a lazy Ray Dataset with the rows of this connector, in the same order.

        Returns:
            A ``ray.data.Dataset``.

        Raises:
            InvalidArgumentError: If this process is not connected to Ray.
        """
        # Ray's tasks read the staged files later, when this connector may no longer exist, and Ray's dataset does not
        # refer to the connector. Therefore the staged copy is kept until this process exits.
        if self.source.staged_copy is not None:
            self.source.staged_copy.keep()
        return ranges_dataset(self.source, self.source.ranges(), None)

    def random_split(self, weights: Sequence[float], seed: int = 0) -> list[Self]:
        """Split the rows at random into parts, without reading or copying rows.

        Every row is in exactly one part. The same rows, weights and seed give the same parts. To read a part, shoal
        reads whole row groups and drops the rows of the other parts.

        Args:
            weights: Relative sizes of the parts, such as ``[0.99, 0.01]``.
            seed: Seed of the split.

        Returns:
            One connector per weight. All parts share the staged copy of this connector, if there is one.
        """
        return [self._part(source) for source in self.source.split(weights, seed)]

    def time_split(self, column: str, holdout: int | str, gap: int | str = 0) -> tuple[Self, Self]:
        """Divide the rows by their time into a part for the training and a later part for the holdout.

        The column is read once, for its newest value. Rows without a time are in neither part, and neither are rows
        that are written later with a newer time. A part may be divided further with :meth:`random_split`.

        Args:
            column: Column of dates, timestamps or integers.
            holdout: Length of the holdout, which ends with the newest time: a number of days (of a column of integers:
                of its units), or a duration such as ``"12h"``.
            gap: Length of the time before the holdout whose rows are in neither part, as `holdout`.

        Returns:
            The rows for the training, and the holdout.

        Raises:
            DataError: If there is no such column, or the lengths do not suit its type.
            InvalidArgumentError: If a length is not legal, or this dataset is a part of a random split.

        Example:
            >>> train, holdout = DataConnector.from_parquet("flights/").time_split("day", holdout=7, gap=1)
        """
        if self.source.splits:
            raise InvalidArgumentError(
                "this dataset is a part of a random split, and filters select rows before they are split: call "
                "time_split first, and then random_split of one of its parts"
            )
        option = {"column": column, "holdout": holdout, "gap": gap}
        TimeSplit.parse({**option, "part": "train"})
        option["until"] = newest_time(self.source, column)

        parts = [TimeSplit.parse({**option, "part": part}).filters(self.source) for part in ("train", "holdout")]
        first, second = (self._part(self.source.restricted_to(part)) for part in parts)
        return first, second

    def _part(self, source: ParquetSource) -> Self:
        return type(self)(source, self.ingestor_class, self.staging, self.torch_defaults)

    def expect(
        self,
        *,
        rows: Mapping[str, int] | None = None,
        nulls: Mapping[str, float] | None = None,
        range: Mapping[str, Sequence[Any]] | None = None,
        fresh: Mapping[str, str] | None = None,
        unique: Sequence[str | Sequence[str]] = (),
    ) -> Self:
        """Check now whether the rows are as expected, and return this connector. Jobs do not repeat the check; an
        option `expect` of a dataset in a job's spec is checked by the job.

        Args:
            rows: Smallest and largest number of rows: ``{"min": 1_000, "max": 2_000}``.
            nulls: Largest share of nulls and NaN by column: ``{"delay": 0.05}``.
            range: Smallest and largest value by column, None for no limit: ``{"delay": (-60, None)}``. Dates and
                timestamps are given as in filters. Nulls are in every range.
            fresh: Largest age of the newest value of a column of dates or timestamps, ``{"column": "day", "within":
                "2d"}``, now or at the time ``"at"``.
            unique: Keys that no two rows share: columns, and lists of columns that are a key together.

        Raises:
            DataError: If the rows are not as expected; the message has the figures of all faults. Or if a column does
                not exist.
            InvalidArgumentError: If an argument is wrong.

        Example:
            >>> train.expect(rows={"min": 1_000}, nulls={"delay": 0.05}, unique=[["flight", "day"]])
        """
        given = {"rows": rows, "nulls": nulls or {}, "range": range or {}, "fresh": fresh, "unique": unique}
        Expectations.parse(given).check_rows(self.source, self.source.place, time.time())
        return self

    def discard_staging(self) -> bool:
        """Remove the staged copy of the data (the Parquet files that shoal wrote for the workers), if there is one.

        Without this call, the copy is removed when no connector uses the copy any longer, and all jobs that use the
        copy have ended. Further calls have no effect.

        Returns:
            True if a staged copy was removed.
        """
        if self.source.staged_copy is not None:
            return bool(self.source.staged_copy.discard())
        return self.staging is not None and discard(self.staging)

    def _everything(self) -> DataShard:
        return DataShard(
            self.ingester(), Shard(self.source.ranges()), current_position(), torch_defaults=self.torch_defaults
        )

    def _read(self, limit: int | None) -> pa.Table:
        schema = self.schema()
        check_same_schema(self.source, None)
        ranges = self.source.ranges()
        return take_rows(self.source.read(ranges), limit) if ranges else schema.empty_table()


class ShardedDataConnector(DataConnector):
    """Dataset that is divided among the workers of one training, so that each worker reads only its own rows."""

    sharded: ClassVar[bool] = True

    def get_shard(self) -> DataShard:
        """Return the rows that this worker of a training reads.

        A process that is not a worker of a training gets all rows.

        Returns:
            The shard of this process's rank. All ranks compute the same plan, because they use the same footers.
        """
        here = current_position()
        # The torch dataset of a shard saves its position in checkpoints, so this plan must not change. All methods of
        # the shard use the same plan, so that `to_arrow` returns the rows of `to_torch_dataset` in the same order.
        plan = plan_shards(self.source.row_groups(), here.world_size, here.seed)
        largest = max(shard.rows for shard in plan)
        return DataShard(self.ingester(), plan[here.rank], here, largest, self.torch_defaults)
