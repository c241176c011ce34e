"""A call that predicts the rows of a dataset, in the process of its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from shoal.jobs.kind import KindCall
from shoal.kinds.prediction.spec import PredictJobSpec, PredictResult
from shoal.lazy_imports import mlflow

if TYPE_CHECKING:
    from shoal.jobs.results import JobResult
    from shoal.training.locations import Claim


class PredictionCall(KindCall[PredictJobSpec, None, PredictResult]):
    """A batch prediction, which has no code."""

    def check(self) -> None:
        """Check nothing: the predictions are not among the results, and the job checks the model and the data."""

    def read(self, result: JobResult, location: str | None) -> PredictResult:
        """Convert the result of the job to the return value of `predict`."""
        from shoal.jobs.files import storage

        assert result.output_path is not None
        found = {field.name: getattr(result, field.name) for field in fields(PredictResult)}
        found["output_path"] = storage.as_given(result.output_path, self.spec.output_path)
        return PredictResult(**found)

    def run_here(self, env: Mapping[str, str], claim: Claim) -> PredictResult:
        """Predict in the connected Ray cluster."""
        from shoal.kinds.prediction.engine import run

        return run(self.spec, claim=claim, env={**env, "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri()})
