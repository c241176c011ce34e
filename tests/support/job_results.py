"""A job's result, to be changed where a test needs it."""

from __future__ import annotations

from typing import Any

from shoal.jobs import JobResult


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
