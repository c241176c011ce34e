"""Results of a job and of a promotion, to be changed where a test needs it."""

from __future__ import annotations

from typing import Any

from shoal.jobs import JobResult, PromotionResult


def result_of(**changes: Any) -> JobResult:
    """A small result of an untracked job on one worker."""
    plain: dict[str, Any] = {
        "job_id": "job",
        "attempt": 1,
        "model_path": "/m/model.ubj",
        "model_digest": None,
        "model_uri": "/m/model.ubj",
        "metrics": {},
        "best_iteration": None,
        "rows": None,
        "num_workers": 1,
        "seconds": 1.0,
        "restarts": 0,
        "peak_memory_per_worker": (),
        "mlflow_run_id": None,
        "model_version": None,
        "promoted": None,
        "champion": None,
    }
    return JobResult(**{**plain, **changes})


def decided(promoted: bool) -> PromotionResult:
    """The result of a promotion of version 7 of the model "delays", which had waited for a decision."""
    return PromotionResult(
        model_name="delays",
        model_version="7",
        model_uri="models:/delays/7",
        alias="champion",
        promoted=promoted,
        decision={"reason": "better" if promoted else "champion_not_beaten", "sentence": "decided"},
        champion={"version": "6", "value": 18.0},
        metric="rmse",
        metrics={"holdout-rmse": 17.5},
        job_id="job",
    )
