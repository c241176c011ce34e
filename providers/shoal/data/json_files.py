"""Stage the rows of files with one JSON object per line: find the types of the columns from all rows, and convert the
values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from shoal.data.csv_files import open_text, refuse_partitions, wrong_value
from shoal.data.listing import DataFile
from shoal.data.parquet.files import list_files
from shoal.data.row_writer import write_rows
from shoal.data.text_columns import converted, first_failing, first_wrong, given_types, widened_by
from shoal.errors import DataError, shown
from shoal.lazy_imports import pa

_BLOCK_BYTES = 16 * 2**20
_LONGEST_LINE = 64 * 2**20
# Whole numbers that may be above 2**53.
_LARGE = re.compile(rb"(?<![\d.])\d{16,}(?![\d.eE])")
_COLUMN = re.compile(r"Column\(/([^/)]*)")


def stage_json(paths: Sequence[str], columns: Mapping[str, str] | None, directory: str) -> int:
    """Write the rows of files of JSON lines to a Parquet file in a directory.

    The files are read twice: once to find the types, once to convert. Objects are structs, and a missing key is null.

    Args:
        paths: Files, directories or globs; the files of a directory are sorted by path.
        columns: Types of columns by name; the types of the others come from the values of all rows. A column that no
            row has is null.
        directory: Directory of staged data.

    Returns:
        Number of rows.

    Raises:
        DataError: A line is no JSON object, or the values of a column have no common type; the message names file,
            line, column and value.
    """
    files = list_files(paths)
    given = given_types(columns)
    if not (types := _types(files, given)):
        raise DataError(f"{files[0].path} has no rows: each line must have one JSON object")
    refuse_partitions(files, paths, list(types))
    schema = pa.schema(list(types.items()))
    rows = (
        batch
        for file in files
        for line, block in _blocks(file)
        for batch in _converted(file, line, block, schema, given)
    )
    return write_rows(rows, schema, directory)


def _types(files: Sequence[DataFile], given: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """Return the type of each column that the values of all rows have in common. Text that is a date or a time in all
    rows becomes such a type, as in CSV files."""
    known = pa.schema([])
    texts: dict[str, pa.DataType] = {}
    for file in files:
        for line, block in _blocks(file):
            read_as = {name: _as_read(type_) for name, type_ in given.items()} | dict.fromkeys(texts, pa.string())
            table = _parsed(file, line, block, read_as)
            _check_lines(file, line, block, table.num_rows)
            # Arrow takes text that looks like a time for one, and reads other text of the same column no longer.
            if times := [field.name for field in table.schema if pa.types.is_timestamp(field.type)]:
                table = _parsed(file, line, block, read_as | dict.fromkeys(times, pa.string()))
            found = pa.schema([(field.name, _without_times(field.type)) for field in table.schema])
            try:
                known = pa.unify_schemas([known, found], promote_options="permissive")
            except (pa.ArrowTypeError, pa.ArrowInvalid):
                before = {field.name: field.type for field in known if "null" not in str(field.type)}
                _parsed(file, line, block, before)
                raise DataError(
                    f"{file.path}: the values of a column have no common type from line {line} on"
                ) from None
            for field in found:
                if pa.types.is_string(field.type) and field.name not in given:
                    values = table.column(field.name).combine_chunks()
                    texts[field.name] = widened_by(texts.get(field.name, pa.null()), values, numbers=False)
    narrow = {name: type_ for name, type_ in texts.items() if not pa.types.is_null(type_)}
    return {field.name: given.get(field.name, narrow.get(field.name, field.type)) for field in known}


def _as_read(type_: pa.DataType) -> pa.DataType:
    """Return the type as which Arrow reads a column: JSON has no dates and times."""
    return pa.string() if pa.types.is_temporal(type_) else type_


def _without_times(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(type_):
        return pa.struct([(field.name, _without_times(field.type)) for field in type_])
    return pa.list_(_without_times(type_.value_type)) if pa.types.is_list(type_) else _as_read(type_)


def _blocks(file: DataFile) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of complete lines, each with the number of its first line."""
    line, rest = 1, b""
    with open_text(file) as stream:
        while chunk := stream.read(_BLOCK_BYTES):
            rest += chunk
            if line == 1 and rest.lstrip().startswith(b"["):
                raise DataError(
                    f"{file.path} is a JSON array, but must have one object per line: in pandas, write it with "
                    'to_json(orient="records", lines=True)'
                )
            end = rest.rfind(b"\n", len(rest) - len(chunk)) + 1
            if not end and len(rest) > _LONGEST_LINE:
                raise DataError(
                    f"{file.path}, line {line} is longer than {_LONGEST_LINE} bytes: write one object per line"
                )
            if end:
                yield line, rest[:end]
                line, rest = line + rest.count(b"\n", 0, end), rest[end:]
    if rest.strip():
        yield line, rest


