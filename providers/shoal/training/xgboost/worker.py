"""Run one worker of an XGBoost training: read the rows, convert them to bins, and train together with the other
workers.

Only workers import this module, because it imports XGBoost. The driver calls `prepare`, then `boost` for each segment
(group of rounds that ends with a checkpoint), then `finish`, each on all ranks at once.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xgboost
from xgboost.callback import CallbackContainer, EarlyStopping, EvaluationMonitor
from xgboost.core import XGBoostError

from shoal.errors import DataError, TrainingError
from shoal.training.boosting import messages
from shoal.training.boosting.params import check_best_score, check_stopping_metric, refuse_namesakes
from shoal.training.boosting.rows import Batch, CheckLabel, ShardRows, in_whole_groups, label_check
from shoal.training.boosting.worker_fit import fit_worker, naming_memory, refuse_if_too_large
from shoal.training.gang.worker import PeerError
from shoal.training.host import memory
from shoal.training.host.own_process import ending_forks, is_loopback, remove_folders_of_dead, tie_to_loopback
from shoal.training.reporting import GangContext, gang_context
from shoal.training.xgboost.library import note, note_missing, stored_types
from shoal.training.xgboost.params import feature_types, is_stochastic, joined, own_message

if TYPE_CHECKING:
    from shoal.training.boosting.trials import OnRound


class Session:
    """State of the current training in this worker; the constructor reads the rows and builds the matrices.

    Args:
        task: Data and parameters of this worker.
        context: Gang context of this worker.
    """

    def __init__(self, task: messages.Task, context: GangContext) -> None:
        idle = memory.reset_peak()
        # Closing this stack removes the matrices on disk and disconnects this worker from the other workers.
        self.open = contextlib.ExitStack()
        self.task = replace(task, user_code=task.user_code.ending_forks())
        self.context = context
        self.rows: list[ShardRows] = []
        room = memory.available_bytes() // context.local_world_size
        self.fit = fit_worker("xgboost", task, room, workers=context.world_size)
        refuse_if_too_large("xgboost", task, self.fit)
        with naming_memory("xgboost", task, self.fit, idle):
            self.prepared = self._prepare(task, idle)
        self.booster: xgboost.Booster | None = None
        self._init_rounds = 0
        self._callbacks: CallbackContainer | None = None

    def _prepare(self, task: messages.Task, idle: int) -> messages.Prepared:
        began = time.perf_counter()
        self.pages = None if task.by_columns else self.open.enter_context(page_folder(on_disk=self.fit.on_disk))
        self.matrix = self._matrix(task.train, None)
        if task.feature_weights:
            self.matrix.set_info(feature_weights=np.array(task.feature_weights, np.float32))
        self.evals = [
            (self.matrix if part is task.train else self._matrix(part, self.matrix), name)
            for name, part in task.eval_sets.items()
        ]
        read = sum(rows.seconds for rows in self.rows)
        quantising = time.perf_counter() - began - read
        return messages.Prepared(
            self.rows[0].passes,
            read,
            quantising,
            idle,
            *self.fit.figures(idle),
            external_memory=self.pages is not None,
        )

    def begin_again(self, task: messages.Task) -> None:
        """Begin another training on the same matrices, whose parameters have the same ``max_bin``."""
        self.task = replace(task, user_code=task.user_code.ending_forks())
        self.fit = fit_worker("xgboost", task, self.fit.room, workers=self.context.world_size)
        self.booster = self._callbacks = None

    def boost(self, segment: messages.Segment) -> messages.Boosted:
        """Train the rounds of a segment, up to the next checkpoint, and return the result of this rank."""
        began = time.perf_counter()
        start = self._load(segment)
        booster, callbacks = self.booster, self._callbacks
        assert booster is not None
        assert callbacks is not None
        stopped = False
        reporter = messages.RoundReporter(self.context, start)
        # This loop does the same as `xgboost.train`. If each segment called `xgboost.train`, the methods
        # before_training and after_training of the user's callbacks would be called once per segment instead of once
        # per training.
        with reporter.reporting_on_error(callbacks.history):
            for iteration in range(start, segment.stop):
                with ending_forks():
                    stopped = callbacks.before_iteration(booster, iteration, self.matrix, self.evals)
                if stopped:
                    break
                booster.update(self.matrix, iteration=iteration, fobj=self.task.user_code.objective)
                with ending_forks():
                    stopped = callbacks.after_iteration(booster, iteration, self.matrix, self.evals)
                if self.task.user_code.metrics:
                    refuse_namesakes(callbacks.history, iteration + 1)
                self._check_stopping(callbacks, stopped=stopped)
                reporter.done(iteration + 1, callbacks.history)
                if stopped:
                    break
        if stopped or segment.last:
            with ending_forks():
                self.booster = booster = callbacks.after_training(booster)
        best, score = booster.attr("best_iteration"), booster.attr("best_score")
        return messages.Boosted(
            stopped=stopped,
            checkpoint=messages.Checkpoint(
                booster.num_boosted_rounds() - self._init_rounds,
                self._saved(booster),
                messages.part_of(callbacks.history),
                self._init_rounds,
            )
            if self.context.rank == 0
            else None,
            best_iteration=None if best is None else int(best),
            best_score=None if score is None else float(score),
            train_seconds=time.perf_counter() - began,
            peak_rss_bytes=memory.peak_rss_bytes(),
        )

    def _check_stopping(self, callbacks: CallbackContainer, *, stopped: bool) -> None:
        """Raise an error if a metric that stops the training early is NaN, or if its best value is infinite."""
        if not callbacks.history:
            return
        for stopping in (each for each in callbacks.callbacks if isinstance(each, EarlyStopping)):
            name = stopping.data or next(reversed(callbacks.history))
            metric = stopping.metric_name or next(reversed(callbacks.history[name]))
            values = callbacks.history[name][metric]
            check_stopping_metric(
                name,
                metric,
                values[-1],
                next(matrix for matrix, other in self.evals if other == name).get_label() if len(values) == 1 else None,
                grouped=self.task.columns.group is not None,
                classes=int(self.task.params.get("num_class") or 2),
            )
            if stopped:
                check_best_score(name, metric, stopping.best_scores[name][metric][-1])

    def close(self) -> None:
        """Free the matrices, remove their files on disk, and disconnect from the other workers."""
        self.booster = self._callbacks = None
        self.evals.clear()
        del self.matrix
        self.open.close()
        memory.trim()

    def _load(self, segment: messages.Segment) -> int:
        """Create, reload or keep the booster for a segment, and return the number of the segment's first round.

        A booster that is loaded from its bytes continues exactly like the booster in memory, unless XGBoost uses random
        numbers. The bytes do not contain the state of the random number generators. Therefore, if XGBoost uses random
        numbers, every segment begins with a booster that is loaded from bytes and has a new seed. A resumed training
        then gives the same model as a training that was not interrupted.
        """
        resume = segment.resume
        if self.booster is not None and resume is None:
            if is_stochastic(self.task.params):
                self.booster = self._booster(segment.index, self._saved(self.booster))
            return int(self.booster.num_boosted_rounds()) - self._init_rounds
        checkpoint = resume or messages.Checkpoint()
        self._init_rounds = checkpoint.init_rounds
        booster = self._booster(segment.index, checkpoint.model)
        callbacks, stopping = self._new_callbacks(checkpoint)
        with ending_forks():
            self.booster = callbacks.before_training(booster)
        if stopping:
            # XGBoost has set `starting_round` to the first round of this segment. Early stopping must count all rounds
            # from the beginning of the training, so `starting_round` is set to the rounds before the training.
            stopping.starting_round = checkpoint.init_rounds
        self._callbacks = callbacks
        return checkpoint.rounds

    def _booster(self, segment: int, model: bytes) -> xgboost.Booster:
        booster = xgboost.Booster(
            {**self.task.params, "seed": self.task.seed + segment},
            [self.matrix, *(matrix for matrix, _ in self.evals)],
            model_file=bytearray(model) if model else None,
        )
        if not model:
            note(booster, self.task.columns.categories)
        note_missing(booster, self.task.missing)
        if self.task.by_columns:
            # XGBoost compares the names with those of the matrix, which has none; see _column_matrix().
            booster.feature_names = None
        return booster

    def _new_callbacks(self, checkpoint: messages.Checkpoint) -> tuple[CallbackContainer, EarlyStopping | None]:
        """Create the callbacks of the training; early stopping also counts the rounds before the checkpoint."""
        task = self.task
        callbacks = list(task.user_code.callbacks)
        if task.print_every:
            show = self.context.log
            callbacks.append(EvaluationMonitor(period=task.print_every, logger=lambda text: show(text.rstrip("\n"))))
        stopping = None
        if task.early_stopping_rounds:
            stopping = EarlyStopping(rounds=task.early_stopping_rounds, maximize=task.direction == "maximize")
            seen = xgboost.Booster()
            stopping.starting_round = checkpoint.init_rounds
            for done in range(checkpoint.rounds):
                stopping.after_iteration(seen, done, _first_rounds(checkpoint.history, done + 1))
            callbacks.append(stopping)
        # If the objective is a function, the user's metric functions get raw scores, because XGBoost then cannot
        # convert scores to predictions. Otherwise they get predictions. `xgboost.train` does the same.
        custom = task.user_code.objective is not None
        container = CallbackContainer(callbacks, metric=joined(task.user_code.metrics), output_margin=custom)
        container.history = _first_rounds(checkpoint.history, checkpoint.rounds)
        return container, stopping

    def _saved(self, booster: xgboost.Booster) -> bytes:
        """Serialise a booster with the names of all features."""
        names = booster.feature_names
        booster.feature_names = list(self.task.columns.features)
        model = bytes(booster.save_raw("ubj"))
        booster.feature_names = names
        return model

    def _matrix(self, part: messages.Part, ref: xgboost.QuantileDMatrix | None) -> xgboost.DMatrix:
        return self._column_matrix(part) if self.task.by_columns else self._quantise(part, ref)

    def _column_matrix(self, part: messages.Part) -> xgboost.DMatrix:
        """Build the matrix of one dataset that has all rows, but only the columns of this worker.

        The matrix is no QuantileDMatrix, because that class ignores the split by columns without an error. It has no
        names of features, because XGBoost would put the rank before each name.
        """
        features = self.task.columns.features
        rank, workers = self.context.rank, self.context.world_size
        mine = features[len(features) * rank // workers : len(features) * (rank + 1) // workers]
        columns = replace(
            self.task.columns,
            features=mine,
            categories={name: each for name, each in self.task.columns.categories.items() if name in mine},
        )
        rows = ShardRows(part, columns, 0, _binary_check(self.task))
        self.rows.append(rows)
        data = np.empty((part.shard.rows, len(mine)), np.float32)
        info: dict[str, list[np.ndarray]] = {}
        start = 0
        for batch in rows:
            data[start : start + len(batch.data)] = batch.data
            start += len(batch.data)
            for name, values in _row_info(batch, columns).items():
                info.setdefault(name, []).append(values)
        matrix = xgboost.DMatrix(
            data,
            feature_types=stored_types(columns),
            nthread=self.task.params["nthread"],
            missing=self.task.missing,
            enable_categorical=bool(columns.categories),
            data_split_mode=xgboost.core.DataSplitMode.COL,
            **{name: np.concatenate(values) for name, values in info.items()},
        )
        if matrix.num_col() != len(features):
            raise TrainingError(
                f"XGBoost has {matrix.num_col()} columns instead of {len(features)}: report this as an error in shoal"
            )
        return matrix

    def _quantise(self, part: messages.Part, ref: xgboost.QuantileDMatrix | None) -> xgboost.QuantileDMatrix:
        """Build the matrix of one dataset. All workers must call this method at the same time, because they find the
        bins together.
        """
        budget = 0 if self.pages else self.fit.cache_budget
        params = self.task.params
        on_cpu = params.get("device", "cpu") == "cpu" and not self.pages
        rows = ShardRows(part, self.task.columns, budget, _binary_check(self.task), accepts_tables=on_cpu)
        self.rows.append(rows)
        # The matrix and the booster must have the same max_bin. The booster gets max_bin with `params`, and the matrix
        # gets it here.
        settings = {
            "ref": ref,
            "max_bin": int(params.get("max_bin", 256)),
            "nthread": params["nthread"],
            "missing": self.task.missing,
            "enable_categorical": bool(self.task.columns.categories),
        }
        if self.pages:
            prefix = str(self.pages / str(len(self.rows)))
            matrix = xgboost.ExtMemQuantileDMatrix(ShardIter(rows, cache_prefix=prefix), **settings)
        else:
            matrix = xgboost.QuantileDMatrix(ShardIter(rows), **settings)
            rows.forget()
        memory.trim()
        # The batches are float32 arrays or Arrow tables. The model stores the types of the dataset in either case.
        matrix.feature_types = stored_types(self.task.columns)
        return matrix


_session: Session | None = None


def prepare(task: messages.Task) -> messages.Prepared:
    """Connect to the other workers, read this worker's rows and build the matrices.

    Raises:
        DataError: The rows cannot be used for the training.
        TrainingError: XGBoost failed; the message contains XGBoost's message.
        PeerError: Another worker failed.
    """
    global _session
    context = gang_context()
    with own_errors(), contextlib.ExitStack() as stack:
        stack.enter_context(_communicator({**task.connection, "dmlc_task_id": f"{context.rank:08d}"}, context))
        _session = Session(task, context)
        _session.open.push(stack.pop_all())
        return _session.prepared


def boost(segment: messages.Segment) -> messages.Boosted:
    """Train the rounds of a segment (up to the next checkpoint) together with the other workers.

    Raises:
        TrainingError: XGBoost failed; the message contains XGBoost's message.
        PeerError: Another worker failed.
    """
    assert _session is not None
    return _boost(_session, segment)


def _boost(session: Session, segment: messages.Segment) -> messages.Boosted:
    with own_errors(), naming_memory("xgboost", session.task, session.fit, session.prepared.idle_rss_bytes):
        return session.boost(segment)


def finish() -> None:
    """End the training in this worker: free the matrices and disconnect from the other workers."""
    global _session
    session, _session = _session, None
    assert session is not None
    with own_errors():
        session.close()


class ShardIter(xgboost.DataIter):  # type: ignore[misc]
    """Iterator with which XGBoost reads the rows of a shard in batches. XGBoost reads all rows four times to
    build a quantised matrix.

    Args:
        rows: Rows of the shard.
        cache_prefix: Prefix of the file names for a matrix on disk; None: the matrix is in memory.
    """

    def __init__(self, rows: ShardRows, cache_prefix: str | None = None) -> None:
        super().__init__(cache_prefix=cache_prefix)
        self._rows = rows
        # Without these types, XGBoost would derive types from those batches that are Arrow tables.
        self._feature_types = feature_types(rows.columns.features, rows.columns.categories)
        self._batches: Iterator[Batch] = iter(())

    def reset(self) -> None:
        """Start a new pass over the rows; XGBoost calls this method before each pass."""
        # If a group is divided between two batches, XGBoost treats the parts as two groups, so in_whole_groups() first
        # moves all rows of a group into one batch.
        self._batches = in_whole_groups(self._rows)
        if not self._rows.part.shard.ranges:
            # This shard has no rows. XGBoost needs at least one batch from every worker, so it gets an empty batch.
            columns = self._rows.columns
            group = np.empty(0, np.int64) if columns.group else None
            label = np.empty((0, len(columns.labels)) if columns.other_labels else 0, np.float32)
            self._batches = iter([Batch(np.empty((0, len(columns.features)), np.float32), label, group=group)])

    def next(self, input_data: Callable[..., None]) -> bool:
        """Call XGBoost's function `input_data` with the next batch of rows; return False if no batch is left."""
        batch = next(self._batches, None)
        if batch is None:
            return False
        input_data(
            data=batch.data,
            feature_names=list(self._rows.columns.features),
            feature_types=self._feature_types,
            **_row_info(batch, self._rows.columns),
        )
        return True


