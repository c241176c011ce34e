"""Define the ingesters: the classes that read the rows of a worker's shard, one with Arrow and one with Ray Data."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from shoal.data.parquet.source import ParquetSource
from shoal.data.planning import RowRange, Shard
from shoal.errors import DataError, InvalidArgumentError, MissingExtraError
from shoal.lazy_imports import pa, ray


class ArrowIngester:
    """Ingester that reads row groups from storage with Arrow, one at a time, in the worker's own process.

    Args:
        source: The dataset.
    """

    name: ClassVar[str] = "arrow"

    def __init__(self, source: ParquetSource) -> None:
        self.source = source

    def iter_batches(self, shard: Shard, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read the rows of a shard (one worker's rows) in order. Yield one table per row range (rows of one row group).

        Only one table is in memory at a time.

        Args:
            shard: The rows to read.
            columns: Columns to read, in this order; all by default.

        Raises:
            DataError: If a file is gone, corrupt, has changed since the plan was made, or lacks a column. The message
                names the file.
        """
        return self.source.read(shard.ranges, columns)

    def iter_pieces(self, shard: Shard, columns: Sequence[str] | None = None) -> Iterator[tuple[RowRange, pa.Table]]:
        """Read the rows of a shard in order. Yield each row range or, of a long row group, its pieces, and the rows."""
        return self.source.read_pieces(shard.ranges, columns)


