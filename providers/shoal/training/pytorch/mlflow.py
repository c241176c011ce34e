"""MLflow in workers: what user code logs lands in the job's run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def adopt_model(log: Callable[[str], None]) -> None:
    """Counts the model that user code has logged last as the job's run's own.

    MLflow looks for the run in the environment, but not in `log_model`: a model logged without a run belongs to none.

    Args:
        log: Told what went wrong. A training that has ended well is not lost for it: who needs the model misses it.
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
        log(f"the model that was logged could not be counted as the job's: {error}")