def _row_info(batch: Batch, columns: messages.Columns) -> dict[str, np.ndarray]:
    """Return what XGBoost gets of each row besides its features, by the names of XGBoost's arguments."""
    given = {
        "label": batch.label,
        "weight": _weights(batch, columns),
        "base_margin": batch.base_margin,
        "qid": batch.group,
        "label_lower_bound": batch.lower,
        "label_upper_bound": batch.upper,
    }
    return {name: values for name, values in given.items() if values is not None}


def _weights(batch: Batch, columns: messages.Columns) -> np.ndarray | None:
    """Return the weights of a batch in XGBoost's form: one per row, or one per group if the rows have groups."""
    if batch.weight is None or batch.group is None or not len(batch.group):
        return batch.weight
    _, first, number = np.unique(batch.group, return_index=True, return_inverse=True)
    each: np.ndarray = batch.weight[first]
    if (each[number] != batch.weight).any():
        raise DataError(
            f'rows of the same group have different values in the weight column "{columns.weight}": XGBoost accepts '
            f'only one weight per group of "{columns.group}", so give all rows of a group the same weight'
        )
    return each


def _binary_check(task: messages.Task) -> CheckLabel | None:
    """Return a function that raises DataError if a label is not between 0 and 1; None if the objective is not binary.

    XGBoost itself also refuses such labels, but with an error message about its parameter `base_score`.
    """
    objective = str(task.params.get("objective"))
    if not objective.startswith("binary:"):
        return None
    return label_check(lambda label: (label < 0) | (label > 1), f"{objective} accepts only labels from 0 to 1")


