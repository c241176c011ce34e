"""Decide how a boosting worker trains in the memory that it has: with all rows in memory, with XGBoost's rows on disk,
or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from shoal.boosting_libraries import BOOSTING_LIBRARIES, loaded
from shoal.data.ingest import ArrowIngester
from shoal.data.parquet.files import is_local
from shoal.data.planning import Shard
from shoal.errors import DataError, OutOfMemoryError
from shoal.training.boosting.messages import Part, Task
from shoal.training.boosting.worker_load import FLOAT32_BYTES, stored_row_bytes, worker_load
from shoal.training.host import memory
from shoal.training.sizing.plan import MARGIN, Verdict, verdict_of
from shoal.training.sizing.worker_memory import WorkerMemory, mib, worker_memory

_CACHE_FRACTION = 0.3
"""Share of the free memory that decoded rows may use, to decode them only once. The share is low, because the operating
system needs memory for pages of files, and user code may need some, too."""
_CHEAP_BYTES = 64 * 2**20
"""Maximum size of the decoded rows that a worker keeps in memory, for rows that come from local files and are read only
before the first round. Decoding takes only 0.2 s per 100 MB, but the decoded rows take as much memory as all data that
XGBoost derives from the rows."""
_LONG_GROUP = 5_000
"""Number of rows of a row group below which it is expensive to decode, because each column of a row group has a fixed
cost. Decoding takes 0.4 s per 100 MB if each row group has 5,000 rows, and 0.6 to 0.8 s with 1,400 rows (28 and 1,000
columns)."""


@dataclass(frozen=True, slots=True)
class WorkerFit:
    """How a worker trains in the memory that it has.

    Args:
        memory: Predicted memory of the worker.
        room: Bytes that the worker may allocate beside its idle process.
        on_disk: Whether XGBoost's quantised rows are on disk.
        disk_bytes: Bytes of the quantised rows, if they are on disk.
        cache_budget: Bytes of decoded rows of one dataset that the worker may keep, to decode them only once.
    """

    memory: WorkerMemory
    room: int
    on_disk: bool = False
    disk_bytes: int = 0
    cache_budget: int = 0

    def figures(self, idle: int) -> tuple[int, int]:
        """Return the predicted peak and the limit of a process that had `idle` bytes."""
        return idle + self.memory.above_idle, idle + self.room

    @property
    def verdict(self) -> Verdict:
        """Whether the worker has enough memory."""
        verdict = verdict_of(self.memory.above_idle, self.room)
        return "disk" if self.on_disk and verdict == "fits" else verdict


def fit_worker(
    framework: str, task: Task, room: int, *, workers: int = 1, all_rows: int | None = None, rank: int = 0
) -> WorkerFit:
    """Predict how a worker trains: in memory if the rows fit or the user wants it, else with XGBoost's rows on disk.

    Args:
        framework: ``xgboost`` or ``lightgbm``.
        task: Data and parameters of the worker.
        room: Bytes that the worker may allocate beside its idle process.
        workers: Number of workers.
        all_rows: Training rows of all workers; by default those of this worker.
        rank: Rank of the worker: the first one finds LightGBM's bins.
    """
    library = loaded(framework)
    load = worker_load(framework, task, workers, task.train.shard.rows if all_rows is None else all_rows, rank)
    need = worker_memory(framework, load)
    may_use_disk = library.trains_from_disk and not task.by_columns and task.external_memory is not False
    # Files reduce the bins alone, so the terms that may be much smaller than predicted do not count.
    if may_use_disk and (task.external_memory or MARGIN * need.least_above_idle > room):
        pages = (load.rows + load.eval_rows) * load.features * load.row_bin_bytes
        return WorkerFit(worker_memory(framework, load, on_disk=True), room, on_disk=True, disk_bytes=pages)
    again = library.reads_again(task)
    budget = _cache_budget(task.train, room, int(MARGIN * need.above_idle), reads=math.inf if again else library.reads)
    as_float32 = len(task.columns.names) * FLOAT32_BYTES
    row_bytes = as_float32 if library.reads_float32 else stored_row_bytes(task.train, task.columns)
    kept = task.train.shard.rows * row_bytes
    if task.by_columns or kept > budget:
        return WorkerFit(need, room, cache_budget=budget)
    need = worker_memory(framework, replace(load, cache_bytes=kept, keeps_cache=again))
    return WorkerFit(need, room, cache_budget=budget)


def _cache_budget(part: Part, room: int, needed: int, *, reads: float) -> int:
    budget = max(0, min(int(room * _CACHE_FRACTION), room - needed))
    connector = part.connector
    is_local_arrow = connector.ingestor_class is ArrowIngester and all(map(is_local, connector.source.paths))
    is_cheap = is_local_arrow and reads < math.inf and (has_long_groups(part.shard) or reads <= 2)
    return min(budget, _CHEAP_BYTES) if is_cheap else budget


def has_long_groups(shard: Shard) -> bool:
    """Return whether the row groups of a shard have so many rows that decoding them costs little per row."""
    return shard.rows >= _LONG_GROUP * len(shard.ranges)


def refuse_if_too_large(framework: str, task: Task, fit: WorkerFit) -> None:
    """Raise DataError if a worker certainly has too little memory, unless the user has forbidden to train from disk.

    Raises:
        DataError: The message contains the terms of the memory and advice.
    """
    if fit.memory.least_above_idle <= fit.room or task.external_memory is False:
        return
    disk = ", even with its quantised rows on disk" if fit.on_disk else ""
    raise DataError(
        f"{BOOSTING_LIBRARIES[framework].title} needs {mib(fit.memory.above_idle)} of memory for a worker with "
        f"{task.train.shard.rows:,} rows of {len(task.columns.features):,} features{disk} ({fit.memory.text()}), but "
        f"only {mib(fit.room)} are available: {advice(framework, task, fit)}"
    )


@contextmanager
def naming_memory(framework: str, task: Task, fit: WorkerFit, idle: int) -> Iterator[None]:
    """Raise OutOfMemoryError, with the predicted and the possible memory of a worker, if no memory can be allocated.

    Args:
        framework: ``xgboost`` or ``lightgbm``.
        task: Task of the worker.
        fit: Prediction for the worker.
        idle: Bytes of its process before it read any row.
    """
    try:
        yield
    except Exception as error:
        if not memory.is_shortage(error):
            raise
        predicted, limit = fit.figures(idle)
        raise OutOfMemoryError(
            f"{BOOSTING_LIBRARIES[framework].title}: out of memory ({error}). {needed(predicted, limit)} "
            f"({fit.memory.text()}): {advice(framework, task, fit)}"
        ) from error


def needed(predicted: int, limit: int) -> str:
    """Return the predicted and the possible memory (0: not known) of a worker, and the memory to ask for, as text."""
    had = f" and could have {mib(limit)}" if limit else ""
    most = mib(MARGIN * max(predicted, limit))
    return f"A worker was predicted to need {mib(predicted)}{had}, so give each worker at least {most}"


def advice(framework: str, task: Task, fit: WorkerFit) -> str:
    """Return what reduces the memory of a worker: more nodes only where its largest term shrinks with its rows."""
    largest = next(iter(fit.memory.terms()))
    if largest not in _TERMS_OF_COLUMNS:
        helps = ["more nodes", "larger ones", "fewer workers on each"]
    else:
        helps = ["larger nodes", "fewer workers on each", "fewer columns"]
        if "sample" in largest:
            helps.append("a smaller bin_construct_sample_cnt")
        elif int(task.params.get("max_bin") or 256) > _FEW_BINS:
            helps.append(f"max_bin={_FEW_BINS}")
    if largest == "histograms" and framework == "lightgbm":
        helps.append("histogram_pool_size")
    if not loaded(framework).trains_from_disk and largest not in _TERMS_OF_COLUMNS:
        helps.append("XGBEstimator, which can train from disk")
    return f"use {', '.join(helps[:-1])} or {helps[-1]}"


_TERMS_OF_COLUMNS = ("sketches", "histograms", "sample", "values of the sample")
"""Terms that more workers do not reduce, or reduce little."""
_FEW_BINS = 64