def _parsed(file: DataFile, line: int, block: bytes, types: Mapping[str, pa.DataType]) -> pa.Table:
    schema = pa.schema(list(types.items()))
    try:
        return _read(block, schema)
    except pa.ArrowInvalid:
        lines = block.splitlines(keepends=True)
        # The types of a column follow from the lines before, so that each part begins with the first line.
        at = first_failing(len(lines), lambda _, stop: _read(b"".join(lines[:stop]), schema))
        raise _refused(file, line + at, lines[: at + 1], schema) from None


def _check_lines(file: DataFile, line: int, block: bytes, rows: int) -> None:
    """Check that each line has one object: Arrow also reads several objects in a line, and ``null`` as a row."""
    lines = [(at, text.strip()) for at, text in enumerate(block.splitlines(), line) if text.strip()]
    for at, text in lines:
        if not text.startswith(b"{") or (rows != len(lines) and not _is_object(text)):
            raise DataError(f"{file.path}, line {at} is no JSON object: each line must have one JSON object")


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _read(block: bytes, schema: pa.Schema) -> pa.Table:
    import pyarrow.json as pajson

    whole = pajson.ReadOptions(use_threads=False, block_size=len(block) + 1)
    table = pajson.read_json(pa.BufferReader(block), whole, pajson.ParseOptions(explicit_schema=schema))
    table.validate(full=True)
    return table


def _refused(file: DataFile, line: int, lines: Sequence[bytes], schema: pa.Schema) -> DataError:
    """Return the error for the last of several lines, which Arrow cannot read after the others."""
    try:
        _read(b"".join(lines), schema)
        reason = ""
    except pa.ArrowInvalid as exc:
        reason = re.sub(r" in row \d+$", "", str(exc))
    place = f"{file.path}, line {line}"
    try:
        row = json.loads(lines[-1].decode())
    except ValueError as exc:
        return DataError(f"{place} is no JSON object: {exc}; correct the line")
    names = _COLUMN.findall(reason) or [field.name for field in schema if not _fits(lines[-1], field)]
    if not isinstance(row, dict) or not names:
        return DataError(f"{place} cannot be read: {reason}; each line must have one JSON object")
    return DataError(
        f'{place}: column "{names[0]}" has the value {shown(row.get(names[0]))}, which is of another type than the '
        f"values before, or than columns= says ({reason}): write values of one type"
    )


def _fits(line: bytes, field: pa.Field) -> bool:
    try:
        _read(line, pa.schema([field]))
    except pa.ArrowInvalid:
        return False
    return True


def _refuse_rounding(file: DataFile, line: int, block: bytes, fields: Sequence[pa.Field]) -> None:
    """Refuse whole numbers that float64 may round, the type that Arrow gives a column with whole numbers and others."""
    for at, text in enumerate(block.splitlines() if fields and _LARGE.search(block) else (), line):
        row = json.loads(text) if _LARGE.search(text) else {}
        for field in fields:
            try:
                pa.array([row.get(field.name)], field.type)
            except pa.ArrowInvalid:
                raise wrong_value(file, at, field, row[field.name]) from None


def _converted(
    file: DataFile, line: int, block: bytes, schema: pa.Schema, given: Mapping[str, pa.DataType]
) -> Iterator[pa.RecordBatch]:
    floats = [field for field in schema if "double" in str(field.type) and field.name not in given]
    _refuse_rounding(file, line, block, floats)
    table = _parsed(file, line, block, {field.name: _as_read(field.type) for field in schema})
    columns = []
    for field in schema:
        values = table.column(field.name)
        if _as_read(field.type) != field.type:
            texts = values.combine_chunks()
            try:
                values = converted(texts, field.type)
            except pa.ArrowInvalid:
                row = first_wrong(texts, field.type)
                filled = [at for at, each in enumerate(block.splitlines(), line) if each.strip()]
                raise wrong_value(file, filled[row], field, texts[row].as_py()) from None
        columns.append(values)
    yield from pa.table(columns, schema=schema).to_batches()
