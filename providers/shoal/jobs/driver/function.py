"""Run a training function in its job's driver: call it on all ranks, log its metrics, and save its return values."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import TYPE_CHECKING

from shoal.errors import JobError
from shoal.jobs.driver.context import AttemptContext
from shoal.jobs.files import artifacts, code_store, storage
from shoal.jobs.mlflow import promotion, scoring, training_rows
from shoal.jobs.mlflow.holdout import check_holdout
from shoal.jobs.mlflow.promotion import Outcome
from shoal.jobs.mlflow.training_rows import TrainingRows
from shoal.jobs.results import JobResult
from shoal.jobs.specs.function import FunctionJobSpec, FunctionRegister
from shoal.training.pytorch.program import Program
from shoal.training.pytorch.train_func import call_imported, imported

if TYPE_CHECKING:
    from shoal.jobs.mlflow.tracking import Run

_SEND_EVERY_SECONDS = 1.0
"""Seconds between two calls to MLflow. Metrics are collected meanwhile, because a call takes at least 10 ms, which is
the time of many training steps."""


class _Sender:
    """Buffer for the metrics of all ranks, which are sent to MLflow in batches.

    The object is a context manager. At the end of its block, it sends the metrics that are left.

    Args:
        run: MLflow run of the attempt; None: the metrics are discarded.
    """

    def __init__(self, run: Run | None) -> None:
        self._run = run
        self._waiting: list[tuple[str, float, int, float]] = []
        self._sent = time.monotonic()

    def __enter__(self) -> _Sender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # If the `with` block has raised an error, errors of MLflow are ignored, so that they do not replace that error.
        with contextlib.suppress(*([] if error is None else [Exception])):
            self._send()

    def log(self, rank: int, values: dict[str, float], step: int) -> None:
        """Add metrics to the buffer, and send the buffer if the last call to MLflow was at least a second ago.

        Args:
            rank: Rank that has measured the metrics. For ranks above 0, the names get the prefix ``rank-N/``.
            values: Values of the metrics by name.
            step: Training step that the metrics belong to.
        """
        front = f"rank-{rank}/" if rank else ""
        self._waiting += [(front + name, value, step, time.time()) for name, value in values.items()]
        if time.monotonic() - self._sent >= _SEND_EVERY_SECONDS:
            self._send()

    def _send(self) -> None:
        if self._run and self._waiting:
            self._run.log_metrics(self._waiting)
        self._waiting = []
        self._sent = time.monotonic()


def work(spec: FunctionJobSpec, place: AttemptContext) -> tuple[JobResult, str]:
    """Run a job's training function on all ranks, and save and log its results.

    Args:
        spec: Spec of the job.
        place: Context of the attempt: store, MLflow run and environment.

    Returns:
        The job's result, and the SHA-256 of the file with the ranks' return values.

    Raises:
        ShoalError: The job failed; the message has the cause.
    """
    from shoal.training.pytorch.engine import run

    trained_on = _check_holdout(spec, spec.register_as) if spec.register_as else TrainingRows()
    tracked, key = place.run, place.key
    location = spec.run_config.artifact_location
    claim, folder = place.claim(), artifacts.folder(key, location)
    artifacts.check(folder, claim, location)
    if tracked:
        tracked.log_params({**spec.hyper_params, "framework": spec.framework, "function": spec.name})
    program, root = _program(spec), storage.root(location)
    with _Sender(tracked) as sender:
        answer = run(
            spec,
            program,
            claim=claim,
            location=root,
            env=place.environment,
            on_metrics=sender.log,
            on_progress=place.on_progress,
            may_publish=place.is_current,
        )
    place.on_trained()
    results, digest = artifacts.save_results(folder, claim, answer)
    uri, outcome = answer.model_dir, None
    if tracked and spec.register_as:
        uri, outcome = _register(spec.register_as, place, tracked, trained_on)
    print(f"model of {answer.num_workers} workers saved to {answer.model_dir}", flush=True)
    result = JobResult(
        job_id=key.job_id,
        attempt=key.attempt,
        model_path=answer.model_dir,
        model_digest=None,
        model_uri=uri,
        metrics={**answer.metrics, **(outcome.metrics if outcome else {})},
        best_iteration=None,
        rows=None,
        results_path=results,
        num_workers=answer.num_workers,
        seconds=time.monotonic() - place.begun,
        restarts=answer.restarts,
        peak_memory_per_worker=tuple(worker.peak_rss_bytes for worker in answer.workers),
        mlflow_run_id=tracked.run_id if tracked else None,
        **(outcome.result() if outcome else {}),
    )
    return result, digest


def _check_holdout(spec: FunctionJobSpec, register: FunctionRegister) -> TrainingRows:
    """Check the holdout before the function runs, and return the rows that count as the function's training data."""
    from shoal.data.connector import DataConnector

    inputs = [dataset for name, dataset in spec.dataset_map.items() if training_rows.is_training_data(name)]
    connectors = [(DataConnector.from_spec(each), each.time_col) for each in inputs]
    trained_on = training_rows.of_datasets((each, each.time_range(time_col)) for each, time_col in connectors)
    check_holdout(
        register, register.label_col, register.input_cols, group_col=register.group_col, trained_on=trained_on
    )
    return trained_on


def _register(
    register: FunctionRegister, place: AttemptContext, run: Run, trained_on: TrainingRows
) -> tuple[str, Outcome]:
    uri = run.logged_model()
    if uri is None:
        raise JobError(
            f'the function logged no model, but register needs one for "{register.model}": call '
            "mlflow.pytorch.log_model(model, name=..., signature=...) in the function, on rank 0"
        )
    outcome = promotion.enter(
        place.store,
        place.key,
        run,
        register,
        is_current=place.is_current,
        tags=place.tags,
        model_uri=uri,
        model=scoring.load(uri),
        label_col=register.label_col,
        input_cols=register.input_cols,
        group_col=register.group_col,
        trained_on=trained_on,
    )
    return uri, outcome


def _program(spec: FunctionJobSpec) -> bytes:
    """Return the pickled function with its arguments, for the workers.

    Raises:
        InvalidArgumentError: The spec names a function that cannot be imported.
    """
    if spec.program is not None:
        return code_store.read(spec.program)
    assert spec.train_func is not None
    if spec.run_config.packages or spec.run_config.code:
        # Modules that come with the job can be imported in the workers only.
        return Program.of(call_imported, (spec.train_func, *spec.args), spec.kwargs).dumps()
    return Program.of(imported(spec.train_func), spec.args, spec.kwargs).dumps()
