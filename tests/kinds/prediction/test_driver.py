"""The driver of a batch prediction, without workers."""

from __future__ import annotations

import pytest

from shoal.jobs import PredictJobSpec
from shoal.jobs.mlflow_run import Run
from shoal.kinds.prediction.spec import PredictResult
from shoal.state.schema import JobState
from tests.jobs.driver.test_main import drive, environment, log, spec

__all__ = ["environment", "spec"]

pytestmark = pytest.mark.usefixtures("environment")


def test_predictions_that_are_written_need_no_mlflow(store, spec, monkeypatch):
    """It goes away when the last row is written."""

    def unanswered(*_: object) -> None:
        raise ConnectionError("MLflow is away")

    def predict(spec: PredictJobSpec, **_: object) -> PredictResult:
        monkeypatch.setattr(Run, "log_values", unanswered)
        return PredictResult(
            model_uri=spec.model, output_path=spec.output_path, rows=50, num_workers=1, restarts=0, seconds=0.5,
            peak_memory_per_worker=(7,),
        )  # fmt: skip

    monkeypatch.setattr("shoal.kinds.prediction.engine.run", predict)
    job_spec = PredictJobSpec(model="/model.ubj", dataset=spec.dataset, output_path="/out", tracking=spec.tracking)

    code, job = drive(store, job_spec)

    assert (code, job.state, job.error) == (0, JobState.SUCCEEDED, None), log()
    assert "the number of rows could not be logged to MLflow: MLflow is away" in log()
