"""Assign the MLflow model of a worker to the job's MLflow run, if user code logged the model without a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def adopt_model(log: Callable[[str], None]) -> None:
    """Assign the worker's last logged model to the job's MLflow run, if user code logged the model without a run.

    The id of the job's run is in the environment variable MLFLOW_RUN_ID, but MLflow's `log_model` does not use this
    variable. A model that is logged without an active run therefore belongs to no run.
    """
    mlflow, run_id = sys.modules.get("mlflow"), os.environ.get("MLFLOW_RUN_ID")
    if mlflow is None or not run_id:
        return
    try:
        model = mlflow.last_logged_model()
        if model is not None and not model.source_run_id:
            output = mlflow.entities.LoggedModelOutput(model.model_id, step=0)
            mlflow.MlflowClient().log_outputs(run_id, models=[output])
    except Exception as error:
        log(f"the logged MLflow model could not be assigned to the job's run {run_id}: {error}")
