"""The XGBoost engine, driver side: checks, plans, starts the gang and the tracker, and collects the model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.checks import check_label, validate_columns
from shoal.data.connector import DataConnector
from shoal.data.plan import Shard
from shoal.errors import DataError, InvalidArgumentError, MissingExtraError, TrainingError
from shoal.training import cluster
from shoal.training.gang import WAIT_SECONDS, GangShape
from shoal.training.params import check_params, device_of, merge_params, worker_params
from shoal.training.request import WorkerStats, XGBTrainRequest, XGBTrainResult
from shoal.training.scaling import GangSize, resolve_size
from shoal.training.shared_gang import shared_gang
from shoal.training.tracker import Tracker

if TYPE_CHECKING:
    from shoal.training.gang import Gang
    from shoal.training.xgboost_worker import Outcome, Part, Task

# How much longer than its peers a worker may take between two collective steps. XGBoost waits half an hour by default;
# deaths are noticed by the lifelines within seconds, so this is only for a worker that lives and yet does nothing, such
# as a read from storage that hangs. Shards are even within 1 %, so ten minutes are far more than an honest worker
# needs.
_COLLECTIVE_SECONDS = 600
# How often a worker tries to connect to the tracker and to its peers; XGBoost's own default.
_COLLECTIVE_RETRIES = 3


def train_xgboost(
    request: XGBTrainRequest, *, callbacks: Sequence[Any] = (), env: Mapping[str, str] | None = None
) -> XGBTrainResult:
    """Trains a model on the Ray cluster that this process is connected to.

    The same data, parameters, seed, number of workers and of threads give the same model, byte for byte.

    Args:
        request: What to train, on what.
        callbacks: ``xgboost.callback.TrainingCallback`` objects; every worker gets its own copy.
        env: Environment variables for the workers, credentials among them; they pass from process to process and are
            stored nowhere.

    Returns:
        The model, its metrics and what it took.

    Raises:
        InvalidArgumentError: If arguments contradict one another, or a parameter is unknown.
        DataError: If the rows cannot be used.
        CapacityError: If the active nodes cannot hold the workers, or did not within the deadline.
        TrainingError: If XGBoost refuses a parameter, or the training failed; the first cause, naming its rank.
        WorkerLostError: If a worker or its node was lost.
        MissingExtraError: If XGBoost or Ray is not installed.
    """
    began = time.monotonic()
    _require_libraries()
    if not cluster.is_connected():
        raise InvalidArgumentError("this process is not connected to a Ray cluster: call ray.init(address=...) first")
    train, eval_sets = checked_data(request)
    params = merge_params(request.params, None, request.n_estimators)
    size = resolve_size(
        request.scaling,
        cluster.active_nodes(),
        device=device_of(params),
        cpu_fraction=train.ingestor_class.worker_cpu_fraction,
        clamp=request.run_config.clamp,
    )
    params = worker_params(params, threads=size.threads, gpus=size.gpus_per_worker, seed=request.run_config.seed)
    check_params(params, request.input_cols)
    parts = _dealt(train, eval_sets, size.num_workers, request.run_config.seed)

    limit = request.run_config.timeout
    deadline = None if limit is None else began + limit
    shape = GangShape(size.num_workers, size.cpus_per_worker, size.gpus_per_worker)
    with shared_gang(shape, timeout=min(WAIT_SECONDS, _left(deadline, WAIT_SECONDS)), env=env) as gang:
        gang.preload(["shoal.training.xgboost_worker"])
        tracker = gang.companion("xgboost", lambda on_death: Tracker(gang.host, size.num_workers, on_death))
        collective = {
            **tracker.begin(),
            "dmlc_timeout": _COLLECTIVE_SECONDS,
            "dmlc_retry": _COLLECTIVE_RETRIES,
        }
        outcomes = _run(gang, [_task(request, params, mine, callbacks, collective) for mine in parts], deadline)
        return _result(request, size, gang, parts, outcomes, time.monotonic() - began)


def _require_libraries() -> None:
    for package, extra in (("ray", "ray"), ("xgboost", "xgboost")):
        try:
            __import__(package)
        except ImportError as exc:
            raise MissingExtraError(package, extra) from exc


def checked_data(request: XGBTrainRequest) -> tuple[DataConnector, dict[str, DataConnector]]:
    """The datasets, checked as far as footers tell. An eval set that is the training set itself is the same object.

    Raises:
        DataError: Whatever footers can show to be wrong, naming file, column and row group.
    """
    train = DataConnector.from_spec(request.dataset)
    validate_columns(train, request.input_cols, request.label_col, request.extra_cols)
    check_label(train, request.label_col)
    eval_sets = {}
    for name, spec in request.eval_sets.items():
        if spec == request.dataset:
            eval_sets[name] = train
            continue
        connector = DataConnector.from_spec(spec)
        try:
            validate_columns(connector, request.input_cols, request.label_col, request.extra_cols, allow_all_null=True)
            check_label(connector, request.label_col)
        except DataError as exc:
            raise DataError(f'eval_set "{name}": {exc}') from exc
        eval_sets[name] = connector
    return train, eval_sets


def _dealt(
    train: DataConnector, eval_sets: Mapping[str, DataConnector], num_workers: int, seed: int
) -> list[tuple[Part, dict[str, Part]]]:
    """Each worker's rows of the training set and of every eval set."""
    from shoal.training.xgboost_worker import Part

    mine = [Part(train, shard) for shard in train.plan(num_workers, seed)]
    evals: list[dict[str, Part]] = [{} for _ in range(num_workers)]
    for name, connector in eval_sets.items():
        if connector is train:
            for rank in range(num_workers):
                evals[rank][name] = mine[rank]
            continue
        # An eval set may have fewer rows than there are workers: the last ones evaluate on nothing.
        shards = connector.plan(min(num_workers, connector.num_rows()), seed)
        for rank in range(num_workers):
            evals[rank][name] = Part(connector, shards[rank] if rank < len(shards) else Shard(()))
    return list(zip(mine, evals, strict=True))


