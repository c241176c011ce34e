"""Run one worker of a batch prediction: read rows, predict them, and write the predictions to Parquet files."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.data.parquet.paths import is_local, resolve
from shoal.data.parquet.source import ParquetSource
from shoal.errors import DataError
from shoal.jobs.mlflow import model_loading
from shoal.jobs.mlflow.model_loading import Predictor
from shoal.jobs.prediction.output_columns import with_predictions
from shoal.jobs.prediction.output_files import is_complete
from shoal.jobs.prediction.planning import OutputFile
from shoal.training.context import gang_context
from shoal.training.host import memory

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Assignment:
    """Arguments of a batch prediction that are the same for all workers: model, rows, columns and output folder.

    Args:
        model_uri: MLflow URI of the model, with its version.
        source: Rows to predict.
        input_cols: Input columns of a model that names no columns.
        keep_cols: Columns of the dataset that are copied into the output.
        prediction_col: Column of the predictions.
        folder: Directory or URI to write to.
        category_codes: Whether the rows contain the integer codes of categories that the model does not contain.
    """

    model_uri: str
    source: ParquetSource
    input_cols: tuple[str, ...]
    keep_cols: tuple[str, ...]
    prediction_col: str
    folder: str
    category_codes: bool = False


def predict(assignment: Assignment, files: Sequence[OutputFile]) -> int:
    """Predict the rows assigned to this worker, write them to its output files, and return its peak memory in bytes.

    A complete file that was written before a restart is kept.
    """
    memory.reset_peak()
    predictor: Predictor | None = None
    filesystem, folder = resolve(assignment.folder)
    for file in files:
        path = f"{folder}/{file.name}"
        if is_complete(filesystem, path, file.rows):
            gang_context().note({"rows": file.rows})
            continue
        predictor = predictor or model_loading.load(
            assignment.model_uri, assignment.input_cols, category_codes=assignment.category_codes
        )
        # A local file is written under a temporary name, and is renamed when it is complete. An object store cannot
        # rename, so a file there has its final name from the start. A worker that is stopped while it writes such a
        # file closes the file, and the file then looks complete. Therefore `is_complete` counts the rows.
        target = f"{folder}/.{file.name}.{uuid.uuid4().hex}" if is_local(assignment.folder) else path
        with filesystem.open_output_stream(target) as stream:
            _write(stream, _predicted(assignment, predictor, file))
        if target != path:
            filesystem.move(target, path)
    return memory.peak_rss_bytes()


def _predicted(assignment: Assignment, predictor: Predictor, file: OutputFile) -> Iterator[pa.Table]:
    read = list(dict.fromkeys((*assignment.keep_cols, *predictor.columns)))
    for table in assignment.source.read(file.ranges, read):
        predicted = predictor.predict_table(table)
        if len(predicted) != table.num_rows:
            raise DataError(
                f"the model returned {len(predicted)} predictions for {table.num_rows} rows, but must return one per "
                "row: correct the model"
            )
        yield with_predictions(table.select(list(assignment.keep_cols)), predicted, assignment.prediction_col)
        gang_context().note({"rows": table.num_rows})


def _write(stream: pa.NativeFile, tables: Iterator[pa.Table]) -> None:
    from pyarrow import parquet

    writer: parquet.ParquetWriter | None = None
    try:
        for table in tables:
            writer = writer or parquet.ParquetWriter(stream, table.schema)
            writer.write_table(table, row_group_size=max(1, table.num_rows))
    finally:
        if writer is not None:
            writer.close()