def _first_rounds(history: messages.History, rounds: int) -> OrderedDict[str, Any]:
    """Return the metrics of the first `rounds` rounds, in the type that XGBoost's callbacks use."""
    return OrderedDict(
        (name, OrderedDict((metric, values[:rounds]) for metric, values in metrics.items()))
        for name, metrics in history.items()
    )


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raise the errors of XGBoost as shoal's errors."""
    try:
        yield
    except XGBoostError as exc:
        # If another worker was lost, the error comes from XGBoost's communication code, whose source files are in a
        # folder with the name collective. shoal raises PeerError if the message contains this path.
        kind = PeerError if "/collective/" in str(exc) else TrainingError
        raise kind(f"XGBoost: {own_message(exc)}") from exc


@contextlib.contextmanager
def _communicator(args: dict[str, Any], context: GangContext) -> Iterator[None]:
    if context.world_size == 1:
        # XGBoost needs no connections between workers if there is only one worker.
        yield
        return
    with contextlib.ExitStack() as stack:
        # When a worker connects, XGBoost prints a line such as "Task 00000000 got rank 0", which does not help users.
        # No setting of XGBoost suppresses this line, so stdout is redirected.
        with contextlib.redirect_stdout(io.StringIO()):
            stack.enter_context(xgboost.collective.CommunicatorContext(**args))
        if is_loopback(args["dmlc_tracker_uri"]):
            tie_to_loopback()
        rank = xgboost.collective.get_rank()
        if rank != context.rank:
            raise TrainingError(
                f"XGBoost assigned rank {rank} to the worker with rank {context.rank}, so the model would not be "
                "reproducible: start the training again, and report this error if it happens again"
            )
        yield


