"""Train boosting models with XGBoost or LightGBM on the cluster that this process is connected to.

A gang is the group of workers of one training. The workers first convert their rows to the library's matrices and then
train the rounds in segments. A segment is the group of rounds between two checkpoints: after each segment the driver
keeps the model as a checkpoint. If a worker or its node is lost, a new gang continues from the checkpoint. The final
model is the same, byte for byte, as if no worker had been lost.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from shoal.data.checks import decimals_of
from shoal.data.numpy_columns import find_categories
from shoal.errors import OutOfMemoryError, UnusableGpuError, WorkerLostError
from shoal.training import cluster
from shoal.training.boosting import messages
from shoal.training.boosting.library import Library, import_package, library_of
from shoal.training.boosting.params import Direction, UserCode
from shoal.training.boosting.request import TrainRequest, TrainResult, WorkerStats
from shoal.training.boosting.rows import checked_data, refuse_long_eval_sets, shard_datasets
from shoal.training.boosting.worker_fit import advice, fit_worker, needed
from shoal.training.demand import gpu_wish, wider_workers
from shoal.training.gang.child_processes import import_ahead, on_one_host
from shoal.training.gang.gang import Gang, OnNote, shared_gang
from shoal.training.gang.placement import GangShape
from shoal.training.pickling import Pickled, pickled
from shoal.training.reporting import MetricSink, OnProgress, Progress, ProgressDisplay, bounded, say
from shoal.training.run_config import NodeLeavesError, Restarts, fewer_workers
from shoal.training.timeouts import FIRST_PROGRESS_LINE_S

KeepChoice = Callable[[bool], bool]
"""Type of a function that stores whether a job uses GPUs, and returns the choice of the job's first attempt."""


def train(
    request: TrainRequest,
    *,
    user_code: UserCode | None = None,
    init_model: bytes | None = None,
    env: Mapping[str, str] | None = None,
    on_progress: OnProgress | None = None,
    metrics: MetricSink | None = None,
    keep_gpu_choice: KeepChoice = bool,
) -> TrainResult:
    """Train a model on the Ray cluster that this process is connected to, or on this machine if Ray is not used.

    The same data, parameters, seed, number of workers and number of threads give the same model, byte for byte.

    Raises:
        InvalidArgumentError: Arguments contradict each other, or a parameter is unknown or refused by the library.
        DataError: The training cannot use the datasets.
        CapacityError: The active nodes are too small for the workers, or had no free room in time, or the library
            cannot train on their GPUs.
        TrainingError: The training failed; the message contains the first cause and its rank.
        OutOfMemoryError: The workers had too little memory; the message contains the predicted and the possible memory.
        WorkerLostError: Workers or nodes were lost more often than `max_restarts` allows.
        MissingExtraError: The library or Ray is not installed.
    """
    restarts = Restarts(request.run_config)
    library = installed_library(request.framework)
    request = with_gpu_choice(request, library, keep_gpu_choice)
    training = Training(request, library, user_code or UserCode(), restarts, init_model, env, on_progress, metrics)
    return training.run()


def import_ahead_for_workers(request: TrainRequest, *, complete: bool) -> None:
    """If the workers are forked from a template, begin to import the library there while this process prepares the
    training.

    Args:
        request: The training.
        complete: Whether the workers run user code.
    """
    import_ahead(request.demand().resolved, [library_of(request.framework).worker], complete=complete)


def with_gpu_choice(request: TrainRequest, library: Library, keep_choice: KeepChoice) -> TrainRequest:
    """Return a copy of a request that says whether the training uses GPUs.

    Raises:
        InvalidArgumentError: This process is not connected to a Ray cluster.
    """
    cluster.require_connection()
    use_gpu = _uses_gpus(request, library, keep_choice)
    return request.model_copy(update={"scaling_config": request.scaling_config.model_copy(update={"use_gpu": use_gpu})})


