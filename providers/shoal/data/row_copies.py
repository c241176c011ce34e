"""Copy the rows of a dataset spec to Parquet files, for a job that cannot or shall not read them in place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shoal.data.connector import DataConnector
from shoal.data.csv_files import open_text, stage_csv
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.json_files import stage_json
from shoal.data.listing import DataFile
from shoal.data.output_tables import described
from shoal.data.parquet.files import list_files
from shoal.data.row_writer import GROUP_ROWS, write_rows
from shoal.data.sql import stage_select
from shoal.errors import DataError
from shoal.lazy_imports import pa, pq

_SAMPLE_BYTES = 16 * 2**20
"""Bytes of text that are read of a CSV or JSON file as its first rows."""

_COPY_BYTES = 64 * 2**20
"""Size in memory to which few rows are repeated in one file."""


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
    directory of the copies, most of which are links to one file.

    Args:
        dataset: The dataset.
        url: URL of the database, if the dataset has a query.
        rows: Number of rows.
        folder: Empty local directory.
        columns: See `copy_rows`.

    Raises:
        DataError: There are no rows.
    """
    copies = Path(folder, "copies")
    copies.mkdir()
    if dataset.sql is not None:
        found = _copied(dataset, url, Path(folder, "first"), columns)
    else:
        tables = (_first_of(dataset, file, folder, number) for number, file in enumerate(list_files(dataset.paths)))
        found = next((table for table in tables if table is not None), None)
    if found is None:
        raise DataError(f"{dataset.origin[0]} has no rows")
    # A file system allows some ten thousand links to a file.
    times = min(-(-rows // len(found)), max(1, _COPY_BYTES // max(1, found.nbytes)))
    whole = pa.concat_tables([found] * times).slice(0, rows)
    pq.write_table(whole, copies / "0.parquet", row_group_size=GROUP_ROWS)
    for number in range(1, rows // len(whole)):
        os.link(copies / "0.parquet", copies / f"{number}.parquet")
    if rest := rows % len(whole):
        pq.write_table(whole.slice(0, rest), copies / "rest.parquet", row_group_size=GROUP_ROWS)
    return str(copies)


def _copied(dataset: DatasetSpec, url: str | None, folder: Path, columns: Sequence[str] | None) -> pa.Table | None:
    """Return the rows that `copy_rows` copies to a folder that does not exist; None without rows."""
    folder.mkdir()
    if not copy_rows(dataset, url, str(folder), columns, only_first=True):
        return None
    [file] = folder.iterdir()
    return pq.read_table(file)


def _first_of(dataset: DatasetSpec, file: DataFile, folder: str, number: int) -> pa.Table | None:
    """Return the first rows of a CSV or JSON file; None without rows."""
    head = Path(folder, f"head-{number}.{dataset.format}")
    with open_text(file) as stream:
        text = stream.read(_SAMPLE_BYTES)
    if len(text) == _SAMPLE_BYTES:
        text = text[: _end_of_rows(text, dataset.format == "csv")]
    if not text.strip():
        return None
    head.write_bytes(text)
    try:
        return _copied(dataset.model_copy(update={"paths": (str(head),)}), None, Path(folder, f"first-{number}"), None)
    except DataError as error:
        raise DataError(str(error).replace(str(head), file.path)) from None


def _end_of_rows(text: bytes, is_csv: bool) -> int:
    """Return the end of the last whole row. In CSV, a line break between two quotes is part of a field."""
    last = end = text.rfind(b"\n") + 1
    quotes = text.count(b'"', 0, end)
    while is_csv and quotes % 2:
        line = text.rfind(b"\n", 0, end - 1) + 1
        quotes -= text.count(b'"', line, end)
        end = line
        if end < last // 2:  # A single quote, such as that of an inch, is in all later lines.
            return last
    return end