# Prefix of the folder names. The process id of the worker follows.
_PREFIX = "shoal-pages-"


@contextmanager
def page_folder(*, on_disk: bool) -> Iterator[Path | None]:
    """Agree with all workers whether the matrices are kept on disk; if so, create a folder for the matrix files.

    If one worker needs the disk, all workers use their disks. The folder is removed at the end of the context.
    """
    if not xgboost.collective.allreduce(np.array([int(on_disk)]), xgboost.collective.Op.MAX)[0]:
        yield None
        return
    remove_folders_of_dead(_PREFIX)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as folder:
        yield Path(folder)


_MOST_SESSIONS = 2
"""Number of values of ``max_bin`` whose matrices are kept. A search that varies it reads the rows again now and then,
instead of keeping as many copies of them."""


class Trials:
    """Sessions of this worker, each with the matrices of one ``max_bin``.

    Args:
        context: Context of a worker that trains alone.
    """

    def __init__(self, context: GangContext) -> None:
        self._context = context
        self._sessions: dict[Any, Session] = {}

    def boost(self, task: messages.Task, on_round: OnRound) -> Callable[[messages.Segment], messages.Boosted]:
        """Begin a training, and return the function that trains a segment of it."""
        callbacks = (*task.user_code.callbacks, _Rounds(on_round))
        task = replace(task, user_code=replace(task.user_code, callbacks=callbacks))
        key = (task.params.get("max_bin"), str(task.params.get("device", "cpu")))
        with own_errors():
            session = self._sessions.pop(key, None)
            if session is None:
                while len(self._sessions) >= _MOST_SESSIONS:
                    self._sessions.pop(next(iter(self._sessions))).close()
                session = Session(task, self._context)
            else:
                session.begin_again(task)
            self._sessions[key] = session  # the newest is the last
        return functools.partial(_boost, session)


class _Rounds(xgboost.callback.TrainingCallback):  # type: ignore[misc]
    """Callback that passes the metrics of each round on.

    Args:
        on_round: Function that gets the round and the metrics.
    """

    def __init__(self, on_round: OnRound) -> None:
        self._on_round = on_round

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        """Pass the metrics on; the function may raise an error to end the training."""
        self._on_round(epoch, evals_log)
        return False