def _task(
    request: XGBTrainRequest,
    params: dict[str, Any],
    parts: tuple[Part, dict[str, Part]],
    callbacks: Sequence[Any],
    collective: dict[str, str | int],
) -> Task:
    from shoal.training.xgboost_worker import Task

    return Task(
        train=parts[0],
        eval_sets=parts[1],
        input_cols=request.input_cols,
        label_col=request.label_col,
        weight_col=request.weight_col,
        base_margin_col=request.base_margin_col,
        params=params,
        rounds=request.n_estimators,
        early_stopping_rounds=request.early_stopping_rounds,
        # False, None and 0 mean never; True means every round.
        print_every=int(request.verbose_eval or 0),
        callbacks=tuple(callbacks),
        collective=collective,
    )


def _run(gang: Gang, tasks: Sequence[Task], deadline: float | None) -> list[Outcome]:
    from shoal.training.xgboost_worker import train

    return gang.run(train, [(task,) for task in tasks], timeout=None if deadline is None else _left(deadline, 0.0))


def _left(deadline: float | None, otherwise: float) -> float:
    return otherwise if deadline is None else max(0.0, deadline - time.monotonic())


def _result(
    request: XGBTrainRequest,
    size: GangSize,
    gang: Gang,
    parts: Sequence[tuple[Part, dict[str, Part]]],
    outcomes: Sequence[Outcome],
    seconds: float,
) -> XGBTrainResult:
    first = outcomes[0]
    if first.model is None:
        raise TrainingError("rank 0 returned no model")
    return XGBTrainResult(
        model=first.model,
        eval_results=first.eval_results,
        best_iteration=first.best_iteration,
        best_score=first.best_score,
        rounds=first.rounds,
        rows=sum(part.shard.rows for part, _ in parts),
        num_workers=size.num_workers,
        threads_per_worker=size.threads,
        seconds=seconds,
        workers=tuple(
            WorkerStats(
                rank=worker.rank,
                node=worker.node,
                rows=part.shard.rows,
                passes=outcome.passes,
                read_seconds=outcome.read_seconds,
                quantise_seconds=outcome.quantise_seconds,
                train_seconds=outcome.train_seconds,
                peak_rss_bytes=outcome.peak_rss_bytes,
            )
            for worker, (part, _), outcome in zip(gang.workers, parts, outcomes, strict=True)
        ),
    )
