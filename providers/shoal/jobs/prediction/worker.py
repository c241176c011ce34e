"""Run a batch prediction in a worker: read the worker's rows, predict them, and write Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.data.parquet.filesystems import is_local, resolve
from shoal.data.parquet.source import ParquetSource
from shoal.errors import DataError
from shoal.jobs.prediction import model
from shoal.jobs.prediction.model import Predictor
from shoal.jobs.prediction.planning import OutputFile
from shoal.training.context import gang_context
from shoal.training.host import memory

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Assignment:
    """Data about a batch prediction that all of its workers get.

    Args:
        model_uri: MLflow URI of the model, with its version.
        source: Dataset with the rows to predict.
        input_cols: Names of the input columns; used only if the model's signature names no columns.
        keep_cols: Columns of the dataset that are copied into the output beside the predictions.
        prediction_col: Name of the output column with the predictions.
        folder: Directory or URI of the folder to which the workers write.
    """

    model_uri: str
    source: ParquetSource
    input_cols: tuple[str, ...]
    keep_cols: tuple[str, ...]
    prediction_col: str
    folder: str


def predict(assignment: Assignment, files: Sequence[OutputFile]) -> int:
    """Predict the rows of this worker's files, and write the files.

    A file that exists already is skipped: it is complete, and was written before a restart.

    Args:
        assignment: Data about the prediction.
        files: The files that this worker has to write.

    Returns:
        The highest resident memory of this process in bytes.
    """
    memory.reset_peak()
    predictor: Predictor | None = None
    filesystem, folder = resolve(assignment.folder)
    for file in files:
        path = f"{folder}/{file.name}"
        if filesystem.get_file_info(path).is_file:
            gang_context().note({"rows": file.rows})
            continue
        predictor = predictor or model.load(assignment.model_uri, assignment.input_cols)
        # A local file is written under a temporary name, and gets its own name when it is complete. Object stores need
        # no temporary name, because they show a file only when it is complete.
        target = f"{folder}/.{file.name}.{gang_context().rank}" if is_local(assignment.folder) else path
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
            raise DataError(f"the model returned {len(predicted)} predictions for {table.num_rows} rows")
        yield with_predictions(table.select(list(assignment.keep_cols)), predicted, assignment.prediction_col)
        gang_context().note({"rows": table.num_rows})


def with_predictions(table: pa.Table, predicted: np.ndarray, column: str) -> pa.Table:
    """Return a table with the predictions appended: one column, or several if there are several values per row.

    Args:
        table: Other columns of the same rows; the table may have no columns.
        predicted: Predictions ``[rows]`` or ``[rows, outputs]``.
        column: Name of the new column. Several columns get the names ``<column>_0``, ``<column>_1`` and so on.

    Raises:
        DataError: The table has a column of that name already.
    """
    import pyarrow as pa

    flat = predicted.reshape(len(predicted), -1)
    names = [column] if flat.shape[1] == 1 else [f"{column}_{number}" for number in range(flat.shape[1])]
    if clash := sorted(set(names) & set(table.column_names)):
        raise DataError(f"the dataset has a column {clash[0]} already: choose another prediction_col")
    for name, values in zip(names, flat.T, strict=True):
        array = pa.array(values)
        table = table.append_column(name, array) if table.num_columns else pa.table({name: array})
    return table


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
