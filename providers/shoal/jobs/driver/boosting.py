"""Run an XGBoost or LightGBM job in its driver: train a model, save it, log it to MLflow, and register it there.

If the job registers the model, the model is compared with the champion, the version that has the alias.
"""

from __future__ import annotations

import hashlib
import importlib
import time
from typing import TYPE_CHECKING, Any

from shoal.data.parquet.reading import take_rows
from shoal.jobs.driver import saved_training
from shoal.jobs.driver.context import AttemptContext, before_work, saved_before
from shoal.jobs.files import artifacts, code_store
from shoal.jobs.mlflow import init_model, job_run, model_loading, promotion, skip_if_unchanged, training_rows
from shoal.jobs.mlflow.holdout import check_holdout
from shoal.jobs.mlflow.job_run import Run
from shoal.jobs.mlflow.promotion import Outcome
from shoal.jobs.mlflow.registry import HOLDER_TAG
from shoal.jobs.mlflow.skip_if_unchanged import Fingerprints
from shoal.jobs.mlflow.training_rows import TrainingRows
from shoal.jobs.prediction.engine import pinned
from shoal.jobs.results import DataResult, JobResult
from shoal.jobs.specs.register import Register
from shoal.jobs.specs.training import JobSpec
from shoal.training.boosting.inputs import check_features
from shoal.training.boosting.prediction import Output
from shoal.training.boosting.progress import by_round
from shoal.training.boosting.user_code import UserCode
from shoal.training.host.imports import forget_lean, import_lean

if TYPE_CHECKING:
    from shoal.data.connector import DataConnector
    from shoal.data.time_range import TimeRange
    from shoal.training.boosting.request import TrainResult


def begin(spec: JobSpec) -> None:
    """Prepare the imports of the library in this process and the workers, so that the training starts sooner."""
    from shoal.training.boosting.engine import import_ahead_for_workers

    import_ahead_for_workers(spec)
    if spec.register_as is None and spec.user_code is None:
        # `import_lean` imports the library without scikit-learn, which saves seconds.
        import_lean([spec.framework])
    else:
        # The comparison with the champion and the user's code may need scikit-learn. The process from which this driver
        # was forked may have imported the library without scikit-learn.
        forget_lean()


def work(spec: JobSpec, place: AttemptContext) -> JobResult:
    """Train, save and log the model of a job, and return the job's result.

    No model is trained if the job may be skipped and its rows, holdout and settings are those of the newest registered
    version.

    Raises:
        ShoalError: The job failed; the message states the cause.
    """
    from shoal.data.connector import DataConnector

    dataset = DataConnector.from_spec(spec.dataset)
    times = dataset.time_range(spec.dataset.time_col)
    # An alias is replaced by its version, which does not change during the job.
    base = None if spec.init_model is None else pinned(spec.init_model)
    content = None if base is None else init_model.load(base, spec.framework)
    trained_on, held_out, all_known = TrainingRows(), "", True
    if spec.register_as:
        trained_on = training_rows.of_datasets([(dataset, times)])
        if base is not None and place.run is not None:
            earlier = init_model.rows_of(place.run, base)
            all_known = earlier is not None
            trained_on = trained_on.union(earlier or TrainingRows())
        held_out = check_holdout(
            spec.register_as,
            spec.label_col,
            [*spec.input_cols, *spec.margin_cols],
            group_col=spec.group_col,
            trained_on=trained_on,
            check=lambda source: check_features(spec, dataset.schema(), source),
        )
    run, key = place.run, place.key
    claim, folder = place.claim(), artifacts.folder(key, spec.run_config.artifact_location)
    artifacts.check(folder, claim, spec.run_config.artifact_location)
    user_code = UserCode() if spec.user_code is None else code_store.load_user_code(spec.user_code)
    data = _described(dataset, times)
    if spec.register_as:
        promotion.try_challenger(spec.register_as, _output(spec, user_code))
    fingerprints: Fingerprints | None = None
    # A training with user code has no fingerprints and is never skipped, because shoal may not notice a change of the
    # code.
    if run and spec.register_as and spec.user_code is None:
        settings = spec
        if content is not None:
            # An alias or a file may have another model at the next training.
            settings = spec.model_copy(update={"init_model": hashlib.sha256(content).hexdigest()})
        fingerprints = Fingerprints.of(settings, data.digest, held_out)
        skipped = _skipped(spec.register_as, run, place, data, fingerprints)
        if skipped is not None:
            return skipped
    if run and spec.register_as:
        promotion.try_champion(run, spec.register_as)
    inputs: dict[str, str] | None = None
    if run:
        with before_work(run.uri, place.environment):
            run.log_params({**_params(spec), **({} if base is None else {"init_model": base}), **user_code.names()})
            run.log_dataset(spec.label_col, data.digest, spec.dataset.origin, context="training")
        inputs = saved_training.inputs_of(spec, dataset, data.digest, content)
    trained = saved_training.of_earlier_attempt(spec, place, inputs) if inputs else None
    if trained is None:
        trained = _train(spec, place, user_code, content)
    else:
        for step, values in enumerate(by_round(trained.eval_results)):
            place.metrics.log(0, values, step)
    place.on_trained()
    path, digest = artifacts.save(folder, claim, trained, inputs)
    if inputs:
        saved_training.note(place, digest)
    print(f"model trained on {trained.rows} rows, saved to {path}", flush=True)
    metrics = _final_metrics(trained)
    outcome: Outcome | None = None
    uri = path
    if run:
        with saved_before(path):
            place.metrics.flush()
            run.log_values({"rows": trained.rows, "train_seconds": trained.seconds})
        # pandas' nullable types are left out, because MLflow would refuse missing values in integer columns.
        sample = take_rows(dataset.iter_batches(list(spec.input_cols)), 100).to_pandas()
        booster = trained.booster()
        with saved_before(path):
            uri = run.log_model(trained.framework, booster, sample, base_margin_cols=spec.margin_cols)
        if spec.register_as:
            with place.stopwatch.scoring(), saved_before(path):
                outcome = promotion.enter(
                    place.store,
                    place.key,
                    run,
                    spec.register_as,
                    is_current=place.is_current,
                    tags={**place.tags, **data.tags()},
                    model_uri=uri,
                    model=model_loading.predictor_of(booster, base_margin_cols=spec.margin_cols),
                    label_col=spec.label_col,
                    group_col=spec.group_col,
                    # If the rows of the model that was continued are not known, neither are those of the new model.
                    trained_on=trained_on if all_known else None,
                )
            metrics |= outcome.metrics
            if fingerprints:
                skip_if_unchanged.mark(run, spec.register_as, outcome.challenger.version, fingerprints)
    return JobResult(
        job_id=key.job_id,
        attempt=key.attempt,
        model_path=path,
        model_digest=hashlib.sha256(trained.model).hexdigest(),
        model_uri=uri,
        metrics=metrics,
        best_iteration=trained.best_iteration,
        rows=trained.rows,
        data=data,
        num_workers=trained.num_workers,
        seconds=time.monotonic() - place.begun,
        times=place.times(),
        restarts=trained.restarts,
        peak_memory_per_worker=tuple(worker.peak_rss_bytes for worker in trained.workers),
        mlflow_run_id=run.run_id if run else None,
        **(outcome.result() if outcome else {}),
    )


