"""Train boosting models with XGBoost or LightGBM on the Ray cluster that this process is connected to.

The workers of a gang build their matrices and then train one segment of rounds after the other. After each segment the
driver keeps a checkpoint. If a worker or its node is lost, a new gang continues from the checkpoint. The final model is
the same, byte for byte, as without the loss.
"""

from __future__ import annotations

import importlib
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from shoal.data.categories import find_categories
from shoal.errors import InvalidArgumentError, MissingExtraError, TrainingError
from shoal.training import cluster
from shoal.training.boosting.inputs import REPLICATED_ROWS, checked_data, shard_datasets
from shoal.training.boosting.progress import latest
from shoal.training.boosting.request import TrainRequest, TrainResult, WorkerStats
from shoal.training.boosting.task import Boosted, Checkpoint, Prepared, Segment, Task
from shoal.training.boosting.user_code import UserCode
from shoal.training.gang.gang import WAIT_SECONDS, GangShape, OnNote
from shoal.training.gang.shared import shared_gang
from shoal.training.progress import OnProgress, Progress, ProgressDisplay
from shoal.training.restarts import Resilience
from shoal.training.scaling import GangSize, resolve_size

if TYPE_CHECKING:
    from shoal.training.gang.gang import Gang

_LIBRARIES = {
    "xgboost": ("shoal.training.xgboost.engine", "XGBoost"),
    "lightgbm": ("shoal.training.lightgbm.engine", "LightGBM"),
}

_FEWEST_ROUNDS = 50
"""Minimum number of rounds of a segment of default length. So many rounds take seconds, a checkpoint milliseconds."""
_SEGMENTS = 4
"""Default number of segments of a longer training. With sampling each segment begins with a prediction of all rows,
which costs about a tenth of a round for each round before the segment."""

_FIRST_LINE_S = 10.0
"""Seconds until the first line about the progress: a training of a few seconds prints none."""

OnAll = Callable[[str, Sequence[Any]], list[Any]]
"""Function that calls a function of the workers' module on all ranks at once. Its arguments are the function's name and
one argument per rank."""


class Library(Protocol):
    """The driver's interface to a boosting library; the workers' side is the module named by `worker`."""

    package: str
    """Name of the Python package to import."""
    extra: str
    """Name of shoal's extra that installs the package."""
    worker: str
    """Module that runs in the workers, with `boost(Segment)`, `finish()` and the functions that `prepare` calls."""

    def device(self, request: TrainRequest) -> str | None:
        """Return the device in the parameters, or None if they contain none."""

    def params(self, request: TrainRequest, size: GangSize, user_code: UserCode) -> tuple[dict[str, Any], int]:
        """Return the parameters of every worker and the first segment's seed, after the library has checked them."""

    def connect(self, gang: Gang) -> list[dict[str, Any]]:
        """Return the settings, by rank, with which the library's workers connect to each other."""

    def prepare(self, on_all: OnAll, tasks: Sequence[Task]) -> list[Prepared]:
        """Let the workers build their matrices."""


def train(
    request: TrainRequest,
    *,
    user_code: UserCode | None = None,
    env: Mapping[str, str] | None = None,
    on_progress: OnProgress | None = None,
) -> TrainResult:
    """Train a model on the Ray cluster that this process is connected to.

    The same data, parameters, seed, number of workers and number of threads give the same model, byte for byte.

    Args:
        request: Datasets, parameters and limits of the training.
        user_code: The user's callbacks, objective and metrics; every worker gets a copy.
        env: Environment variables for the workers; may contain credentials. The variables are sent from process to
            process and are not stored.
        on_progress: Function to call with the finished rounds, at most every 2 s and at the end of each segment.

    Returns:
        The model, its metrics and the training statistics.

    Raises:
        InvalidArgumentError: Arguments contradict each other, or a parameter is unknown.
        DataError: The training cannot use the datasets.
        CapacityError: The active nodes are too small for the workers, or had no free room in time.
        TrainingError: The library refuses a parameter, or the training failed; the message contains the first cause
            and its rank.
        WorkerLostError: Workers or nodes were lost more often than `max_restarts` allows.
        MissingExtraError: The library or Ray is not installed.
    """
    began = time.monotonic()
    library = _library(request.framework)
    if not cluster.is_connected():
        raise InvalidArgumentError("this process is not connected to a Ray cluster: call ray.init(address=...) first")
    training = _Training(request, library, user_code or UserCode(), dict(env or {}), on_progress, began)
    return training.run()


