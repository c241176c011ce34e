"""Copy the rows of a dataset spec to Parquet files, for a job that cannot or shall not read them in place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shoal.data.connector import DataConnector
from shoal.data.csv_files import open_text, stage_csv
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.json_files import stage_json
from shoal.data.output_tables import described
from shoal.data.parquet.files import list_files
from shoal.data.row_writer import GROUP_ROWS, write_rows
from shoal.data.sql import stage_select
from shoal.errors import DataError
from shoal.lazy_imports import pq

_SAMPLE_BYTES = 16 * 2**20
"""Bytes of text that are read of a CSV or JSON file as its first rows."""


def copy_rows(
    dataset: DatasetSpec,
    url: str | None,
    directory: str,
    columns: Sequence[str] | None = None,
    *,
    only_first: bool = False,
) -> int:
    """Copy the rows of a dataset, before its filters and splits, to a Parquet file in a directory of staged data.

    Args:
        dataset: The dataset.
        url: URL of the database, if the dataset has a query.
        directory: Directory of staged data.
        columns: Columns of a query's result to copy, if it has all of them; None: all.
        only_first: Whether to copy only the first rows of a query's result.

    Returns:
        Number of rows.
    """
    if dataset.sql is not None:
        options = (columns, None if only_first else dataset.partition_by, only_first)
        return stage_select(dataset.sql, dataset.params or {}, str(url), directory, *options)
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


def copy_first_rows(
    dataset: DatasetSpec, url: str | None, rows: int, folder: str, columns: Sequence[str] | None = None
) -> str:
    """Copy the first rows of a query or of CSV or JSON files, as often as it takes for a number of rows, and return the
    directory of the copies, which are links to one file.

    Args:
        dataset: The dataset.
        url: URL of the database, if the dataset has a query.
        rows: Number of rows.
        folder: Empty local directory.
        columns: See `copy_rows`.

    Raises:
        DataError: There are no rows.
    """
    first, copies = Path(folder, "first"), Path(folder, "copies")
    first.mkdir()
    copies.mkdir()
    if dataset.sql is None:
        head = Path(folder, f"head.{dataset.format}")
        with open_text(list_files(dataset.paths)[0]) as stream:
            text = stream.read(_SAMPLE_BYTES)
        # In CSV, a line break between two quotes is part of a field. JSON has no NUL.
        quote, end = b'"' if dataset.format == "csv" else b"\0", len(text)
        quotes = text.count(quote)
        while len(text) == _SAMPLE_BYTES and end and (text[end - 1 : end] != b"\n" or quotes % 2):
            line = text.rfind(b"\n", 0, end - 1) + 1
            quotes -= text.count(quote, line, end)
            end = line
        head.write_bytes(text[:end])
        dataset = dataset.model_copy(update={"paths": (str(head),)})
    if not (found := copy_rows(dataset, url, str(first), columns, only_first=True)):
        raise DataError(f"{dataset.origin[0]} has no rows")
    [file] = first.iterdir()
    whole, rest = divmod(rows, found)
    for number in range(whole):
        os.link(file, copies / f"{number:08d}.parquet")
    if rest:
        pq.write_table(pq.read_table(file).slice(0, rest), copies / "rest.parquet", row_group_size=GROUP_ROWS)
    return str(copies)