def _train(spec: JobSpec, place: AttemptContext, user_code: UserCode, init_model: bytes | None) -> TrainResult:
    from shoal.training.boosting.engine import train

    trained = train(
        spec,
        user_code=user_code,
        init_model=init_model,
        env=place.environment,
        on_progress=place.on_progress,
        metrics=place.metrics,
        keep_gpu_choice=place.keep_gpu_choice,
    )
    place.stopwatch.worked(
        read_s=max((worker.read_seconds + worker.quantise_seconds for worker in trained.workers), default=0.0),
        train_s=max((worker.train_seconds for worker in trained.workers), default=0.0),
    )
    return trained


def _skipped(
    register: Register, run: Run, place: AttemptContext, data: DataResult, fingerprints: Fingerprints
) -> JobResult | None:
    """Return the result of a job that skips its training because the newest version has the same rows and settings."""
    if not register.skip_if_unchanged:
        return None
    holder = place.tags[HOLDER_TAG]
    found = skip_if_unchanged.reason_to_skip(run, place.store, place.key, holder, register, fingerprints)
    if found is None:
        return None
    version, reason = found
    print(reason, flush=True)
    skip_if_unchanged.mark_skipped(run, reason)
    uri = f"models:/{register.model}/{version}"
    return JobResult(
        job_id=place.key.job_id,
        attempt=place.key.attempt,
        model_path=uri,
        model_digest=None,
        model_uri=uri,
        metrics={},
        best_iteration=None,
        rows=data.rows,
        data=data,
        num_workers=0,
        seconds=time.monotonic() - place.begun,
        restarts=0,
        peak_memory_per_worker=(),
        mlflow_run_id=run.run_id,
        model_version=version,
        skipped=reason,
    )


def _described(dataset: DataConnector, times: TimeRange | None) -> DataResult:
    """Describe the training rows, for the job's result and for the tags of the registered version in MLflow."""
    described = DataResult(rows=dataset.num_rows(), digest=dataset.digest())
    if times is None:
        return described
    return described.model_copy(update={"time_col": times.column, "time_from": times.first, "time_to": times.last})


def _output(spec: JobSpec, user_code: UserCode) -> Output:
    """Return the form of the predictions of the model that the job will train."""
    library = importlib.import_module(f"shoal.training.{spec.framework}.model")
    output: Output = library.output_of(spec.params, custom_objective=user_code.objective is not None)
    return output


def _params(spec: JobSpec) -> dict[str, Any]:
    return {
        **spec.params,
        "framework": spec.framework,
        "n_estimators": spec.n_estimators,
        "input_cols": ", ".join(spec.input_cols),
        "label_col": spec.label_col,
        **({"categorical_cols": ", ".join(spec.categorical_cols)} if spec.categorical_cols else {}),
        "num_workers": spec.scaling_config.num_workers,
        "shoal.seed": spec.run_config.seed,
    }


def _final_metrics(trained: TrainResult) -> dict[str, float]:
    """Return the model's metrics in the best round if there was early stopping, otherwise in the last round."""
    return {
        job_run.metric_name(evaluated, metric): values[trained.final_round]
        for evaluated, series in trained.eval_results.items()
        for metric, values in series.items()
    }
