"""Stage the rows of CSV files: read them as text, find the types of their columns from all rows, and convert them."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from shoal.data.filters import check_unique
from shoal.data.listing import DataFile
from shoal.data.parquet.files import list_files, resolve
from shoal.data.row_writer import write_rows
from shoal.data.text_columns import converted, first_wrong, given_types, widened_by
from shoal.errors import DataAccessError, DataError, shown
from shoal.lazy_imports import pa, pc

# Arrow reads blocks of complete rows, so a row must fit into a block.
_BLOCK_BYTES = 16 * 2**20
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
_LARGEST_FIELD = 2**31 - 1


def stage_csv(paths: Sequence[str], columns: Mapping[str, str] | None, delimiter: str, directory: str) -> int:
    """Write the rows of CSV files to a Parquet file in a directory.

    The files are read twice, unless the types of all columns are given: once to find the types, once to convert.

    Args:
        paths: Files, directories or globs; the files of a directory are sorted by path.
        columns: Types of columns by name; the types of the others come from the values of all rows.
        delimiter: Character between two fields.
        directory: Directory of staged data.

    Returns:
        Number of rows.

    Raises:
        DataError: A file has no header, another header than the first one, or a row with a wrong number of fields or a
            value that is not of the column's type; the message names file, line, column and value.
    """
    files = list_files(paths)
    names = _common_header(files, delimiter)
    refuse_partitions(files, paths, names)
    types = given_types(columns)
    for name in types:
        if name not in names:
            raise DataError(f'{files[0].path} has no column "{name}", which columns= names: it has {", ".join(names)}')
    unknown = [name for name in names if name not in types]
    types |= dict.fromkeys(unknown, pa.null())
    for file in files if unknown else ():
        for _, batch in _batches(file, names, delimiter, unknown):
            for name in unknown:
                types[name] = widened_by(types[name], batch.column(name))
    schema = pa.schema([(name, types[name]) for name in names])
    rows = (
        _converted(file, first, batch, schema, delimiter, unknown)
        for file in files
        for first, batch in _batches(file, names, delimiter, names)
    )
    return write_rows(rows, schema, directory)


def refuse_partitions(files: Sequence[DataFile], paths: Sequence[str], names: Sequence[str]) -> None:
    """Refuse files whose rows would lose a column that only the name of a directory has (``month=1/``)."""
    for file in files:
        if lost := sorted(file.partitions.keys() - set(names)) if file.path not in paths else []:
            raise DataError(
                f'{file.path}: the column "{lost[0]}" is only in the name of a directory, which is not read for CSV '
                "and JSON files: write the column into the files, or name each file"
            )


@contextlib.contextmanager
def open_text(file: DataFile) -> Iterator[Any]:
    """Open a file that may be compressed (.gz, .zst, .bz2, .lz4), and yield the stream of its bytes."""
    filesystem, inner = resolve(file.path)
    try:
        compression = _COMPRESSIONS.get(inner[inner.rfind(".") :].lower())
        with filesystem.open_input_stream(inner, compression=compression) as stream:
            yield stream
    except OSError as exc:
        raise DataAccessError(f"{file.path} cannot be read: {exc}") from None


def _common_header(files: Sequence[DataFile], delimiter: str) -> list[str]:
    """Return the names of the columns, which must be the same in all files, in the order of the first file."""
    headers = [_header(file, delimiter) for file in files]
    for file, header in zip(files, headers, strict=True):
        if sorted(header) != sorted(headers[0]):
            other = sorted(set(header) ^ set(headers[0]))[0]
            raise DataError(
                f'the column "{other}" is in only one of {files[0].path} and {file.path}: give all files the same '
                "header"
            )
    return headers[0]


def _header(file: DataFile, delimiter: str) -> list[str]:
    with open_text(file) as stream:
        if stream.read(2) == b"\x1f\x8b":
            raise DataError(f"{file.path} is compressed with gzip: give it the suffix .gz")
    line, names = next(_records(file, delimiter), (1, []))
    if not _is_utf8("".join(names)):
        raise DataError(f"{file.path}, line {line}: the header has bytes that are not UTF-8: save the file as UTF-8")
    if not names:
        raise DataError(f"{file.path} is empty: its first line must have the names of the columns")
    for number, name in enumerate(names, 1):
        if not name:
            raise DataError(f"{file.path}: column {number} has no name in the header: name it, or leave it out")
    check_unique(names, f"{file.path} has")
    others = [other for other in ",;\t|" if other in names[0]]
    if len(names) == 1 and others:
        raise DataError(
            f"{file.path} has only one column, {names[0]!r}, with the delimiter {delimiter!r}: if {others[0]!r} "
            f"separates the columns, pass delimiter={others[0]!r}"
        )
    return names


def _records(file: DataFile, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each record that is not empty, with the number of its first line.

    Bytes that are not UTF-8 become surrogates.
    """
    limit, line = csv.field_size_limit(_LARGEST_FIELD), 1
    try:
        with open_text(file) as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            for record in reader:
                if record:
                    yield line, record
                line = reader.line_num + 1
    except csv.Error:
        raise DataError(
            f"{file.path}, line {line}: a field begins with a quote that is not closed, or has text after its closing "
            "quote: put quotes around the whole field, and double those inside"
        ) from None
    finally:
        csv.field_size_limit(limit)


