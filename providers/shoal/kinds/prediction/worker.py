"""Run one worker of a batch prediction: read rows, predict them, and write the predictions to Parquet files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.data.output_tables import with_predictions, write_tables
from shoal.data.parquet.files import is_local, resolve
from shoal.data.parquet.source import ParquetSource
from shoal.data.planning import RowGroup, RowRange, cut, gathered, range_of
from shoal.errors import DataError
from shoal.kinds.partitions.logged_model import PartitionedModel
from shoal.kinds.prediction import output_files
from shoal.kinds.prediction.output_files import is_complete
from shoal.kinds.prediction.spec import PredictJobSpec
from shoal.lazy_imports import pa
from shoal.models import loading
from shoal.models.loading import Predictor
from shoal.new_files import complete_file
from shoal.training.host import memory
from shoal.training.reporting import gang_context


@dataclass(frozen=True, slots=True)
class Assignment:
    """Arguments of a batch prediction that are the same for all workers.

    Args:
        spec: Spec of the prediction.
        model_uri: MLflow URI of the model, with its version.
        source: Rows to predict.
        keep_cols: Columns of the dataset that are copied into the output.
        folder: Directory or URI to write to.
    """

    spec: PredictJobSpec
    model_uri: str
    source: ParquetSource
    keep_cols: tuple[str, ...]
    folder: str


def predict(assignment: Assignment, files: Sequence[OutputFile]) -> int:
    """Predict the rows assigned to this worker, write them to its output files, and return its peak memory in bytes.

    A complete file that was written before a restart is kept.
    """
    memory.reset_peak()
    spec = assignment.spec
    predictor = loading.load(assignment.model_uri, spec.input_cols, category_codes=spec.category_codes)
    filesystem, folder = resolve(assignment.folder)
    for file in files:
        path = f"{folder}/{file.name}"
        if is_complete(filesystem, path, file.rows):
            gang_context().note({"rows": file.rows})
            if isinstance(predictor, PartitionedModel):
                for table in assignment.source.read(file.ranges, predictor.by):
                    gang_context().note({"rows": 0, "unknown": predictor.unknown(table)[1]})
            continue
        # A worker that is stopped while it writes a file into an object store closes the file, and the file then looks
        # complete. Therefore `is_complete` counts the rows.
        with complete_file(filesystem, path, is_local=is_local(assignment.folder)) as stream:
            write_tables(stream, _predicted(assignment, predictor, file))
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
        yield with_predictions(table.select(list(assignment.keep_cols)), predicted, assignment.spec.prediction_col)
        note: dict[str, Any] = {"rows": table.num_rows}
        if isinstance(predictor, PartitionedModel):
            note["unknown"] = predictor.unknown(table)[1]
        gang_context().note(note)


@dataclass(frozen=True, slots=True)
class OutputFile:
    """Plan of one output file: the rows of the dataset whose predictions are written to the file.

    Args:
        first_row: Position of the file's first row in the dataset, from 0.
        ranges: The parts of the dataset's row groups that contain the file's rows, in order.
    """

    first_row: int
    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        """Return the number of rows in the file."""
        return sum(part.rows for part in self.ranges)

    @property
    def name(self) -> str:
        """Return the name of the file."""
        return output_files.file_name(self.first_row, self.rows)


def plan_files(row_groups: Sequence[RowGroup], num_workers: int) -> tuple[tuple[OutputFile, ...], ...]:
    """Divide the rows into one contiguous share per worker, and each share into files."""
    total = sum(group.rows for group in row_groups)
    borders = [total * rank // num_workers for rank in range(num_workers + 1)]
    whole = [range_of(group) for group in row_groups]
    return tuple(tuple(_files(cut(whole, start, stop), start)) for start, stop in itertools.pairwise(borders))


def _files(ranges: Sequence[RowRange], start: int) -> Iterator[OutputFile]:
    for together in gathered(ranges, output_files.FILE_ROWS):
        file = OutputFile(start, tuple(together))
        yield file
        start += file.rows
