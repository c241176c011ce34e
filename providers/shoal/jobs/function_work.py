"""The work of a job that runs a function: run it on all ranks, track what they log, and keep what they return."""

from __future__ import annotations

import importlib
import time

import cloudpickle

from shoal.errors import InvalidArgumentError
from shoal.jobs import by_value, files, model_files
from shoal.jobs.function_spec import FunctionJobSpec
from shoal.jobs.spec import JobResult
from shoal.jobs.workplace import Workplace
from shoal.training.pytorch.program import Program
from shoal.training.pytorch.request import FunctionRequest

_RESULTS = "results.pkl"


def work(spec: FunctionJobSpec, place: Workplace) -> JobResult:
    """Do what the spec asks for.

    Args:
        spec: What is asked.
        place: What is around.

    Raises:
        ShoalError: Whatever is the cause that there is no result.
    """
    from shoal.training.pytorch.engine import run

    tracked, key = place.run, place.key
    location = spec.run_config.artifact_location
    if tracked:
        tracked.log_params({**spec.hyper_params, "framework": spec.framework, "function": spec.name})
    answer = run(
        FunctionRequest(
            name=spec.name,
            dataset_map=spec.dataset_map,
            hyper_params=spec.hyper_params,
            scaling=spec.scaling_config,
            run_config=spec.run_config,
        ),
        _program(spec),
        job_id=key.job_id,
        location=files.root(location),
        env=place.environment,
        on_metrics=tracked.log_step if tracked else None,
    )
    results = f"{model_files.folder(key, location)}/{_RESULTS}"
    files.write(results, cloudpickle.dumps(answer))
    print(f"model folder of {answer.num_workers} workers in {answer.model_dir}", flush=True)
    return JobResult(
        job_id=key.job_id,
        attempt=key.attempt,
        model_path=answer.model_dir,
        model_digest=None,
        model_uri=answer.model_dir,
        metrics=answer.metrics,
        best_iteration=None,
        rows=None,
        results_path=results,
        num_workers=answer.num_workers,
        seconds=time.monotonic() - place.begun,
        restarts=answer.restarts,
        peak_memory_per_worker=tuple(worker.peak_rss_bytes for worker in answer.workers),
        mlflow_run_id=tracked.run_id if tracked else None,
        model_version=None,
        promoted=None,
        champion=None,
    )


def _program(spec: FunctionJobSpec) -> bytes:
    """The function, as the workers take it."""
    if spec.program is not None:
        return by_value.read(spec.program)
    assert spec.train_func is not None
    module, _, name = spec.train_func.partition(":")
    try:
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(f"train_func {spec.train_func}: {error}") from error
    return Program.of(function, (), {}).dumps()