def _batches(
    file: DataFile, names: Sequence[str], delimiter: str, wanted: Sequence[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield batches of the columns of a file as text, each with the number of rows before it.

    Arrow takes a quote that is not closed for one that the end of the file closes, so a record is appended, which is
    the last one only if no quote is open.
    """
    import pyarrow.csv as pacsv

    convert = pacsv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        include_columns=list(wanted),
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        null_values=[""],
    )
    parse = pacsv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    ends = iter([b"\n" + delimiter.encode().join([b'"\0"'] * len(names)) + b"\n"])
    last: Any = None
    first, has_newlines = 0, False
    with open_text(file) as stream:
        ended = pa.TransformInputStream(stream, lambda chunk: bytes(chunk) or next(ends, b""))
        try:
            for batch in pacsv.open_csv(ended, pacsv.ReadOptions(block_size=_BLOCK_BYTES), parse, convert):
                has_newlines |= any(pc.any(pc.match_substring_regex(c, "[\r\n]")).as_py() for c in batch.columns)
                if last and batch.num_rows:
                    yield first, last
                    first += last.num_rows
                last = batch if batch.num_rows else last
        except pa.ArrowInvalid as exc:
            raise _unreadable(file, names, delimiter, str(exc)) from None
    if any(column[-1].as_py() != "\0" for column in last):
        raise _unreadable(file, names, delimiter, "a quote is not closed")
    if has_newlines:
        # A later quote may have closed one: Arrow accepts text after a closing quote.
        for _ in _records(file, delimiter):
            pass
    yield first, last[:-1]


def _is_utf8(value: str) -> bool:
    return value.isprintable() or not any("\udc80" <= character <= "\udcff" for character in value)


def _unreadable(file: DataFile, names: Sequence[str], delimiter: str, reason: str) -> DataError:
    """Return the error for a file that Arrow cannot divide into fields, with the line of the first wrong record."""
    for line, record in _records(file, delimiter):
        if len(record) != len(names):
            return DataError(
                f"{file.path}, line {line}: the record has {len(record)} fields, but the header has {len(names)}: "
                "correct the line, or put quotes around fields with a delimiter"
            )
        for name, value in zip(names, record, strict=True):
            if not _is_utf8(value):
                return DataError(
                    f'{file.path}, line {line}: column "{name}" has bytes that are not UTF-8: save the file as UTF-8'
                )
    return DataError(f"{file.path} cannot be read as CSV: {reason}")


def _converted(
    file: DataFile, first: int, batch: pa.RecordBatch, schema: pa.Schema, delimiter: str, found: Sequence[str]
) -> pa.RecordBatch:
    columns = []
    for field in schema:
        texts, exact = batch.column(field.name), field.name in found
        try:
            columns.append(converted(texts, field.type, exact=exact))
        except pa.ArrowInvalid:
            row = first_wrong(texts, field.type, exact=exact)
            line, _ = next(islice(_records(file, delimiter), first + row + 1, None))
            raise wrong_value(file, line, field, texts[row].as_py()) from None
    return pa.record_batch(columns, schema=schema)


def wrong_value(file: DataFile, line: int, field: pa.Field, value: object) -> DataError:
    """Return the error for a value that is not of the type of its column."""
    return DataError(
        f'{file.path}, line {line}: column "{field.name}" has the value {shown(value)}, which {field.type} cannot '
        "hold: correct the value, or give the column another type with columns="
    )
