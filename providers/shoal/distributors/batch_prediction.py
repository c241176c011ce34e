"""Provide `predict`, which predicts the rows of a dataset with a model from MLflow and writes Parquet files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.connector import DataConnector
from shoal.distributors.call import Call, same_arguments
from shoal.jobs.kind import call_of
from shoal.kinds.prediction.spec import PredictJobSpec, PredictResult
from shoal.training.demand import ScalingConfig
from shoal.training.run_config import RunConfig

if TYPE_CHECKING:
    from shoal.distributors.call import SubmittedCall


def predict(
    model: str,
    dataset: DataConnector,
    output_path: str | os.PathLike[str],
    *,
    keep_cols: Sequence[str] | None = None,
    prediction_col: str = "prediction",
    input_cols: Sequence[str] = (),
    category_codes: bool = False,
    overwrite: bool = False,
    scaling_config: ScalingConfig | None = None,
    run_config: RunConfig | None = None,
) -> PredictResult:
    """Predict every row of a dataset with a model from MLflow, and write the predictions to Parquet files.

    If this process is connected to a Ray cluster, the prediction runs there, otherwise as a job on a pool. The rows are
    divided among the workers; each worker reads, predicts and writes its own share. Each row's prediction is in the
    output exactly once, in the order of the dataset, and the output appears only when it is complete. If the output
    already has the predictions of the same rows by the same version of the model, the call does nothing.

    Args:
        model: MLflow URI of the model: ``models:/NAME@ALIAS``, ``models:/NAME/VERSION``, ``runs:/...`` or a folder.
            XGBoost and LightGBM models are called directly, all other models through MLflow's pyfunc. Classifiers of
            XGBoost, LightGBM and scikit-learn predict probabilities.
        dataset: Dataset with the rows to predict.
        output_path: Directory or URI for the Parquet files, which all nodes of the pool must be able to reach.
        keep_cols: Columns of the dataset that are copied into the output beside the predictions; by default all.
        prediction_col: Name of the output column with the predictions. If the model returns several values per row,
            the columns are ``NAME_0``, ``NAME_1`` and so on.
        input_cols: Names of the input columns, in order. Needed only for a model that does not name its columns, such
            as a model whose signature is a tensor.
        category_codes: Whether the dataset contains the integer codes on which the model was trained, for categorical
            columns whose categories the model does not contain.
        overwrite: Whether to replace other predictions that shoal has written to `output_path` before. If False, the
            call fails if `output_path` contains other predictions.
        scaling_config: Number of the workers and CPUs of each worker; by default one worker per node.
        run_config: Pool to run on, and the limits of the run.

    Returns:
        The location and number of the predictions, the version of the model, and statistics of the run.

    Raises:
        InvalidArgumentError: An argument is not legal, or `output_path` has files that must not be replaced.
        DataError: The dataset has no rows, or lacks a column that the model needs.
        JobError: The model does not exist or cannot be loaded.
        JobFailedError: The job failed; the message ends with the cause.

    Example:
        >>> from shoal.data import DataConnector
        >>> from shoal.distributors import predict
        >>> predict("models:/delays@champion", DataConnector.from_parquet("today/"), "predictions/today").rows
        27034
    """
    return _call(**locals()).run()


@same_arguments(predict)
def submit_predict(**arguments: Any) -> SubmittedCall[PredictResult]:
    """Predict every row of a dataset as a job, and return without waiting for the job.

    The job goes on when this process ends. The arguments are those of `predict`.

    Returns:
        Handle of the call, whose ``result()`` returns the same as `predict`.

    Raises:
        InvalidArgumentError: An argument is not legal; or this process is connected to a Ray cluster, where calls
            do not run as jobs.
    """
    return _call(**arguments).submit()


def _call(output_path: str | os.PathLike[str], **others: Any) -> Call[PredictResult]:
    given = {name: value for name, value in others.items() if value is not None}
    return Call(call_of(PredictJobSpec(output_path=os.fspath(output_path), **given)))
