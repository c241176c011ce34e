"""Run a batch prediction in its job's driver: predict the rows of the dataset, and log the run to MLflow."""

from __future__ import annotations

from shoal.data.connector import DataConnector
from shoal.jobs.driver.attempt_context import AttemptContext, before_work, only_printed
from shoal.jobs.kind import KindDriver
from shoal.jobs.mlflow_run import retrying_briefly
from shoal.jobs.results import JobResult
from shoal.kinds.prediction.spec import PredictJobSpec


class PredictionDriver(KindDriver[PredictJobSpec, AttemptContext]):
    """A batch prediction."""

    def work(self, place: AttemptContext) -> tuple[JobResult, None]:
        """Run the batch prediction that a spec describes, and return the job's result.

        Raises:
            ShoalError: The job failed; the message has the cause.
        """
        from shoal.kinds.prediction.engine import run

        spec = self.spec
        if tracked := place.run:
            digest = DataConnector.from_spec(spec.dataset).digest()
            with before_work(tracked.uri, place.environment):
                tracked.log_params({"model": spec.model, "output_path": spec.output_path, "framework": spec.framework})
                tracked.log_dataset(spec.prediction_col, digest, spec.dataset.origin, context="prediction")
        answer = run(
            spec,
            claim=place.claim(),
            env=place.environment,
            may_publish=place.is_current,
            has_ended=place.has_ended,
            on_progress=place.on_progress,
        )
        place.stopwatch.worked(train_s=answer.seconds)
        if tracked:
            # The predictions are complete, so the job does not fail if MLflow is away.
            with only_printed("the number of rows could not be logged to MLflow"), retrying_briefly(place.environment):
                tracked.log_values({"rows": answer.rows, "predict_seconds": answer.seconds})
        print(f"{answer.rows} rows predicted by {answer.model_uri}, written to {answer.output_path}", flush=True)
        result = place.result(
            model_path=answer.model_uri,
            model_uri=answer.model_uri,
            rows=answer.rows,
            output_path=answer.output_path,
            num_workers=answer.num_workers,
            times=place.times(),
            restarts=answer.restarts,
            peak_memory_per_worker=answer.peak_memory_per_worker,
        )
        return result, None
