"""Data connectors: what users hand to estimators, and what a job's spec writes down."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shoal.data.gang_position import current_shard
from shoal.data.ingest import INGESTERS, ArrowIngester, RayDataIngester
from shoal.data.parquet.groups import find_groups
from shoal.data.parquet.source import ParquetSource
from shoal.data.planning.groups import plan_groups
from shoal.data.planning.row_groups import Shard, plan_shards
from shoal.data.planning.splits import Split
from shoal.data.shard import DataShard
from shoal.data.spec import DatasetSpec, SplitSpec
from shoal.errors import InvalidArgumentError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.dataset

    from shoal.data.torch.dataset import TorchDataset

IngesterClass = type[ArrowIngester] | type[RayDataIngester]
PathLike = str | os.PathLike[str]


class DataConnector:
    """A dataset in Parquet files, read lazily; make one with a ``from_...`` method.

    Args:
        source: Where the rows are.
        ingestor_class: What reads them in the workers.
        staging: Directory of a staged copy that goes when its job ends; None if the files are the user's own.

    Example:
        >>> from shoal.data import DataConnector
        >>> train, holdout = DataConnector.from_parquet("flights/").random_split([0.9, 0.1], seed=0)
    """

    sharded: ClassVar[bool] = False

    def __init__(
        self, source: ParquetSource, ingestor_class: IngesterClass = ArrowIngester, staging: str | None = None
    ) -> None:
        if ingestor_class not in INGESTERS.values():
            raise InvalidArgumentError(
                f"ingestor_class must be ArrowIngester or RayDataIngester, not {ingestor_class!r}"
            )
        self.source = source
        self.ingestor_class = ingestor_class
        self.staging = staging

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source!r}, ingestor_class={self.ingestor_class.__name__})"

    # Constructors

    @classmethod
    def from_parquet(
        cls, path_or_paths: PathLike | Iterable[PathLike], *, ingestor_class: IngesterClass = ArrowIngester
    ) -> Self:
        """Connects to Parquet files where they are.

        Args:
            path_or_paths: A file, directory or glob, or several: local or any path that Arrow or fsspec opens
                (``s3://``, ``gs://``). Partition directories (``month=1/``) become columns. A directory's files are
                taken in the order of their paths.
            ingestor_class: What reads the rows in the workers.

        Returns:
            A connector. Nothing is read yet: a wrong path is reported at the first use.
        """
        return cls(ParquetSource(path_or_paths), ingestor_class)

    @classmethod
    def from_dataframe(
        cls,
        df: Any,
        *,
        ingestor_class: IngesterClass = ArrowIngester,
        staging_location: PathLike | None = None,
    ) -> Self:
        """Writes a DataFrame once as Parquet to a staging location, for the workers to read.

        Args:
            df: pandas DataFrame (its index is left out), ``pyarrow.Table``, or anything with ``__arrow_c_stream__``.
            ingestor_class: What reads the rows in the workers.
            staging_location: Directory or URI that all nodes reach; ``$SHOAL_HOME/staging`` by default.

        Raises:
            DataError: If a column cannot be written, or nothing can be staged there.
            InvalidArgumentError: If `df` is no table.
        """
        from shoal.data.staging.staged_data import stage_dataframe, staged

        with staged(staging_location) as directory:
            stage_dataframe(df, directory)
        return cls(ParquetSource(directory), ingestor_class, directory)

    @classmethod
    def from_sql(
        cls,
        query: Any,
        connection: Any,
        *,
        ingestor_class: IngesterClass = ArrowIngester,
        staging_location: PathLike | None = None,
    ) -> Self:
        """Runs a query here, once, and streams its rows as Parquet to a staging location.

        Args:
            query: SQL text or a SQLAlchemy selectable.
            connection: SQLAlchemy URL, Engine or Connection; it stays in this process.
            ingestor_class: What reads the rows in the workers.
            staging_location: Directory or URI that all nodes reach; ``$SHOAL_HOME/staging`` by default.

        Raises:
            DataError: If the query fails, or a column cannot be written.
        """
        from shoal.data.staging.sql import stage_query
        from shoal.data.staging.staged_data import staged

        with staged(staging_location) as directory:
            stage_query(query, connection, directory)
        return cls(ParquetSource(directory), ingestor_class, directory)

    @classmethod
    def from_dataset(
        cls,
        dataset: pyarrow.dataset.Dataset,
        *,
        ingestor_class: IngesterClass = ArrowIngester,
        staging_location: PathLike | None = None,
    ) -> Self:
        """Connects to a ``pyarrow.dataset.Dataset``.

        Local Parquet files are read where they are. Anything else (another format, a filter, a changed schema, a
        filesystem object whose credentials a worker would not have) is streamed to a staging location;
        :meth:`from_parquet` reads an ``s3://`` path in place.

        Args:
            dataset: The dataset.
            ingestor_class: What reads the rows in the workers.
            staging_location: Directory or URI that all nodes reach; ``$SHOAL_HOME/staging`` by default.
        """
        from shoal.data.staging import arrow_datasets

        source = arrow_datasets.source_in_place(dataset)
        if source is not None:
            return cls(source, ingestor_class)
        from shoal.data.staging.staged_data import staged

        with staged(staging_location) as directory:
            arrow_datasets.stage(dataset, directory)
        return cls(ParquetSource(directory), ingestor_class, directory)

    @classmethod
    def from_ray_dataset(
        cls,
        ds: Any,
        *,
        ingestor_class: IngesterClass = RayDataIngester,
        staging_location: PathLike | None = None,
    ) -> Self:
        """Runs a Ray Data pipeline once and has its tasks write the rows as Parquet to a staging location.

        So transformations run once, not in every epoch or pass, and the rows are planned from footers like any others.

        Args:
            ds: A ``ray.data.Dataset``.
            ingestor_class: What reads the rows in the workers.
            staging_location: Directory or URI that all nodes reach; ``$SHOAL_HOME/staging`` by default, where one host
                has all nodes.
        """
        from shoal.data.ray_data import stage_dataset
        from shoal.data.staging.staged_data import staged

        with staged(staging_location) as directory:
            stage_dataset(ds, directory, checked=staging_location is not None)
        return cls(ParquetSource(directory), ingestor_class, directory)

    @classmethod
    def from_sources(
        cls,
        sources: PathLike | ParquetSource | Iterable[PathLike | ParquetSource],
        ingestor_class: IngesterClass = ArrowIngester,
    ) -> Self:
        """Connects to several sources as one dataset, one after the other.

        Args:
            sources: Paths or ``ParquetSource`` objects.
            ingestor_class: What reads the rows in the workers.
        """
        several = [sources] if isinstance(sources, str | os.PathLike | ParquetSource) else list(sources)
        paths: list[PathLike] = []
        for source in several:
            if not isinstance(source, ParquetSource):
                paths.append(source)
            elif source.splits and len(several) > 1:
                raise InvalidArgumentError(
                    "a part of a random split cannot be joined with other sources: join first, then split"
                )
            else:
                paths += source.paths
        if len(several) == 1 and isinstance(several[0], ParquetSource):
            return cls(several[0], ingestor_class)
        return cls(ParquetSource(paths), ingestor_class)

    @classmethod
    def from_spec(cls, spec: DatasetSpec | Mapping[str, Any]) -> DataConnector:
        """Makes the connector that a job's spec describes.

        Args:
            spec: What :meth:`to_spec` returned, or its JSON as a dict.

        Returns:
            A `ShardedDataConnector` if the spec says so, else a `DataConnector`.
        """
        if not isinstance(spec, DatasetSpec):
            spec = DatasetSpec.model_validate(spec)
        splits = [Split(split.weights, split.index, split.seed) for split in spec.splits]
        kind = ShardedDataConnector if spec.sharded else DataConnector
        return kind(ParquetSource(spec.paths, splits), INGESTERS[spec.ingester], spec.staging)

    def to_spec(self) -> DatasetSpec:
        """Writes the dataset down for a job's JSON spec: paths and recipe, no rows, no credentials."""
        return DatasetSpec(
            paths=self.source.paths,
            ingester="ray" if self.ingestor_class is RayDataIngester else "arrow",
            sharded=self.sharded,
            splits=tuple(
                SplitSpec(weights=split.weights, index=split.index, seed=split.seed) for split in self.source.splits
            ),
            staging=self.staging,
        )

    # What footers tell

    def schema(self) -> pa.Schema:
        """The columns: those of the first file that has rows, then those of partition directories."""
        return self.source.schema()

    def num_rows(self) -> int:
        """Number of rows."""
        return self.source.num_rows()

    def digest(self) -> str:
        """Fingerprint of the dataset from its footers: 32 hex digits, the same wherever the files are."""
        return self.source.digest()

    def plan(self, num_workers: int, seed: int, group_col: str | None = None) -> tuple[Shard, ...]:
        """Deals the rows to workers; see :func:`shoal.data.planning.row_groups.plan_shards`.

        Args:
            num_workers: Number of shards.
            seed: Seed of the shuffle.
            group_col: Column of groups that stay together, which is read for it; see :mod:`shoal.data.planning.groups`.

        Returns:
            One shard per worker, by rank.

        Raises:
            DataError: If there are fewer rows (or groups) than workers, or a file is missing or corrupt.
        """
        if group_col is not None:
            groups = [group for group in self.source.row_groups() if group.rows]
            return plan_groups(groups, find_groups(self.source, group_col), num_workers, seed)
        return plan_shards(self.source.row_groups(), num_workers, seed)

    def num_groups(self, group_col: str) -> int:
        """Number of groups of rows; their column is read for it."""
        return sum(int(begins.sum()) for begins in find_groups(self.source, group_col))

    def ingester(self) -> ArrowIngester | RayDataIngester:
        """The reader of this dataset's shards."""
        return self.ingestor_class(self.source)

    # Rows

    def iter_batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yields all rows in their natural order, one table per row group; always with Arrow, in this process.

        Args:
            columns: Columns to read, in this order; all by default.
        """
        return self.source.read(self.source.ranges(), columns)

    def to_arrow(self) -> pa.Table:
        """Reads all rows, in natural order, into one table.

        Raises:
            DataError: If files differ in their columns or types.
        """
        return self._read(None)

    def to_pandas(self, limit: int | None = None) -> pd.DataFrame:
        """Reads rows, in natural order, into a DataFrame.

        Args:
            limit: Number of rows to read at most; all by default. Only the row groups needed for it are read.
        """
        if limit is not None and limit < 0:
            raise InvalidArgumentError(f"limit must not be negative: {limit}")
        frame: pd.DataFrame = self._read(limit).to_pandas()
        return frame

    def to_torch_dataset(
        self,
        batch_size: int | None = None,
        shuffle: bool = False,
        drop_last_batch: bool = False,
        columns: Sequence[str] | None = None,
    ) -> TorchDataset:
        """Makes a torch ``IterableDataset`` of all rows, on every rank of a gang; a shard's has one rank's rows.

        Args:
            batch_size: Rows per item: a dict of column -> tensor ``[batch_size]``, or a list for text and bytes. None:
                an item is a row, a dict of column -> int, float, bool, str or bytes.
            shuffle: Whether each ``iter()`` is a new epoch in an order of its own, which the gang's seed and the rank
                tell.
            drop_last_batch: Whether a last batch of fewer rows is left out. Without `batch_size` it means nothing.
            columns: Columns to hand out, in this order; all by default.

        Returns:
            A :class:`shoal.data.torch.dataset.TorchDataset`, to be handed to a DataLoader or read as it is.

        Raises:
            DataError: If a column is missing, torch has no type for it or files differ in it, or there are no rows.
        """
        everything = DataShard(self.ingester(), Shard(self.source.ranges()), current_shard())
        return everything.to_torch_dataset(batch_size, shuffle, drop_last_batch, columns)

    def to_ray_dataset(self) -> Any:
        """Makes a lazy Ray Dataset of the same rows, in the same order.

        Returns:
            A ``ray.data.Dataset``.

        Raises:
            InvalidArgumentError: If this process is not connected to Ray.
        """
        from shoal.data.ray_data import ranges_dataset

        return ranges_dataset(self.source, self.source.ranges(), None)

    def random_split(self, weights: Sequence[float], seed: int = 0) -> list[Self]:
        """Divides the rows at random; nothing is read or copied.

        Every row is in exactly one part; the same rows, weights and seed give the same parts. To read a part, its row
        groups are read whole and the other parts' rows are left out.

        Args:
            weights: Relative sizes of the parts, such as ``[0.99, 0.01]``.
            seed: Seed of the draw.

        Returns:
            One connector per weight. They share this connector's staged data, if any.
        """
        return [type(self)(part, self.ingestor_class, self.staging) for part in self.source.split(weights, seed)]

    def discard_staging(self) -> bool:
        """Removes the staged copy of the data, if there is one; safe to call again.

        Returns:
            True if something was removed.
        """
        if self.staging is None:
            return False
        from shoal.data.staging.staged_data import discard

        return discard(self.staging)

    def _read(self, limit: int | None) -> pa.Table:
        from shoal.data.checks import check_same_schema
        from shoal.data.parquet.reading import take_rows

        schema = self.schema()
        check_same_schema(self.source, schema.names)
        ranges = self.source.ranges()
        return take_rows(self.source.read(ranges), limit) if ranges else schema.empty_table()


class ShardedDataConnector(DataConnector):
    """A dataset of which each worker of a gang reads its own part."""

    sharded: ClassVar[bool] = True

    def get_shard(self) -> DataShard:
        """This worker's part; outside a gang, all rows.

        Returns:
            The shard of this process's rank, by the plan that all ranks make for themselves from the same footers.
        """
        here = current_shard()
        plan = self.plan(here.world_size, here.seed)
        return DataShard(self.ingester(), plan[here.rank], here, max(shard.rows for shard in plan))
