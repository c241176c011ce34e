"""Run a training function in its job's driver: call it on all ranks, log its metrics, and save its return values."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial

from shoal.data.connector import DataConnector
from shoal.errors import JobError
from shoal.jobs import shipped_code
from shoal.jobs.driver.attempt_context import AttemptContext, before_work, only_printed, saved_before
from shoal.jobs.driver.attempt_metrics import MlflowFeed
from shoal.jobs.files import artifacts, storage
from shoal.jobs.journal import attempts
from shoal.jobs.kind import KindDriver
from shoal.jobs.mlflow_run import Run
from shoal.jobs.results import JobResult
from shoal.kinds.function.spec import FunctionJobSpec, FunctionRegister, is_training_data
from shoal.models import gate, loading, training_record
from shoal.models.contest import Outcome
from shoal.models.drift import TrainingProfile, profiled
from shoal.models.holdout import check_holdout
from shoal.models.training_record import TrainingRows
from shoal.training.host.usage import USAGE_NOTE
from shoal.training.pytorch.program import Program, call_imported, imported
from shoal.training.tracking import MOVED_NOTE

_SYSTEM = "system/"
"""Prefix of the metrics that MLflow's web interface shows as system metrics."""


class _Usage:
    """The usage of CPU, memory and GPUs, which is sent to MLflow, and the highest values of the workers.

    Args:
        run: MLflow run of the attempt; None if there is none.
        feed: Sender of metrics to that run.
    """

    def __init__(self, run: Run | None, feed: MlflowFeed | None) -> None:
        self._run = run
        self._feed = feed
        self._peaks: dict[int, dict[str, float]] = {}
        self._steps: Counter[int | str] = Counter()

    def log(self, rank: int, values: dict[str, float]) -> None:
        """Send the usage of a worker to MLflow as metrics ``system/worker-N/...``, and remember the highest values."""
        peaks = self._peaks.setdefault(rank, {})
        for name, value in values.items():
            peaks[name] = max(value, peaks.get(name, value))
        if self._feed:
            self._feed.add_usage(_metrics(f"{_SYSTEM}worker-{rank}/", values, self._steps[rank]))
        self._steps[rank] += 1

    def log_node(self, node: str, values: dict[str, float]) -> None:
        """Log the usage of a node as metrics ``system/<node>/...``. A separate thread calls the method."""
        assert self._run is not None
        self._run.log_metrics(_metrics(f"{_SYSTEM}{node}/", values, self._steps[node]))
        self._steps[node] += 1

    def peaks(self, num_workers: int) -> tuple[dict[str, float], ...]:
        """Return the highest measured usage of each worker, in the order of the ranks."""
        return tuple(self._peaks.get(rank, {}) for rank in range(num_workers))


def _metrics(front: str, values: dict[str, float], step: int) -> list[tuple[str, float, int, float]]:
    """Return metrics as tuples of name, value, step and present time; `front` is the prefix of each name."""
    return [(front + name, value, step, time.time()) for name, value in values.items()]


