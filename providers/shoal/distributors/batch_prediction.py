"""`predict`: predict the rows of a dataset with a model of MLflow's registry, and write them as Parquet."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from shoal.data.connector import DataConnector
from shoal.distributors.dispatch import is_connected
from shoal.jobs.predict_spec import PredictJobSpec, PredictResult
from shoal.training.claims import Claim
from shoal.training.run_config import RunConfig
from shoal.training.scaling import ScalingConfig


def predict(
    model: str,
    dataset: DataConnector,
    output_path: str | os.PathLike[str],
    *,
    keep_cols: Sequence[str] | None = None,
    prediction_col: str = "prediction",
    input_cols: Sequence[str] = (),
    overwrite: bool = False,
    scaling_config: ScalingConfig | None = None,
    run_config: RunConfig | None = None,
) -> PredictResult:
    """Predict every row of a dataset, in the connected Ray cluster or else as a job on a pool.

    The rows are sharded over the workers; each worker reads, predicts and writes its own share. The output is complete
    or absent: every row is in it once, in the order of the dataset. A call for predictions that are there already, of
    the same rows by the same version of the model, does nothing.

    Args:
        model: MLflow URI of the model: ``models:/NAME@ALIAS``, ``models:/NAME/VERSION``, ``runs:/...`` or a folder. A
            booster of XGBoost or LightGBM predicts by itself, every other model through MLflow's pyfunc.
        dataset: Rows to predict.
        output_path: Directory or URI for the Parquet files. All nodes must reach it.
        keep_cols: Columns of the dataset that the output has as well; all of them by default.
        prediction_col: Column of the predictions. A model with several values per row gets ``NAME_0``, ``NAME_1`` and
            so on.
        input_cols: Input columns of a model whose signature is a tensor, which names no columns.
        overwrite: Replace other predictions in `output_path` that shoal has written, instead of refusing.
        scaling_config: Number and CPUs of the workers; by default one per node.
        run_config: Pool to run on, and the limits of the run.

    Returns:
        Where the predictions are, their number, and the version of the model that predicted.

    Raises:
        InvalidArgumentError: An argument is not legal, or the output has something that must not be replaced.
        DataError: The dataset has no rows, or lacks a column that the model needs.
        JobError: The model does not exist or cannot be loaded.
        JobFailedError: The job failed; the message ends with the cause.

    Example:
        >>> from shoal.data import DataConnector
        >>> from shoal.distributors import predict
        >>> predict("models:/delays@champion", DataConnector.from_parquet("today/"), "predictions/today").rows
        27034
    """
    spec = PredictJobSpec(
        model=model,
        dataset=dataset.to_spec(),
        output_path=os.fspath(output_path),
        keep_cols=None if keep_cols is None else tuple(keep_cols),
        prediction_col=prediction_col,
        input_cols=tuple(input_cols),
        overwrite=overwrite,
        scaling_config=scaling_config or ScalingConfig(),
        run_config=run_config or RunConfig(),
    )
    if is_connected():
        import mlflow

        from shoal.jobs.prediction.engine import run

        claim = Claim(spec.run_config.job_id or f"predict-{secrets.token_hex(6)}", f"python:{os.getuid()}")
        return run(spec, claim=claim, env={"MLFLOW_TRACKING_URI": mlflow.get_tracking_uri()})
    from shoal.distributors.as_job import predict_as_job

    return predict_as_job(spec)
