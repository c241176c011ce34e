"""Ray Data over the same row ranges that the plan deals out: every planned row once, none dropped."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.parquet.source import ParquetSource
from shoal.data.planning.row_groups import RowRange
from shoal.errors import DataError, InvalidArgumentError, MissingExtraError

if TYPE_CHECKING:
    import pyarrow as pa

# A worker with one CPU claims half of it (`RayDataIngester.worker_cpu_fraction`): a read task that asked for a whole
# one would wait for ever.
READ_TASK_CPUS = 0.5

# Read tasks per worker: one being read while one is being trained on; more would only fill the object store.
READ_TASKS = 2

# Name of the column that carries a data error out of a read task.
_ERROR = "__shoal_data_error__"


def iter_ranges(source: ParquetSource, ranges: Sequence[RowRange], columns: Sequence[str] | None) -> Iterator[pa.Table]:
    """Reads row ranges in Ray Data tasks.

    Args:
        source: The dataset.
        ranges: The rows.
        columns: Columns to return, in this order; all by default.

    Yields:
        One table per range, in their order.

    Raises:
        InvalidArgumentError: If this process is not connected to Ray.
        DataError: As :meth:`ParquetSource.read` says; also if Ray Data returned other rows than planned.
    """
    import pyarrow as pa

    dataset = ranges_dataset(source, ranges, columns, concurrency=min(READ_TASKS, len(ranges)), errors_as_rows=True)
    blocks = _blocks(dataset)
    # Ray Data cuts large tables into blocks; put together again, the tables (and so the model) are those of the
    # ArrowIngester.
    spare: list[pa.Table] = []
    have = 0
    for part in ranges:
        while have < part.rows:
            block = next(blocks, None)
            if block is None:
                raise DataError(f"Ray Data returned fewer rows than planned: {part.path}, row group {part.row_group}")
            spare.append(block)
            have += block.num_rows
        joined = pa.concat_tables(spare)
        yield joined.slice(0, part.rows)
        have -= part.rows
        spare = [joined.slice(part.rows)] if have else []
        del joined
    if have or any(block.num_rows for block in blocks):
        raise DataError(f"Ray Data returned more rows than planned: {source.paths[0]}")


def ranges_dataset(
    source: ParquetSource,
    ranges: Sequence[RowRange],
    columns: Sequence[str] | None,
    *,
    concurrency: int | None = None,
    errors_as_rows: bool = False,
) -> Any:
    """Makes a lazy Ray Dataset that reads row ranges, in their order.

    Args:
        source: The dataset.
        ranges: The rows; at least one range.
        columns: Columns to read; all by default.
        concurrency: Read tasks at a time; None leaves it to Ray.
        errors_as_rows: Send a data error as a row instead of raising it in the task: Ray wraps what a task raises and
            loses the cause when it pickles the wrapper.

    Returns:
        A ``ray.data.Dataset``.
    """
    ray = connected_ray()
    import pyarrow as pa

    if not ranges:
        raise DataError(f"the dataset has no rows: {source.paths[0]}")
    source.footers()  # Here, once, and not in every task.
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


def stage_dataset(dataset: Any, directory: str, checked: bool) -> None:
    """Runs a Ray Dataset and writes its rows as Parquet, from the tasks that make them.

    Args:
        dataset: A ``ray.data.Dataset``.
        directory: Where to.
        checked: Whether the user chose the directory, and so answers for all nodes reaching it.

    Raises:
        InvalidArgumentError: If the default location on this host's disk is out of other nodes' reach.
    """
    ray = connected_ray()
    from shoal.data.parquet.filesystems import is_local, resolve

    hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    if is_local(directory) and len(hosts) > 1 and not checked:
        raise InvalidArgumentError(
            f"the pool's nodes are on {len(hosts)} hosts, each with a {os.path.dirname(directory)} of its own: "
            "name a place that all of them reach with staging_location="
        )
    filesystem, inner = resolve(directory)
    dataset.write_parquet(inner, filesystem=filesystem, try_create_dir=False, compression="zstd")


def connected_ray() -> Any:
    """Imports Ray Data in a process that is connected to a cluster.

    Raises:
        MissingExtraError: If Ray is not installed.
        InvalidArgumentError: If the process is not connected. Ray would connect by itself, to any cluster that happens
            to run here.
    """
    try:
        import ray
        import ray.data
    except ImportError as exc:
        raise MissingExtraError("ray", "ray") from exc
    if not ray.is_initialized():
        raise InvalidArgumentError(
            "this process is not connected to Ray: do this in a job on a pool, or call ray.init(address=...) first "
            '(address="local" starts a Ray of its own)'
        )
    return ray


def _blocks(dataset: Any) -> Iterator[pa.Table]:
    for block in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        if block.column_names == [_ERROR]:
            raise DataError(block.column(_ERROR)[0].as_py())
        yield block