def _library(framework: str) -> Library:
    module, name = _LIBRARIES[framework]
    library: Library = getattr(importlib.import_module(module), name)()
    for package, extra in (("ray", "ray"), (library.package, library.extra)):
        try:
            importlib.import_module(package)
        except ImportError as exc:
            raise MissingExtraError(package, extra) from exc
    return library


def segment_length(rounds: int, wish: int | None) -> int:
    """Return the number of rounds between two checkpoints.

    Args:
        rounds: Number of rounds of the whole training.
        wish: Value of `RunConfig.checkpoint_every`; None selects the default length.
    """
    return wish or max(_FEWEST_ROUNDS, -(-rounds // _SEGMENTS))


@dataclass(slots=True)
class _Worker:
    """Statistics of one rank."""

    prepared: Prepared
    train_seconds: float = 0.0
    peak_rss_bytes: int = 0

    def add(self, boosted: Boosted) -> None:
        self.train_seconds += boosted.train_seconds
        self.peak_rss_bytes = max(self.peak_rss_bytes, boosted.peak_rss_bytes)


class _Training:
    def __init__(
        self,
        request: TrainRequest,
        library: Library,
        user_code: UserCode,
        env: dict[str, str],
        on_progress: OnProgress | None,
        began: float,
    ) -> None:
        self._request = request
        self._library = library
        self._user_code = user_code
        self._env = env
        self._on_progress = on_progress
        self._began = began
        self._resilience = Resilience(request.run_config, began)
        self._train, self._eval_sets = checked_data(request)
        self._size = self._resolve()
        self._params, self._seed = library.params(request, self._size, user_code)
        # The driver finds the categories once, for all workers and for the gangs after a restart.
        categorical = [name for name in request.input_cols if name in request.categorical_cols]
        categories = find_categories(self._train.source, categorical)
        self._columns = replace(request.columns, categories=categories)
        self._checkpoint = Checkpoint()

    def run(self) -> TrainResult:
        """Train to the end, and continue from the last checkpoint after each lost worker."""
        return self._resilience.run(self._attempt, checkpoint=self._resume_point, shrink=self._shrink)

    def _resume_point(self) -> str:
        return f"round {self._checkpoint.rounds} of {self._request.n_estimators}"

    def _shrink(self) -> str | None:
        """Reduce the number of workers to those for which there is room, if `min_workers` allows this."""
        min_workers = self._request.run_config.min_workers
        if min_workers is None:
            return None
        with warnings.catch_warnings(action="ignore"):
            size = self._resolve(again=True)
        if not min_workers <= size.num_workers < self._size.num_workers:
            return None
        self._size = size
        return f"{size.num_workers} workers"

    def _attempt(self) -> TrainResult:
        request, size = self._request, self._size
        whole = request.framework in REPLICATED_ROWS
        seed, group_col = request.run_config.seed, request.group_col
        parts = shard_datasets(
            self._train,
            self._eval_sets,
            size.num_workers,
            seed,
            group_col,
            whole=whole,
            none_empty=bool(self._user_code.metrics),
        )
        shape = GangShape(size.num_workers, size.cpus_per_worker, size.gpus_per_worker, trim_memory=True)
        with shared_gang(shape, timeout=min(WAIT_SECONDS, self._resilience.left(WAIT_SECONDS)), env=self._env) as gang:
            gang.preload([self._library.worker])
            tasks = [
                Task(
                    train=train,
                    eval_sets=evals,
                    columns=self._columns,
                    params=self._params,
                    seed=self._seed,
                    early_stopping_rounds=request.early_stopping_rounds,
                    # False, None and 0 print nothing; True prints every round.
                    print_every=int(request.verbose_eval or 0),
                    user_code=self._user_code,
                    external_memory=request.external_memory,
                    connection=connection,
                )
                for (train, evals), connection in zip(parts, self._library.connect(gang), strict=True)
            ]
            prepared = self._library.prepare(partial(self._on_all, gang), tasks)
            workers = [_Worker(each) for each in prepared]
            last = self._boost(gang, workers)
            self._on_all(gang, "finish")
            stats = tuple(
                WorkerStats(
                    rank=info.rank,
                    node=info.node,
                    rows=task.train.shard.rows,
                    passes=worker.prepared.passes,
                    external_memory=worker.prepared.external_memory,
                    read_seconds=worker.prepared.read_seconds,
                    quantise_seconds=worker.prepared.quantise_seconds,
                    train_seconds=worker.train_seconds,
                    idle_rss_bytes=worker.prepared.idle_rss_bytes,
                    peak_rss_bytes=worker.peak_rss_bytes,
                )
                for info, task, worker in zip(gang.workers, tasks, workers, strict=True)
            )
        return TrainResult(
            framework=request.framework,
            model=self._checkpoint.model,
            eval_results=self._checkpoint.history,
            best_iteration=last.best_iteration,
            best_score=last.best_score,
            rounds=self._checkpoint.rounds,
            rows=sum(worker.rows for worker in stats),
            num_workers=size.num_workers,
            threads_per_worker=size.threads,
            seconds=time.monotonic() - self._began,
            restarts=self._resilience.restarts,
            workers=stats,
        )

    def _boost(self, gang: Gang, workers: Sequence[_Worker]) -> Boosted:
        """Train from the checkpoint to the end, segment by segment; return rank 0's result of the last segment."""
        rounds = self._request.n_estimators
        length = segment_length(rounds, self._request.run_config.checkpoint_every)
        resume: Checkpoint | None = self._checkpoint
        # With verbose_eval the workers print the metrics themselves.
        with ProgressDisplay(first_line_s=math.inf if self._request.verbose_eval else _FIRST_LINE_S) as display:
            while True:
                index = self._checkpoint.rounds // length
                stop = min(rounds, (index + 1) * length)
                segment = Segment(index, stop, stop == rounds, resume)
                answers: list[Boosted] = self._on_all(
                    gang,
                    "boost",
                    [segment] * len(workers),
                    on_note=lambda _, note: self._report(display, note["rounds"], note["metrics"]),
                )
                for worker, answer in zip(workers, answers, strict=True):
                    worker.add(answer)
                first = answers[0]
                if first.checkpoint is None:
                    raise TrainingError("rank 0 returned no model")
                self._checkpoint, resume = first.checkpoint, None
                self._report(display, self._checkpoint.rounds, latest(self._checkpoint.history))
                if segment.last or first.stopped:
                    return first

    def _report(self, display: ProgressDisplay, rounds: int, metrics: dict[str, float]) -> None:
        progress = Progress(rounds, self._request.n_estimators, "rounds", metrics)
        display.show(progress)
        if self._on_progress is not None:
            self._on_progress(progress)

    def _on_all(self, gang: Gang, name: str, args: Sequence[Any] = (), on_note: OnNote | None = None) -> list[Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(self._library.worker), name)
        each: list[tuple[Any, ...]] = [(arg,) for arg in args] or [()] * len(gang.workers)
        return gang.run(function, each, timeout=self._resilience.timeout, on_note=on_note)

    def _resolve(self, *, again: bool = False) -> GangSize:
        """Return the number and size of the workers.

        Args:
            again: Whether this is a restart: return as many workers of the current size as there is room for.
        """
        scaling, clamp = self._request.scaling_config, self._request.run_config.clamp
        fraction = self._train.ingestor_class.worker_cpu_fraction
        if again:
            cpus = round(self._size.cpus_per_worker / fraction)
            wanted = {"num_workers": self._size.num_workers, "num_cpu_per_worker": cpus}
            scaling, clamp = scaling.model_copy(update=wanted), True
        device = self._library.device(self._request)
        return resolve_size(scaling, cluster.active_nodes(), device=device, cpu_fraction=fraction, clamp=clamp)
