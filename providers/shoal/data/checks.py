"""Refusing bad input before training, from footers alone, naming the file, the column and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.data.categories import category_type
from shoal.data.columns import dtype_of
from shoal.data.planning.row_groups import RowRange
from shoal.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from shoal.data.parquet.footers import Footer
    from shoal.data.parquet.source import ParquetSource


def validate_columns(
    source: ParquetSource,
    input_cols: Sequence[str],
    label_col: str | None = None,
    extra_cols: Sequence[str] = (),
    *,
    categorical_cols: Sequence[str] = (),
    allow_all_null: bool = False,
) -> None:
    """Checks that the columns exist in every file that has rows, are of types to train on, and hold something.

    Args:
        source: The dataset.
        input_cols: Feature columns.
        label_col: Label column, if there is one.
        extra_cols: Further columns, such as weights.
        categorical_cols: Those of the feature columns whose values are categories: text, whole numbers or booleans;
            all other columns are numeric or boolean.
        allow_all_null: Accept columns without any value, as data to validate on or to predict may have.

    Raises:
        InvalidArgumentError: If the column arguments contradict themselves.
        DataError: If a file lacks a column or has it in another type, a type cannot be trained on, a column has no
            value at all, or there are no rows.
    """
    names = _column_names(input_cols, label_col, extra_cols, categorical_cols)
    reference = source.reference()
    schema = source.schema()
    for name in names:
        _check_present(reference.path, name, schema.names)
        if name in categorical_cols:
            _check_categorical(reference.path, name, schema.field(name).type)
        else:
            _check_numeric(reference.path, name, schema.field(name).type, "label" if name == label_col else "column")
    _check_any_row(source)
    partitions = source.partition_fields()
    for footer in source.footers():
        if footer.rows and footer is not reference:
            _check_like_reference(footer, reference, names, partitions, categorical_cols)
    if not allow_all_null:
        for name in names:
            _check_any_value(source, name)


def check_tensor_columns(source: ParquetSource, columns: Sequence[str] | None) -> dict[str, str]:
    """Checks that columns exist, in one type that torch items can be made of, in every file that has rows.

    Args:
        source: The dataset.
        columns: Names of columns; None: all there are.

    Returns:
        Column -> NumPy dtype of its values, in the order given; see :func:`shoal.data.columns.dtype_of`.

    Raises:
        InvalidArgumentError: If `columns` contradicts itself.
        DataError: If a file lacks a column or has it in another type, torch has nothing for a type, or there are no
            rows.
    """
    import pyarrow as pa

    if columns is not None:
        _check_listed(columns)
    _check_any_row(source)
    path, schema = source.reference().path, source.schema()
    names = schema.names if columns is None else list(columns)
    dtypes = {}
    for name in names:
        _check_present(path, name, schema.names)
        type_ = schema.field(name).type
        dtype = dtype_of(type_)
        if dtype is None:
            advice = _advice(type_, "column") or "it has no value in any row: mend what writes it"
            left = "" if advice.endswith("leave it out") else ", or leave it out"
            raise DataError(
                f'{path}: column "{name}" is of type {type_}, which cannot be trained on: {advice}{left} '
                "(columns=[...] names those to read)"
            )
        dtypes[name] = dtype
    text = [name for name in names if category_type(schema.field(name).type) == pa.large_string()]
    check_same_schema(source, names, text)
    return dtypes


def check_same_schema(source: ParquetSource, columns: Sequence[str], text_cols: Sequence[str] = ()) -> None:
    """Checks that every file that has rows holds the columns in the same types, so that their rows can be joined.

    Args:
        source: The dataset.
        columns: Columns of it.
        text_cols: Those that may be text in any way of storing it.

    Raises:
        DataError: Naming the first file that differs.
    """
    reference = source.reference()
    partitions = source.partition_fields()
    for footer in source.footers():
        if footer.rows and footer is not reference:
            _check_like_reference(footer, reference, columns, partitions, text_cols)


def check_categories(source: ParquetSource, types: Mapping[str, pa.DataType]) -> None:
    """Refuses columns none of whose values can be a category of the training set.

    Args:
        source: Rows to evaluate or to predict.
        types: Column of categories -> its type in the training set, or that of the categories themselves.

    Raises:
        DataError: Naming the column and both types.
    """
    import pyarrow as pa

    schema = source.schema()
    for name, expected in types.items():
        type_ = schema.field(name).type
        if not pa.types.is_null(type_) and category_type(type_) != category_type(expected):
            raise DataError(
                f'{source.reference().path}: column "{name}" is of type {type_}, but its categories are of type '
                f"{expected} in the training set: write it as it was there"
            )


def check_label(source: ParquetSource, label_col: str) -> None:
    """Refuses null labels that the footers' statistics show; :func:`check_label_values` finds the rest at reading.

    Args:
        source: The dataset.
        label_col: Label column.

    Raises:
        DataError: Naming file, column and row group.
    """
    for footer in source.footers():
        for row_group, (rows, _) in enumerate(footer.groups):
            nulls = source.null_count(footer.path, row_group, label_col) if rows else 0
            if nulls:
                raise DataError(
                    f'{footer.path}, row group {row_group}: the label "{label_col}" is null in {nulls} of {rows} rows: '
                    "leave these rows out, or fill them in, before training"
                )


def check_group(source: ParquetSource, group_col: str) -> None:
    """Checks that the column exists in every file that has rows, in one type.

    Args:
        source: The dataset.
        group_col: Column of groups, of any type.

    Raises:
        DataError: If a file lacks it, or has it in another type.
    """
    _check_present(source.reference().path, group_col, source.schema().names)
    check_same_schema(source, [group_col])


def check_label_values(values: np.ndarray, label_col: str, part: RowRange) -> None:
    """Refuses labels that are null, NaN or infinite, as they are read.

    Args:
        values: The labels ``[rows]`` of one row range, nulls as NaN.
        label_col: Label column.
        part: Where they come from.

    Raises:
        DataError: Naming file, column, row group and the first such row.
    """
    import numpy as np

    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise DataError(
            f'{part.path}, row group {part.row_group}: the label "{label_col}" is null, NaN or infinite '
            f"in {len(bad)} of {len(values)} rows, first at row {part.start + int(bad[0])}: "
            "leave these rows out, or fill them in, before training"
        )


def _column_names(
    input_cols: Sequence[str], label_col: str | None, extra_cols: Sequence[str], categorical_cols: Sequence[str]
) -> list[str]:
    arguments = {"input_cols": input_cols, "extra_cols": extra_cols, "categorical_cols": categorical_cols}
    for argument, columns in arguments.items():
        if isinstance(columns, str):
            raise InvalidArgumentError(f'{argument} must be a list of column names: ["{columns}"], not "{columns}"')
    if not input_cols:
        raise InvalidArgumentError("input_cols is empty: name at least one column to train on")
    names = [*input_cols, *([label_col] if label_col is not None else []), *extra_cols]
    for name in names:
        if not isinstance(name, str):
            raise InvalidArgumentError(f"a column name must be a str, not {name!r}")
    if label_col is not None and label_col in input_cols:
        raise InvalidArgumentError(f'the label "{label_col}" is among input_cols: the model would learn to copy it')
    for name in input_cols:
        if list(input_cols).count(name) > 1:
            raise InvalidArgumentError(f'"{name}" is twice in input_cols')
    for name in categorical_cols:
        if name not in input_cols:
            raise InvalidArgumentError(f'categorical_cols names "{name}", which is not among input_cols')
    return list(dict.fromkeys(names))


def _check_listed(columns: Sequence[str]) -> None:
    if isinstance(columns, str):
        raise InvalidArgumentError(f'columns must be a list of column names: ["{columns}"], not "{columns}"')
    if not columns:
        raise InvalidArgumentError("columns is empty: name at least one, or leave it out to read all")
    for name in columns:
        if not isinstance(name, str):
            raise InvalidArgumentError(f"a column name must be a str, not {name!r}")
        if list(columns).count(name) > 1:
            raise InvalidArgumentError(f'"{name}" is twice in columns')


def _check_present(path: str, name: str, present: Sequence[str]) -> None:
    if present.count(name) > 1:
        raise DataError(f'{path} has several columns called "{name}": rename all but one')
    if name in present:
        return
    lower = {column.lower(): column for column in present}
    near = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3)]
    if near:
        hint = "; did you mean " + " or ".join(f'"{column}"' for column in near) + "?"
    else:
        shown = ", ".join(present[:20]) + (", ..." if len(present) > 20 else "")
        hint = f"; it has {shown}" if present else "; it has no columns"
    raise DataError(f'{path} has no column "{name}"{hint}')


def _check_numeric(path: str, name: str, type_: pa.DataType, what: str) -> None:
    advice = _advice(type_, what)
    if advice is not None:
        raise DataError(f'{path}: {what} "{name}" is of type {type_}, which cannot be trained on: {advice}')


def _check_categorical(path: str, name: str, type_: pa.DataType) -> None:
    import pyarrow as pa

    types = pa.types
    if category_type(type_) is not None or types.is_null(type_):
        return
    if types.is_floating(type_) or types.is_decimal(type_):
        advice = (
            "leave it out of categorical_cols, or write whole numbers or text (pandas: astype('Int64') keeps nulls)"
        )
    elif types.is_temporal(type_):
        advice = "turn it into whole numbers or text first, such as the month or the weekday"
    elif types.is_nested(type_):
        advice = "write each of its parts into a column of its own"
    else:
        advice = "write it as text, whole numbers or booleans"
    raise DataError(f'{path}: column "{name}" is of type {type_}, which cannot be categories: {advice}')


def _advice(type_: pa.DataType, what: str) -> str | None:
    """What to do about a type; None if it is fine as it is."""
    import pyarrow as pa

    types = pa.types
    if types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_) or types.is_null(type_):
        return None
    if category_type(type_) is not None:
        if what == "label":
            return "number the classes 0, 1, ... and write the numbers"
        return "if it is a feature, name it in categorical_cols; else turn it into numbers first, or leave it out"
    if types.is_decimal(type_):
        return "cast it to float64 first (SQL: CAST(... AS DOUBLE PRECISION))"
    if types.is_temporal(type_):
        return "turn it into numbers first, such as the day of the year, the hour or the seconds since a fixed time"
    if types.is_nested(type_):
        return "write each of its parts into a column of its own"
    return "turn it into numbers first, or leave it out"


def _check_like_reference(
    footer: Footer,
    reference: Footer,
    names: Sequence[str],
    partitions: Mapping[str, pa.Field],
    categorical_cols: Sequence[str] = (),
) -> None:
    here = [*footer.schema.names, *(name for name, _ in footer.partitions if name in partitions)]
    for name in names:
        if name in partitions and name in footer.schema.names:
            raise DataError(
                f'{footer.path} stores the column "{name}" itself; in {reference.path} it comes from the path: '
                "make it the same in all files"
            )
        _check_present(footer.path, name, here)
        if name in partitions:
            continue
        type_, expected = footer.schema.field(name).type, reference.schema.field(name).type
        # pandas stores the same categories in one file as int8 codes and text, in another as int16 codes and text.
        alike = name in categorical_cols and category_type(type_) == category_type(expected)
        if type_ != expected and not alike:
            raise DataError(
                f'{footer.path}: column "{name}" is of type {type_}, but {expected} in {reference.path}: '
                "write it in the same type in all files"
            )


def _check_any_row(source: ParquetSource) -> None:
    if source.num_rows() == 0:
        files = source.footers()
        where = source.reference().path if len(files) == 1 else f"{len(files)} files under {source.paths[0]}"
        raise DataError(f"the dataset has no rows: {where}")


def _check_any_value(source: ParquetSource, name: str) -> None:
    for footer in source.footers():
        for row_group, (rows, _) in enumerate(footer.groups):
            if rows and source.null_count(footer.path, row_group, name) != rows:
                return
    raise DataError(
        f'column "{name}" is null in every row of {source.reference().path} and all other files: '
        "leave it out, or mend what writes it"
    )