def _uses_gpus(request: TrainRequest, library: Library, keep_choice: KeepChoice) -> bool:
    """Return whether the training uses GPUs. The choice is made once: restarts and later attempts keep it."""
    wish = gpu_wish(request.scaling_config, library.device(request))
    if wish is not None:
        return wish
    nodes = cluster.active_nodes()
    possible = bool(nodes) and all(node["gpus"] for node in nodes)
    why_cpu = library.why_cpu() if possible else None
    choice = possible and why_cpu is None
    kept = keep_choice(choice)
    if kept != choice:
        say(f"training on {'GPUs' if kept else 'CPUs'}, as the job's earlier attempts did")
    elif possible:
        say(f"training on CPUs, although every node has a GPU: {why_cpu}" if why_cpu else "training on the nodes' GPUs")
    return kept


def installed_library(framework: str) -> Library:
    """Return the interface of a boosting library.

    Raises:
        MissingExtraError: The library or Ray is not installed.
        ImportError: One of them cannot be imported.
    """
    library = library_of(framework)
    for package in ["ray", framework] if cluster.register() is None else [framework]:
        import_package(package)
    return library


@dataclass
class Training:
    """A training whose data and parameters are checked, and which has not started yet.

    `init_model`, `env`, `on_progress` and `metrics` are those of :func:`train`.
    """

    request: TrainRequest
    library: Library
    user_code: UserCode
    restarts: Restarts
    init_model: bytes | None = None
    env: Mapping[str, str] | None = None
    on_progress: OnProgress | None = None
    metrics: MetricSink | None = None

    def __post_init__(self) -> None:
        request, library, user_code, init_model = self.request, self.library, self.user_code, self.init_model
        self._logged = 0
        self._first: messages.Task | None = None
        self._predicted = self._limit = 0
        self._direction: Direction | None = None
        self._train, self._eval_sets = checked_data(request)
        if decimals := decimals_of(self._train.source, request.columns.names):
            say(f"decimal columns are trained as float64: {', '.join(decimals)}")
        self._size = request.demand().resolved()
        # Restarts keep this choice, because it changes the model.
        self._joined = (
            self._size.num_workers > 1
            and not self._size.gpus_per_worker
            and library.joins_workers(request, user_code, self._train.num_rows())
            and on_one_host(self._size)
        )
        if self._joined:
            say(
                f"the table is wide: one worker with {self._shape.threads} threads trains in place of "
                f"{self._size.num_workers} workers on this host"
            )
        assert (init_model is None) == (request.init_model is None), "the caller loads the model that a request names"
        continued = None if init_model is None else library.init_model(init_model)
        if continued is not None:
            continued.check(request, self._train.source)
        self._params, self._seed = library.params(request, self._shape, user_code, continued)
        rows = sum(dataset.num_rows() for dataset in (self._train, *self._eval_sets.values()))
        # The answer does not depend on the number of workers, so a training keeps it when it continues with fewer.
        self._by_columns = library.splits_columns(request, self._params, user_code, rows)
        if not self._by_columns and (advice := library.inexact_leaves(self._params, self._shape.num_workers)):
            say(advice)
        # Workers with all rows compute all metrics exactly.
        self._whole_metrics = "" if self._by_columns else library.whole_metrics(request, self._params, user_code)
        if self._whole_metrics and self._shape.num_workers > 1:
            refuse_long_eval_sets(self._eval_sets, self._whole_metrics)
        # The driver reads the categories once, before the first attempt. All workers, including those that start after
        # a restart, therefore convert each category to the same code.
        categorical = [name for name in request.input_cols if name in request.categorical_cols]
        categories = find_categories(self._train.source, categorical)
        self._checkpoint = messages.Checkpoint()
        if continued is not None:
            categories = continued.categories_for(categories)
            self._checkpoint = messages.Checkpoint(model=continued.content, init_rounds=continued.rounds)
        schema = self._train.schema()
        types = {name: str(schema.field(name).type) for name in request.input_cols}
        self._columns = replace(request.columns, categories=categories, types=types)
        self._sent: Any = Pickled(pickled(user_code, "callbacks, objective or metrics")) if user_code else user_code

    @property
    def _shape(self) -> GangShape:
        """Number and size of the workers that train."""
        return self._size.as_one_worker() if self._joined else self._size

    def run(self) -> TrainResult:
        """Train to the end; each time a worker is lost, continue from the last checkpoint with new workers."""
        self._direction = self.library.stopping_direction(self.request, self._params, self.user_code)
        return self.restarts.run(
            self._attempt_in_memory,
            checkpoint=lambda: f"round {self._checkpoint.rounds} of {self.request.n_estimators}",
            shrink=self._shrink,
        )

    def _shrink(self) -> str | None:
        """Reduce the number of workers to the number that fits on the active nodes, if at least `min_workers` fit."""
        fewer = fewer_workers(self._size, self.request.run_config.min_workers, self._clamped)
        self._size = fewer or self._size
        return None if fewer is None else f"{fewer.num_workers} workers"

    def _attempt_in_memory(self) -> TrainResult:
        """Train, and raise OutOfMemoryError if the workers have ended for lack of memory, as they would again."""
        try:
            return self._attempt()
        except WorkerLostError as error:
            if not error.out_of_memory or self._first is None:
                raise
            framework, workers = self.request.framework, self._shape.num_workers
            fit = fit_worker(framework, self._first, 2**62, workers=workers, all_rows=self._train.num_rows())
            figures = needed(self._predicted or fit.memory.peak, self._limit)
            raise OutOfMemoryError(f"{error}. {figures}: {advice(framework, self._first, fit)}") from error

    def _attempt(self) -> TrainResult:
        request, size = self.request, self._shape
        by_columns = self._by_columns and size.num_workers > 1
        whole = bool(self._whole_metrics) and size.num_workers > 1
        seed, group_col = request.run_config.seed, request.group_col
        parts = shard_datasets(
            self._train, self._eval_sets, size.num_workers, seed, group_col, by_columns=by_columns, whole=whole
        )
        with shared_gang(size, timeout=self.restarts.wait_s, env=self.env) as gang:
            # The user's code may use scikit-learn and the library's estimators.
            gang.preload([self.library.worker], complete=bool(self.user_code))
            self._check_gpus(gang)
            rows = self._train.num_rows()
            nodes = [worker.node for worker in gang.workers]
            if not by_columns and (advice := wider_workers(size, nodes, rows)):
                say(advice)
            tasks = [
                self._task(train, evals, connection, by_columns=by_columns)
                for (train, evals), connection in zip(parts, self.library.connect(gang), strict=True)
            ]
            self._first, self._predicted, self._limit = tasks[0], 0, 0
            prepared = self.library.prepare(partial(self._on_all, gang), tasks)
            workers = [
                WorkerStats(
                    rank=info.rank,
                    node=info.node,
                    rows=task.train.shard.rows,
                    **asdict(each),
                    train_seconds=0.0,
                    peak_rss_bytes=0,
                )
                for info, task, each in zip(gang.workers, tasks, prepared, strict=True)
            ]
            self._predicted = max(each.predicted_bytes for each in workers)
            self._limit = min(each.limit_bytes for each in workers)
            last = self._boost(gang, workers)
            self._on_all(gang, "finish", [()] * len(workers))
        return TrainResult(
            framework=request.framework,
            model=self._checkpoint.model,
            params=self.library.merged(request),
            eval_results=self._checkpoint.history,
            best_iteration=last.best_iteration,
            best_score=last.best_score,
            rounds=self._checkpoint.init_rounds + self._checkpoint.rounds,
            init_rounds=self._checkpoint.init_rounds,
            rows=rows,
            num_workers=size.num_workers,
            threads_per_worker=size.threads,
            seconds=self.restarts.seconds,
            restarts=self.restarts.count,
            workers=tuple(workers),
        )

    def alone(self) -> messages.Task:
        """Return the task of a worker that trains alone on all rows."""
        seed, group_col = self.request.run_config.seed, self.request.group_col
        [(train, eval_sets)] = shard_datasets(self._train, self._eval_sets, 1, seed, group_col)
        return self._task(train, eval_sets, {}, by_columns=False)

    def _task(
        self, train: messages.Part, eval_sets: dict[str, messages.Part], connection: dict[str, Any], *, by_columns: bool
    ) -> messages.Task:
        request = self.request
        return messages.Task(
            train=train,
            eval_sets=eval_sets,
            columns=self._columns,
            params=self._params,
            seed=self._seed,
            early_stopping_rounds=request.early_stopping_rounds,
            direction=self._direction,
            # verbose_eval is a bool, None or a number. int() converts True to 1, which prints after every round; False,
            # None and 0 become 0, which prints nothing.
            print_every=int(request.verbose_eval or 0),
            user_code=self._sent,
            external_memory=request.external_memory,
            missing=request.missing,
            feature_weights=request.weights_of_features,
            by_columns=by_columns,
            connection=connection,
        )

    def _check_gpus(self, gang: Gang) -> None:
        """Raise UnusableGpuError if a worker cannot use its GPU. Without this check, XGBoost would only print a warning
        and train on the CPU."""
        if not self._size.gpus_per_worker:
            return
        check = self.library.gpu_problem
        problems = gang.run(check, [(self._params,)] * len(gang.workers), timeout=self.restarts.timeout)
        for worker, problem in zip(gang.workers, problems, strict=True):
            if problem is not None:
                raise UnusableGpuError(f"the training cannot use the GPU of node {worker.node}: {problem}")

    def _boost(self, gang: Gang, workers: list[WorkerStats]) -> messages.Boosted:
        """Train the rounds after the last checkpoint, in segments (groups of rounds), and add to the figures of the
        workers; return rank 0's last result."""
        rounds, every = self.request.n_estimators, self.request.run_config.checkpoint_every
        resume: messages.Checkpoint | None = self._checkpoint
        if self.metrics and self._logged > self._checkpoint.rounds:
            self.metrics.continued()
        self._logged = self._checkpoint.rounds
        # With verbose_eval the workers print the metrics themselves, so the driver prints no progress lines.
        first_line_s = math.inf if self.request.verbose_eval else FIRST_PROGRESS_LINE_S
        with ProgressDisplay(first_line_s=first_line_s, on_progress=self.on_progress) as display:
            while True:
                segment = messages.next_segment(self._checkpoint.rounds, rounds, every, resume)
                answers: list[messages.Boosted] = self._on_all(
                    gang,
                    "boost",
                    [(segment,)] * len(workers),
                    on_note=lambda _, note: self._report(display, note["first"], note["rounds"], note["metrics"]),
                )
                workers[:] = [worker.after(answer) for worker, answer in zip(workers, answers, strict=True)]
                first = answers[0]
                assert first.checkpoint is not None, "rank 0 returns the model"
                self._checkpoint, resume = first.checkpoint, None
                self._report(display, 0, self._checkpoint.rounds, self._checkpoint.history)
                if segment.last or first.stopped:
                    return first
                if nodes := gang.can_move_from():
                    raise NodeLeavesError(f"node {', '.join(nodes)} will shut down soon")

    def _report(self, display: ProgressDisplay, first: int, rounds: int, history: messages.History) -> None:
        """Pass on the metrics of the rounds from `first` on that are new, and the progress."""
        each = messages.by_round(history)
        for step, values in enumerate(each, first):
            if self.metrics and step >= self._logged:
                self.metrics.log(0, values, step)
        self._logged = max(self._logged, first + len(each))
        display.show(Progress(rounds, self.request.n_estimators, "rounds", bounded(each[-1]) if each else {}))

    def _on_all(
        self, gang: Gang, name: str, args: Sequence[tuple[Any, ...]], on_note: OnNote | None = None
    ) -> list[Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(self.library.worker), name)
        return gang.run(function, args, timeout=self.restarts.timeout, on_note=on_note)

    def _clamped(self) -> GangShape:
        """Compute how many workers of the same size fit on the active nodes, at most the same number."""
        cpus = round(self._size.cpus_per_worker + self._size.reading_cpus)
        wanted = {"num_workers": self._size.num_workers, "num_cpu_per_worker": cpus}
        return self.request.demand_of(self.request.scaling_config.model_copy(update=wanted)).resolved(clamp=True)
