"""Run an XGBoost or LightGBM job in its driver: train a model, save it, log it to MLflow, and register it there.

If the job registers the model, the model is compared with the champion, the version that has the alias.
"""

from __future__ import annotations

import hashlib
import time
from datetime import date
from typing import TYPE_CHECKING, Any

from shoal.jobs.driver.context import AttemptContext
from shoal.jobs.files import artifacts, code_store
from shoal.jobs.mlflow import promotion, tracking, training_rows
from shoal.jobs.mlflow.holdout import check_holdout
from shoal.jobs.mlflow.promotion import Outcome
from shoal.jobs.results import DataResult, JobResult
from shoal.jobs.specs.training import JobSpec
from shoal.training.boosting.user_code import UserCode

if TYPE_CHECKING:
    from shoal.data.connector import DataConnector
    from shoal.training.boosting.request import TrainResult


def work(spec: JobSpec, place: AttemptContext) -> JobResult:
    """Train, save and log the model of a job, and return the job's result.

    Args:
        spec: Spec of the job.
        place: Context of the attempt: store, MLflow run and environment.

    Raises:
        ShoalError: The job failed; the message has the cause.
    """
    from shoal.data.connector import DataConnector
    from shoal.training.boosting.engine import train

    dataset = DataConnector.from_spec(spec.dataset)
    trained_on = training_rows.of_connectors([dataset]) if spec.register_as else []
    if spec.register_as:
        check_holdout(
            spec.register_as, spec.label_col, spec.input_cols, group_col=spec.group_col, trained_on=trained_on
        )
    run, key = place.run, place.key
    claim, folder = place.claim(), artifacts.folder(key, spec.run_config.artifact_location)
    artifacts.check(folder, claim, spec.run_config.artifact_location)
    user_code = UserCode() if spec.user_code is None else code_store.load_user_code(spec.user_code)
    data = _described(dataset, spec.dataset.time_col)
    if run:
        run.log_params({**_params(spec), **user_code.names()})
        run.log_dataset(spec.label_col, data.digest, spec.dataset.origin, context="training")
    trained = train(spec, user_code=user_code, env=place.environment, on_progress=place.on_progress)
    place.on_trained()
    path = artifacts.save(folder, claim, trained)
    print(f"model trained on {trained.rows} rows, saved to {path}", flush=True)
    metrics = _final_metrics(trained)
    outcome: Outcome | None = None
    uri = path
    if run:
        run.log_rounds(trained.eval_results)
        run.log_values({"rows": trained.rows, "train_seconds": trained.seconds})
        sample = dataset.to_pandas(limit=100)[list(spec.input_cols)]
        uri = run.log_model(trained.framework, trained.booster(), sample)
        if spec.register_as:
            outcome = promotion.enter(
                place.store,
                place.key,
                run,
                spec.register_as,
                is_current=place.is_current,
                tags={**place.tags, **data.tags()},
                model_uri=uri,
                model=trained.booster(),
                label_col=spec.label_col,
                group_col=spec.group_col,
                trained_on=trained_on,
            )
            metrics |= outcome.metrics
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
        restarts=trained.restarts,
        peak_memory_per_worker=tuple(worker.peak_rss_bytes for worker in trained.workers),
        mlflow_run_id=run.run_id if run else None,
        **(outcome.result() if outcome else {}),
    )


def _described(dataset: DataConnector, time_col: str | None) -> DataResult:
    """Describe the training rows, for the job's result and for the tags of the registered version in MLflow.

    Args:
        dataset: The training data.
        time_col: Name of the column with the time of each row; None: the only time column in the dataset's filters.
    """
    ends = dataset.time_range(time_col)
    low, high = (None, None) if ends is None else (_text(end) for end in ends)
    return DataResult(rows=dataset.num_rows(), digest=dataset.digest(), time_from=low, time_to=high)


def _text(value: Any) -> str:
    return str(value.isoformat()) if isinstance(value, date) else str(value)


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
    """Return the metrics of the model: of the best round if there was early stopping, otherwise of the last round."""
    at = -1 if trained.best_iteration is None else trained.best_iteration
    return {
        tracking.metric_name(evaluated, metric): values[at]
        for evaluated, series in trained.eval_results.items()
        for metric, values in series.items()
    }