class RayDataIngester:
    """Ingester that reads row groups in Ray Data tasks, outside the worker's process.

    Each worker gets the same rows and tables as with `ArrowIngester`. Each worker runs one Ray Data stream over the row
    ranges of its shard. Ray's own sharding (``streaming_split(equal=True)``) is not used, because it drops rows.

    Args:
        source: The dataset.
    """

    name: ClassVar[str] = "ray"

    def __init__(self, source: ParquetSource) -> None:
        self.source = source

    def iter_batches(self, shard: Shard, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read the rows of a shard (one worker's rows) in order. Yield one table per row range (rows of one row group).

        At most two tables are read ahead.

        Args:
            shard: The rows to read.
            columns: Columns to read, in this order; all by default.

        Raises:
            InvalidArgumentError: If this process is not connected to Ray.
            DataError: If a file is gone, corrupt, has changed since the plan was made, or lacks a column. The message
                names the file.
        """

        return iter_ranges(self.source, shard.ranges, columns)

    def iter_pieces(self, shard: Shard, columns: Sequence[str] | None = None) -> Iterator[tuple[RowRange, pa.Table]]:
        """Read the rows of a shard in order. Yield each row range and its rows."""
        return zip(shard.ranges, self.iter_batches(shard, columns), strict=True)


Ingester = ArrowIngester | RayDataIngester
IngesterClass = type[ArrowIngester] | type[RayDataIngester]
INGESTERS: dict[str, IngesterClass] = {each.name: each for each in (ArrowIngester, RayDataIngester)}


# Number of CPUs that a read task requests. A worker with one CPU reserves half of this CPU for itself, see
# `cpus_to_read`, so a read task that requested a whole CPU would wait forever.
READ_TASK_CPUS = 0.5

# Seconds without the first rows after which a line says that no CPU is free. Ray starts a process for a task in some
# seconds.
WAIT_LINE_S = 20.0

# Number of read tasks that each worker runs at the same time. With two tasks, the next table is read while the worker
# uses the current table. More tasks would only fill Ray's object store.
READ_TASKS = 2

# Name of the column in which a read task returns the message of a DataError, instead of raising the error.
_ERROR = "__shoal_data_error__"


def cpus_to_read(cpus: float, streams: int) -> float:
    """Return the number of CPUs that a worker must leave free for the tasks of Ray Data that read its rows.

    A worker reserves the rest of its CPUs. If the workers reserved all CPUs, the tasks would wait forever. In a test on
    a host with two CPUs, two workers that reserved 0.8 CPUs each left too little.

    Args:
        cpus: CPUs of the worker.
        streams: Number of datasets that the worker may read with Ray Data at the same time. A task that waits until its
            rows are used keeps its CPU, so each stream needs a CPU share of its own.

    Returns:
        Half of the worker's CPUs, or more if the streams need more, even more than `cpus`; 0 without a stream.
    """
    return max(cpus / 2, streams * READ_TASK_CPUS) if streams else 0.0


def iter_ranges(source: ParquetSource, ranges: Sequence[RowRange], columns: Sequence[str] | None) -> Iterator[pa.Table]:
    """Read row ranges (rows of one row group) in Ray Data tasks, and yield one table per range.

    Raises:
        InvalidArgumentError: If this process is not connected to Ray.
        DataError: If :meth:`ParquetSource.read` raises a DataError in a task, or Ray Data returns more or fewer rows
            than were requested.
    """
    dataset = ranges_dataset(source, ranges, columns, concurrency=min(READ_TASKS, len(ranges)), errors_as_rows=True)
    blocks = _blocks(dataset, source.place)
    # Ray Data splits a large table into several smaller ones (blocks). The blocks are concatenated again, so that the
    # tables, and therefore the model, are the same as with the ArrowIngester.
    spare: list[pa.Table] = []
    have = 0
    for part in ranges:
        while have < part.rows:
            if (block := next(blocks, None)) is None:
                raise DataError(
                    f"Ray Data returned fewer rows than were requested from {part.path}, row group "
                    f"{part.row_group}: use ingestor_class=ArrowIngester"
                )
            spare.append(block)
            have += block.num_rows
        joined = pa.concat_tables(spare)
        yield joined.slice(0, part.rows)
        have -= part.rows
        spare = [joined.slice(part.rows)] if have else []
        del joined
    if have or any(block.num_rows for block in blocks):
        raise DataError(
            f"Ray Data returned more rows than were requested from {source.place}: use ingestor_class=ArrowIngester"
        )


def ranges_dataset(
    source: ParquetSource,
    ranges: Sequence[RowRange],
    columns: Sequence[str] | None,
    *,
    concurrency: int | None = None,
    errors_as_rows: bool = False,
) -> Any:
    """Return a lazy Ray Dataset that reads row ranges in the given order.

    Raises:
        MissingExtraError: If Ray is not installed.
        InvalidArgumentError: If this process is not connected to Ray.
        DataError: If `ranges` is empty.
    """
    ray = connected_ray()
    if not ranges:
        raise DataError(
            f"the dataset has no rows: {source.place}; check the paths, and the program that writes the files"
        )
    source.footers()  # The footers are read now, so that the pickled source contains them and no task reads them again.
    wanted = list(ranges)

    def read(batch: Any) -> Any:
        try:
            return pa.concat_tables(source.read([wanted[i.as_py()] for i in batch.column("range")], columns))
        except DataError as exc:
            if not errors_as_rows:
                raise
            return pa.table({_ERROR: [str(exc)]})

    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    with ray.data.DataContext.current(context):
        dataset = ray.data.from_items([{"range": i} for i in range(len(wanted))], override_num_blocks=len(wanted))
        return dataset.map_batches(
            read,
            batch_size=1,
            batch_format="pyarrow",
            num_cpus=READ_TASK_CPUS,
            compute=ray.data.TaskPoolStrategy(size=concurrency),
        )


def connected_ray() -> Any:
    """Import Ray Data, check that this process is connected to a Ray cluster, and return the module ``ray``.

    Raises:
        MissingExtraError: If Ray is not installed.
        InvalidArgumentError: If this process is not connected. Without this check, Ray would connect to any cluster
            that runs on this host.
    """
    try:
        import ray
        import ray.data
    except ImportError as exc:
        raise MissingExtraError("ray", "ray") from exc
    if not ray.is_initialized():
        raise InvalidArgumentError(
            "this process is not connected to Ray: run this code in a job on a pool, or call ray.init(address=...) "
            'first (address="local" starts a new Ray cluster)'
        )
    return ray


def _blocks(dataset: Any, path: str) -> Iterator[pa.Table]:
    timer = threading.Timer(WAIT_LINE_S, _say_if_no_cpu_is_free, [path])
    timer.daemon = True
    timer.start()
    try:
        for block in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
            timer.cancel()
            if block.column_names == [_ERROR]:
                raise DataError(block.column(_ERROR)[0].as_py())
            yield block
    finally:
        timer.cancel()


def _say_if_no_cpu_is_free(path: str) -> None:
    free, every = (resources().get("CPU", 0.0) for resources in (ray.available_resources, ray.cluster_resources))
    if free < READ_TASK_CPUS:
        print(
            f"Ray Data waits for a CPU to read {path}: {every - free:g} of the cluster's {every:g} CPUs are reserved, "
            f"and a read task needs {READ_TASK_CPUS:g}. It waits until other work releases CPUs: reserve fewer CPUs "
            "for the workers (num_cpus), or use ingestor_class=ArrowIngester, which reads in the worker itself",
            flush=True,
        )