class FunctionDriver(KindDriver[FunctionJobSpec, AttemptContext]):
    """A training function: calls it on all ranks."""

    def begin(self) -> None:
        """Prepare the imports of the workers, so that the function starts sooner."""
        from shoal.training.pytorch.engine import import_ahead_for_workers

        super().begin()
        import_ahead_for_workers(self.spec)

    def work(self, place: AttemptContext) -> tuple[JobResult, str]:
        """Run a job's training function on all ranks, and save and log its results.

        Raises:
            ShoalError: The job failed; the message has the cause.
        """
        from shoal.training.pytorch.engine import Run

        spec = self.spec
        trained_on = _check_holdout(spec, spec.register_as) if spec.register_as else TrainingRows()
        tracked, profile = place.run, None
        if tracked and spec.register_as:
            gate.try_champion(tracked, spec.register_as, spec.register_as.input_cols)
            profile = _profiled(spec, spec.register_as, tracked)
        location = spec.run_config.artifact_location
        folder, claim = place.checked_folder(location)
        if tracked:
            with before_work(tracked.uri, place.environment):
                tracked.log_params({**spec.hyper_params, "framework": spec.framework, "function": spec.name})
        program, root = _program(spec), storage.root(location)
        usage = _Usage(tracked, place.metrics.feed)
        answer = Run(
            spec,
            program,
            claim=claim,
            location=root,
            env=place.environment,
            sink=place.metrics,
            on_progress=place.on_progress,
            on_note={MOVED_NOTE: partial(_move, place), USAGE_NOTE: usage.log},
            on_node=usage.log_node if tracked and spec.tracking and spec.tracking.system_metrics else None,
            may_publish=place.is_current,
            loses_folder=storage.is_of_attempt(place.environment["PWD"]),
        ).result()
        place.stopwatch.worked(train_s=answer.seconds - answer.start_seconds)
        place.on_trained()
        results, digest = artifacts.save_results(folder, claim, answer)
        with saved_before(answer.model_dir):
            place.metrics.flush()
        uri, outcome = answer.model_dir, None
        if tracked and spec.register_as:
            with place.stopwatch.scoring(), saved_before(answer.model_dir):
                uri, outcome = _register(spec.register_as, place, tracked, trained_on, profile)
        if answer.model_files:
            print(f"model of {answer.num_workers} workers saved to {answer.model_dir}", flush=True)
        else:
            print(f"{answer.num_workers} workers ended, and wrote no file into the model folder", flush=True)
        result = place.finished(
            answer,
            outcome.result() if outcome else {},
            model_path=answer.model_dir,
            model_uri=uri,
            metrics={**answer.metrics, **(outcome.metrics if outcome else {})},
            results_path=results,
            peak_memory_per_worker=tuple(worker.peak_rss_bytes for worker in answer.workers),
            peak_usage_per_worker=usage.peaks(answer.num_workers),
        )
        return result, digest


def _move(place: AttemptContext, _rank: int, run_id: str) -> None:
    """Continue the job in another MLflow run, because rank 0 has called ``set_experiment``. If this fails, only print
    the error."""
    if place.run is None or place.run.run_id == run_id:
        return
    with only_printed(f"the job could not continue in MLflow run {run_id}"):
        place.run.move_to(run_id)
        attempts.note_run(place.store, place.key, run_id)
        print(f"MLflow run: {place.run.link}", flush=True)


def _check_holdout(spec: FunctionJobSpec, register: FunctionRegister) -> TrainingRows:
    """Check the holdout before the function runs, and return a record of the rows that count as training data."""

    inputs = [dataset for name, dataset in spec.dataset_map.items() if is_training_data(name)]
    connectors = [(DataConnector.from_spec(each), each.time_col) for each in inputs]
    trained_on = training_record.of_datasets((each, each.time_range(time_col)) for each, time_col in connectors)
    check_holdout(
        register, register.label_col, register.input_cols, group_col=register.group_col, trained_on=trained_on
    )
    return trained_on


def _profiled(spec: FunctionJobSpec, register: FunctionRegister, run: Run) -> TrainingProfile | None:
    """Compare the rows of the first training dataset with those on which the champion was trained."""
    for dataset in spec.profiled():
        source = DataConnector.from_spec(dataset).source
        names = source.schema().names
        wanted = [*register.input_cols, register.label_col] if register.input_cols else names
        return profiled(run, register, dataset, source, [each for each in wanted if each in names])
    return None


def _register(
    register: FunctionRegister,
    place: AttemptContext,
    run: Run,
    trained_on: TrainingRows,
    profile: TrainingProfile | None,
) -> tuple[str, Outcome]:
    if (uri := run.logged_model()) is None:
        raise JobError(
            f'the training function logged no model, so no version of "{register.model}" can be registered: call '
            "mlflow.pytorch.log_model(model, name=..., signature=...) in the function, on rank 0"
        )
    outcome = gate.enter(
        place,
        run,
        register,
        model_uri=uri,
        model=loading.load(uri, register.input_cols),
        label_col=register.label_col,
        input_cols=register.input_cols,
        group_col=register.group_col,
        trained_on=trained_on,
        profile=profile,
    )
    return uri, outcome


def _program(spec: FunctionJobSpec) -> bytes:
    """Return the pickled function with its arguments, for the workers."""
    if spec.program is not None:
        return shipped_code.read(spec.program)
    assert spec.train_func is not None
    if spec.run_config.packages or spec.run_config.code:
        # The job's own packages and code can be imported only in the workers, and not in this process. So the program
        # contains only the function's name, and each worker imports the function.
        return Program.of(call_imported, (spec.train_func, *spec.args), spec.kwargs).dumps()
    return Program.of(imported(spec.train_func), spec.args, spec.kwargs).dumps()
