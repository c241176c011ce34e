"""Copy the rows of a dataset spec to Parquet files, for a job that cannot or shall not read them in place."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.data.connector import DataConnector
from shoal.data.csv_files import stage_csv
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.json_files import stage_json
from shoal.data.output_tables import described
from shoal.data.row_writer import write_rows
from shoal.data.sql import stage_select


def copy_rows(dataset: DatasetSpec, url: str | None, directory: str, columns: Sequence[str] | None = None) -> int:
    """Copy the rows of a dataset, before its filters and splits, to a Parquet file in a directory of staged data.

    Args:
        dataset: The dataset.
        url: URL of the database, if the dataset has a query.
        directory: Directory of staged data.
        columns: Columns of a query's result to copy, if it has all of them; None: all.

    Returns:
        Number of rows.
    """
    if dataset.sql is not None:
        return stage_select(dataset.sql, dataset.params or {}, str(url), directory, columns, dataset.partition_by)
    if dataset.format == "csv":
        return stage_csv(dataset.paths, dataset.columns, dataset.delimiter, directory)
    if dataset.format == "json":
        return stage_json(dataset.paths, dataset.columns, directory)
    whole = DataConnector.from_spec(dataset.whole().model_copy(update={"staging": None})).source
    tables = whole.read(whole.ranges())
    # The descriptions of the columns by pandas and Hugging Face's `datasets`.
    schema = described(whole.schema().empty_table(), whole).schema
    stored = whole.metadata(whole.reference().path).metadata or {}
    kept = {key: text for key, text in stored.items() if key == b"huggingface"}
    schema = schema.with_metadata({**(schema.metadata or {}), **kept})
    return write_rows((batch for table in tables for batch in table.to_batches()), schema, directory)
