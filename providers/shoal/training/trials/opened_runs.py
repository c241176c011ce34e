"""Note the MLflow run that a trial's function opens: it becomes the trial's run, and the driver creates no other."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from shoal.training.trials import context


def note_opened_runs(mlflow: ModuleType) -> None:
    """Replace ``mlflow.start_run``, which all logging without a run calls, by a function that notes new runs."""
    original = mlflow.start_run
    if getattr(original, "notes_trials", False):
        return

    @functools.wraps(original)
    def start_run(run_id: str | None = None, *args: Any, **options: Any) -> Any:
        trial = context.running_trial()
        is_trials = (
            trial is not None
            and trial.mlflow_run is None
            # A run that exists, and a run on another server, are not those of the trial.
            and run_id is None
            and "MLFLOW_RUN_ID" not in os.environ
            and mlflow.active_run() is None
            and mlflow.get_tracking_uri() == os.environ.get("MLFLOW_TRACKING_URI")
        )
        if not is_trials:
            return original(run_id, *args, **options)
        assert trial is not None
        if len(args) < 2 and options.get("run_name") is None:
            options["run_name"] = f"trial {trial.number}"
        run = original(run_id, *args, **options)
        trial.mlflow_run = run.info.run_id
        return run

    start_run.notes_trials = True  # type: ignore[attr-defined]
    mlflow.start_run = mlflow.tracking.fluent.start_run = start_run  # type: ignore[attr-defined]
