"""The XGBoost engine, worker side: one rank reads its shard, quantises it, and boosts together with the others.

Loaded in workers only: it imports XGBoost.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xgboost
from xgboost.callback import EvaluationMonitor, TrainingCallback
from xgboost.core import XGBoostError

from shoal.data.checks import check_label_values
from shoal.data.connector import DataConnector
from shoal.data.matrix import to_matrix, to_vector
from shoal.data.plan import RowRange, Shard
from shoal.data.sizes import FLOAT32_BYTES
from shoal.errors import DataError, TrainingError
from shoal.training import memory
from shoal.training.context import TrainingContext, get_context
from shoal.training.loopback import is_loopback, tie_to_loopback
from shoal.training.params import own_message
from shoal.training.worker import PeerError

# Share of the memory that the node has left which its workers' decoded rows may take. The quantised matrix beside it is
# a quarter as large, and the row group that is being decoded comes on top.
_CACHE_FRACTION = 0.3


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one dataset that fall to one worker.

    Args:
        connector: The dataset.
        shard: This worker's rows of it; may be empty for an eval set.
    """

    connector: DataConnector
    shard: Shard


@dataclass(frozen=True, slots=True)
class Task:
    """All that one worker needs for a training.

    Args:
        train: Its rows to train on.
        eval_sets: Its rows of each eval set, by name.
        input_cols: Feature columns.
        label_col: Label column.
        weight_col: Weight column, if any.
        base_margin_col: Margin column, if any.
        params: XGBoost's parameters.
        rounds: Rounds of boosting.
        early_stopping_rounds: As for ``xgboost.train``.
        print_every: Print the metrics every so many rounds; 0: never.
        callbacks: The user's callbacks.
        collective: Arguments for ``xgboost.collective.init``.
    """

    train: Part
    eval_sets: dict[str, Part]
    input_cols: tuple[str, ...]
    label_col: str
    weight_col: str | None
    base_margin_col: str | None
    params: dict[str, Any]
    rounds: int
    early_stopping_rounds: int | None
    print_every: int
    callbacks: tuple[TrainingCallback, ...]
    collective: dict[str, str | int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one worker returns.

    Args:
        model: The booster as UBJSON; of rank 0 alone, since all have the same.
        eval_results: Eval set -> metric -> value per round; likewise.
        rounds: Rounds of boosting in the model.
        best_iteration: Best round with early stopping.
        best_score: Its metric.
        passes: How often the training rows were decoded.
        read_seconds: Seconds spent reading and decoding.
        quantise_seconds: Seconds spent building matrices beside that.
        train_seconds: Seconds spent boosting and evaluating.
        peak_rss_bytes: Highest resident size during this training.
    """

    model: bytes | None
    eval_results: dict[str, dict[str, list[float]]]
    rounds: int
    best_iteration: int | None
    best_score: float | None
    passes: int
    read_seconds: float
    quantise_seconds: float
    train_seconds: float
    peak_rss_bytes: int


def train(task: Task) -> Outcome:
    """Trains this worker's part of the model.

    Args:
        task: What to do.

    Returns:
        The model and what it took.

    Raises:
        DataError: If the rows cannot be used.
        TrainingError: If XGBoost refuses, with its message.
        PeerError: If another worker failed.
    """
    context = get_context()
    memory.reset_peak()
    try:
        with _communicator({**task.collective, "dmlc_task_id": f"{context.rank:08d}"}, context):
            return _train(task, context)
    except XGBoostError as exc:
        # The collective's errors name its source files.
        kind = PeerError if "/collective/" in str(exc) else TrainingError
        raise kind(f"XGBoost: {own_message(exc)}") from exc


def _train(task: Task, context: TrainingContext) -> Outcome:
    began = time.perf_counter()
    matrix, passes, read_seconds = _quantise(task.train, task, context, None)
    evals = []
    for name, part in task.eval_sets.items():
        if part is task.train:
            evals.append((matrix, name))
            continue
        held_out, _, seconds = _quantise(part, task, context, matrix)
        evals.append((held_out, name))
        read_seconds += seconds
    built = time.perf_counter()

    results: dict[str, dict[str, list[float]]] = {}
    callbacks = list(task.callbacks)
    if task.print_every:
        callbacks.append(EvaluationMonitor(period=task.print_every, logger=lambda text: context.log(text.rstrip("\n"))))
    booster = xgboost.train(
        task.params,
        matrix,
        task.rounds,
        evals=evals,
        evals_result=results,
        early_stopping_rounds=task.early_stopping_rounds,
        verbose_eval=False,
        callbacks=callbacks,
    )
    first = context.rank == 0
    best = booster.attr("best_iteration")
    score = booster.attr("best_score")
    return Outcome(
        model=bytes(booster.save_raw("ubj")) if first else None,
        eval_results={
            name: {metric: list(values) for metric, values in metrics.items()} for name, metrics in results.items()
        }
        if first
        else {},
        rounds=booster.num_boosted_rounds(),
        best_iteration=None if best is None else int(best),
        best_score=None if score is None else float(score),
        passes=passes,
        read_seconds=read_seconds,
        quantise_seconds=built - began - read_seconds,
        train_seconds=time.perf_counter() - built,
        peak_rss_bytes=memory.peak_rss_bytes(),
    )


def _quantise(
    part: Part, task: Task, context: TrainingContext, ref: xgboost.QuantileDMatrix | None
) -> tuple[xgboost.QuantileDMatrix, int, float]:
    """Builds a matrix together with the other workers.

    Returns:
        The matrix, the number of passes over its rows, and the seconds spent reading them.
    """
    budget = int(memory.available_bytes() * _CACHE_FRACTION / context.local_world_size)
    rows = ShardIter(part, task, budget)
    # max_bin belongs to the matrix as much as to the learner, and must be the same in both.
    matrix = xgboost.QuantileDMatrix(
        rows, ref=ref, max_bin=task.params.get("max_bin", 256), nthread=task.params["nthread"]
    )
    return matrix, rows.passes, rows.seconds


@dataclass(frozen=True, slots=True)
class _Batch:
    """One row range, decoded.

    Args:
        data: float32 ``[rows, columns]``.
        info: Label ``[rows]``, and weight and margin if there are any.
    """

    data: np.ndarray
    info: dict[str, np.ndarray] = field(default_factory=dict)


class ShardIter(xgboost.DataIter):  # type: ignore[misc]
    """Feeds a shard to XGBoost one row range at a time.

    XGBoost goes over the rows of a quantised matrix four times. Where the decoded rows fit into the budget they are
    kept from the first pass to the last; otherwise each pass reads them again, and no more than one row group is in
    memory.

    Args:
        part: The rows.
        task: The columns and what they mean.
        budget: Bytes that decoded rows may take.
    """

    def __init__(self, part: Part, task: Task, budget: int) -> None:
        super().__init__()
        self.passes = 0
        self.seconds = 0.0
        self._part = part
        self._task = task
        columns = dict.fromkeys((*task.input_cols, task.label_col, task.weight_col, task.base_margin_col))
        self._columns = [column for column in columns if column is not None]
        keep = part.shard.rows * (len(self._columns)) * FLOAT32_BYTES <= budget
        self._kept: list[_Batch] | None = [] if keep else None
        self._complete = False
        self._batches: Iterator[_Batch] = iter(())

    def reset(self) -> None:
        """Starts a pass."""
        self._batches = iter(self._kept) if self._complete and self._kept is not None else self._decode()

    def next(self, input_data: Callable[..., None]) -> bool:
        """Hands over the next batch; False at the end of a pass."""
        began = time.perf_counter()
        batch = next(self._batches, None)
        self.seconds += time.perf_counter() - began
        if batch is None:
            return False
        input_data(data=batch.data, feature_names=list(self._task.input_cols), **batch.info)
        return True

    def _decode(self) -> Iterator[_Batch]:
        self.passes += 1
        if self._kept is not None:
            # A pass that was broken off left a part.
            self._kept.clear()
        if not self._part.shard.ranges:
            # XGBoost wants at least one batch of every worker, be it one of no rows.
            yield _Batch(np.empty((0, len(self._task.input_cols)), np.float32), {"label": np.empty(0, np.float32)})
            return
        tables = self._part.connector.ingester().iter_batches(self._part.shard, self._columns)
        for rows, table in zip(self._part.shard.ranges, tables, strict=True):
            batch = self._batch(rows, table)
            if self._kept is not None:
                self._kept.append(batch)
            yield batch
        self._complete = True

    def _batch(self, rows: RowRange, table: Any) -> _Batch:
        task = self._task
        where = f"{rows.path}, row group {rows.row_group}"
        if table.num_rows != rows.rows:
            raise DataError(f"{where}: {table.num_rows} rows were read instead of {rows.rows}")
        # XGBoost itself accepts, silently, a worker that has fewer columns than its peers.
        if table.column_names != self._columns:
            raise DataError(f"{where}: the columns {table.column_names} were read instead of {self._columns}")
        label = to_vector(table, task.label_col, "float32")
        check_label_values(label, task.label_col, rows)
        _check_binary(label, task, rows)
        info = {"label": label}
        for name, column in (("weight", task.weight_col), ("base_margin", task.base_margin_col)):
            if column is not None:
                info[name] = _complete(to_vector(table, column, "float32"), name, column, rows)
        return _Batch(to_matrix(table, task.input_cols), info)


def _check_binary(label: np.ndarray, task: Task, rows: RowRange) -> None:
    """Refuses labels outside of [0, 1] for a binary objective; XGBoost would complain of its own `base_score`."""
    objective = str(task.params.get("objective"))
    if not objective.startswith("binary:"):
        return
    bad = np.flatnonzero((label < 0) | (label > 1))
    if len(bad):
        raise DataError(
            f'{rows.path}, row group {rows.row_group}: the label "{task.label_col}" is {label[bad[0]]} at row '
            f"{rows.start + int(bad[0])}, but {objective} takes labels from 0 to 1 only"
        )


def _complete(values: np.ndarray, what: str, column: str, rows: RowRange) -> np.ndarray:
    """Refuses weights and margins that are null: XGBoost takes NaN for a number."""
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise DataError(
            f'{rows.path}, row group {rows.row_group}: the {what} "{column}" is {values[bad[0]]} (or null) '
            f"in {len(bad)} of {len(values)} rows, first at row {rows.start + int(bad[0])}"
        )
    return values


@contextlib.contextmanager
def _communicator(args: dict[str, Any], context: TrainingContext) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        # "Task 00000000 got rank 0" tells nobody anything; verbosity does not silence it.
        with contextlib.redirect_stdout(io.StringIO()):
            stack.enter_context(xgboost.collective.CommunicatorContext(**args))
        if is_loopback(args["dmlc_tracker_uri"]):
            tie_to_loopback()
        rank = xgboost.collective.get_rank()
        if rank != context.rank:
            raise TrainingError(
                f"XGBoost gave rank {rank} to the worker of rank {context.rank}: the model would depend on luck"
            )
        yield
