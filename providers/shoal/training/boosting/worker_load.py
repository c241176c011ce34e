"""Compute what the memory of a boosting worker depends on from its task: rows, columns and parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from shoal.boosting_libraries import loaded
from shoal.data.parquet.source import ParquetSource
from shoal.lazy_imports import pa
from shoal.training.boosting.messages import Columns, Part, Task
from shoal.training.sizing.worker_memory import WorkerLoad

FLOAT32_BYTES = 4
_SAMPLED_GROUPS, _SAMPLED_ROWS = 3, 1_000
"""Number of row groups whose first rows show how long the texts are, and number of these rows."""


def stored_row_bytes(part: Part, columns: Columns) -> int:
    """Return the size of a row whose features have the types of the files; categories are int32 codes."""
    schema = part.connector.schema()
    types = [schema.field(name).type for name in columns.features if name not in columns.categories]
    # The type null has no width.
    stored = sum(0 if str(type_) == "null" else math.ceil(type_.bit_width / 8) for type_ in types)
    return stored + (len(columns.names) - len(types)) * FLOAT32_BYTES


@lru_cache(maxsize=4)
def text_bytes(source: ParquetSource, columns: tuple[str, ...]) -> int:
    """Return the mean size of the texts among some columns in a row, from the first rows of a few row groups: footers
    show only the size of the encoded texts."""
    kinds = pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view
    texts = [name for name in columns if any(is_kind(source.schema().field(name).type) for is_kind in kinds)]
    if not texts or not (ranges := source.ranges()):
        return 0
    some = ranges[:: math.ceil(len(ranges) / _SAMPLED_GROUPS)]
    tables = [*source.read([each.piece(0, min(each.rows, _SAMPLED_ROWS)) for each in some], texts)]
    return int(sum(table.nbytes for table in tables) / sum(table.num_rows for table in tables))


def worker_load(framework: str, task: Task, workers: int, all_rows: int, rank: int) -> WorkerLoad:
    """Return what the memory of a boosting worker depends on.

    Args:
        framework: ``xgboost`` or ``lightgbm``.
        task: Data and parameters of the worker.
        workers: Number of workers.
        all_rows: Training rows of all workers.
        rank: Rank of the worker.
    """
    columns, rows = task.columns, task.train.shard.rows
    parts = [task.train, *{id(part): part for part in task.eval_sets.values() if part is not task.train}.values()]
    features = len(columns.features)
    if task.by_columns:
        features = math.ceil(features / workers)
    row_bytes = stored_row_bytes(task.train, columns)
    read_bytes = row_bytes + text_bytes(task.train.connector.source, tuple(columns.categories))
    longest = max((each.rows for part in parts for each in part.shard.ranges), default=0)
    # The first rank finds LightGBM's bins in the samples of all ranks.
    share = 1.0 if rank == 0 else rows / all_rows
    return WorkerLoad(
        rows=rows,
        eval_rows=sum(part.shard.rows for part in parts[1:]),
        features=features,
        feature_bytes=row_bytes * features // max(1, len(columns.names)),
        batch_bytes=longest * read_bytes * features // len(columns.features),
        workers=workers,
        by_columns=task.by_columns,
        **loaded(framework).memory_fields(task, features, all_rows, share),
    )


def all_bins(columns: Columns, max_bin: int, features: int) -> int:
    """Return the number of bins of all feature columns; each category of a categorical column is a bin."""
    numbers = features - min(features, len(columns.categories))
    return numbers * max_bin + sum(map(len, columns.categories.values()))


def is_dense(part: Part, features: Iterable[str]) -> bool:
    """Return whether the first row group of a shard has no null in a feature, as far as its footer tells."""
    if not part.shard.ranges:
        return True
    first, names = part.shard.ranges[0], set(features)
    group = part.connector.source.metadata(first.path).row_group(first.row_group)
    chunks = (group.column(number) for number in range(group.num_columns))
    return not any(
        chunk.is_stats_set and chunk.statistics.null_count for chunk in chunks if chunk.path_in_schema in names
    )
