"""Check the columns of a dataset before a training. Most checks use only the Parquet footers and read no rows.

Every error message contains the file and the column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shoal.data.filters import check_present, describe_filters
from shoal.data.numpy_columns import OBJECTS, category_type, dtype_of, list_shape
from shoal.data.parquet.footers import Footer
from shoal.data.parquet.schema import common_type, distinct, is_number, largest_integer, lossy
from shoal.data.parquet.source import ParquetSource
from shoal.data.planning import RowGroup, RowRange
from shoal.errors import DataError, InvalidArgumentError
from shoal.lazy_imports import np, pa, pc, pq


def validate_columns(
    source: ParquetSource,
    input_cols: Sequence[str],
    label_col: str | None = None,
    extra_cols: Sequence[str] = (),
    *,
    categorical_cols: Sequence[str] = (),
    allow_all_null: bool = False,
    takes_categories: bool = False,
) -> None:
    """Check that all columns exist in every file that has rows, have supported types, and are not entirely null.

    With `takes_categories`, an error about a column may advise to add the column to `categorical_cols`.
    """
    check_roles(input_cols, label_col, categorical_cols)
    names = list(dict.fromkeys([*input_cols, *([label_col] if label_col is not None else []), *extra_cols]))
    reference = source.reference()
    schema = source.schema()

    def check_types(footer: Footer) -> None:
        for name in names:
            stored = name in footer.schema.names
            type_ = (footer.schema if stored else schema).field(name).type
            path = footer.path if stored else source.file_of_type(name)
            what = "label" if name == label_col else "column"
            if name in categorical_cols:
                _check_categorical(path, name, type_)
            elif (advice := _advice(type_, what, takes_categories)) is not None:
                raise DataError(f'{path}: {what} "{name}" is of type {type_}, which cannot be trained on: {advice}')

    for name in names:
        check_present(reference.path, name, schema.names)
    check_types(reference)
    _check_any_row(source)
    check_same_schema(source, names)
    for footer in distinct(source.used_footers()):
        check_types(footer)
    if not allow_all_null:
        groups = [group for group in source.row_groups() if group.rows]
        for name in names:
            if all(
                source.null_count(group.path, group.index, name) == source.footer(group.path).groups[group.index][0]
                for group in groups
            ):
                raise DataError(
                    f'column "{name}" is null in every row of {source.reference().path} and all other files: '
                    "leave the column out, or fix the program that writes the dataset"
                )


def check_tensor_columns(source: ParquetSource, columns: Sequence[str] | None) -> dict[str, str]:
    """Check that all columns exist in every file that has rows, and have a type that torch supports in all files."""
    if isinstance(columns, str):
        raise InvalidArgumentError(f'columns must be a list of column names, such as ["{columns}"], not "{columns}"')
    if columns is not None and not columns:
        raise InvalidArgumentError(
            "columns is empty: name at least one column, or omit the argument to read all columns"
        )
    for name in columns or ():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"a column name must be a str, not {name!r}")
        if list(columns or ()).count(name) > 1:
            raise InvalidArgumentError(f'"{name}" occurs more than once in columns: name each column once')
    _check_any_row(source)
    path, schema = source.reference().path, source.schema()
    names = schema.names if columns is None else list(columns)
    dtypes = {}
    for name in names:
        check_present(path, name, schema.names)
        type_ = schema.field(name).type
        dtype = _list_dtype(source, name, type_) or dtype_of(type_)
        if dtype is None:
            advice = (
                _advice(type_, "column", takes_categories=False)
                or "it is null in every row: fix the program that writes the dataset"
            )
            left = "" if advice.endswith("leave it out") else ", or leave it out"
            raise DataError(
                f'{path}: column "{name}" is of type {type_}, which cannot be trained on: {advice}{left} '
                "(columns=[...] selects the columns to read)"
            )
        dtypes[name] = dtype
    check_same_schema(source, names)
    return dtypes


def _list_dtype(source: ParquetSource, name: str, type_: pa.DataType) -> str | None:
    """Return the NumPy dtype of a row of a column of lists, such as ``(3,)float32``; None for other columns."""
    found = list_shape(type_, 1)
    element = dtype_of(found[1]) if found else None
    if found is None or element in (None, OBJECTS) or 0 in found[0]:
        return None
    depth = 1 if isinstance(type_, pa.BaseExtensionType) else len(found[0])
    is_variable = pa.types.is_list(type_) or pa.types.is_large_list(type_)
    length, first = 0, ""
    for group, chunk, rows in _elements(source, name, depth):
        place = f"{group.path}, row group {group.index}"
        stats = chunk.statistics if chunk.is_stats_set else None
        nulls = stats.null_count if stats is not None and stats.has_null_count else 0
        if nulls and group.rows == rows and not str(element).startswith("float"):
            raise DataError(
                f'{place}: column "{name}" of type {type_} has {nulls} null lists or elements, but only elements that '
                "are floats can be null (as NaN): fill in these values, or leave these rows out"
            )
        # The footer counts the lists that filters leave out, too, and deleted ones.
        if not is_variable or (source.filtered and group.rows < rows):
            continue
        here, rest = divmod(chunk.num_values, rows * math.prod(found[0]))
        if rest or (length and here != length):
            what = "in this row group" if rest else f"{here} elements here, but {length} in {first}"
            raise DataError(
                f'{place}: column "{name}" of type {type_} has lists of different lengths or null lists ({what}): '
                "a tensor needs lists of one length, so pad or cut the lists, or leave the column out (columns=[...])"
            )
        length, first = here, place
    if is_variable and not length and source.filtered:
        # The footers do not show how long the matching lists are, so the first list is read. It has no length if null.
        one = source.ranges()[0]
        (table,) = source.read([RowRange(one.path, one.row_group, 0, 1)], [name])
        length = pc.list_value_length(table.column(0))[0].as_py() or 0
    shape, _ = list_shape(type_, length or 1) or found
    return f"({','.join(map(str, shape))},){element}"


def _elements(source: ParquetSource, name: str, depth: int) -> Iterator[tuple[RowGroup, pq.ColumnChunkMetaData, int]]:
    """Yield each row group with rows, the metadata of the elements of a column of lists in it, and the number of its
    rows without filters.
    """
    for group in source.row_groups():
        if not group.rows:
            continue
        footer, metadata = source.footer(group.path), source.metadata(group.path).row_group(group.index)
        stored = footer.stored_names([name])[0] if name in footer.schema.names else name
        for chunk in map(metadata.column, range(metadata.num_columns)):
            below = chunk.path_in_schema.removeprefix(f"{stored}.")
            if below != chunk.path_in_schema and below.count(".") == 2 * depth - 1:
                yield group, chunk, metadata.num_rows


def check_same_schema(source: ParquetSource, columns: Sequence[str] | None) -> None:
    """Check that all files with rows have the columns in types that have a common type, so that one table can contain
    all rows.

    Args:
        source: The dataset.
        columns: The columns; None for all columns of the dataset. A file may then lack an index that pandas has stored
            in other files.
    """
    if source.is_table:
        for name in columns or ():
            check_present(source.place, name, source.schema().names)
        return
    gaps = source.index_gaps() if columns is None else ()
    columns = source.schema().names if columns is None else columns
    partitions = source.partition_fields()
    used = source.used_footers()
    files = distinct(used)
    for footer in used if partitions else files:
        here = [*footer.schema.names, *(name for name, _ in footer.partitions if name in partitions)]
        for name in columns:
            if name in partitions and name in footer.schema.names:
                raise DataError(
                    f'{footer.path} stores the column "{name}" in the file, but {source.reference().path} has it as a '
                    "partition directory: store the column in all files, or make it a partition directory of all files"
                )
            if name not in gaps:
                check_present(footer.path, name, here)
    if len(files) < 2:
        return
    schema = source.schema()
    for name in columns:
        having = [footer for footer in files if name in footer.schema.names]
        for footer in having:
            if schema.field(name).type != footer.schema.field(name).type:
                _check_common_type(footer, name, having)
    for footer in used:
        for name in columns:
            if name in footer.schema.names:
                _check_values_fit(source, footer, name, schema.field(name).type)


def check_categories(source: ParquetSource, types: Mapping[str, pa.DataType]) -> None:
    """Check that categorical columns have the same kind of type (text, integer or boolean) as in the training set.

    A partition column (``month=1/``) is text or integer depending on its other values, so the two are compared by
    value: a text that is not a whole number is a new category.
    """
    schema = source.schema()
    for name, expected in types.items():
        type_ = schema.field(name).type
        if pa.types.is_null(type_) or category_type(type_) == category_type(expected):
            continue
        path, advice = source.file_of_type(name), "write the column in the type of the training set"
        if name in source.partition_fields() and not source.is_table and not pa.types.is_boolean(expected):
            padded = None if pa.types.is_string(type_) else source.padded_partition(name)
            if padded is None:
                continue
            path, advice = padded, "name the folder without leading zeros, as in the training set"
        raise DataError(
            f'{path}: column "{name}" is of type {type_}, but its categories are of type {expected} in the training '
            f"set: {advice}"
        )


def check_codes(source: ParquetSource, columns: Sequence[str]) -> None:
    """Check that columns contain integers, because a model was trained on integer codes of their categories."""
    schema = source.schema()
    for name in columns:
        type_ = schema.field(name).type
        if not pa.types.is_integer(type_) and not pa.types.is_null(type_):
            raise DataError(
                f'{source.reference().path}: column "{name}" is of type {type_}, but the model was trained on integer '
                "codes of this column's categories: write the same codes as integers"
            )


def check_no_nulls(source: ParquetSource, column: str, role: str = "label") -> None:
    """Check with the statistics in the footers that every row has a value in a column.

    If a footer has no statistics, this check cannot find nulls. :func:`check_finite` finds them when the rows are
    read.
    """
    for group in source.row_groups():
        nulls = source.null_count(group.path, group.index, column) if group.rows else 0
        if nulls:
            rows = source.footer(group.path).groups[group.index][0]
            raise DataError(
                f'{group.path}, row group {group.index}: the {role} "{column}" is null in {nulls} of {rows} rows: '
                f"leave these rows out, or give each of them a {role}"
            )


def decimals_of(source: ParquetSource, columns: Iterable[str]) -> list[str]:
    """Return the columns of decimals, which the boosting libraries read as float64."""
    schema = source.schema()
    return [name for name in columns if pa.types.is_decimal(schema.field(name).type)]


def check_weight(source: ParquetSource, weight_col: str) -> None:
    """Check with the statistics in the footers that not all weights are zero."""
    for footer in source.used_footers():
        bounds = list(source.bounds(footer.path, weight_col))
        groups = sum(1 for rows, _ in footer.groups if rows)
        if len(bounds) < groups or any(low or high for low, high in bounds):
            return
    raise DataError(
        f'the weight "{weight_col}" is 0 in every row of {source.reference().path} and all other files, so no row '
        "counts: correct the weights, or leave out weight_col"
    )


def check_group(source: ParquetSource, group_col: str) -> None:
    """Check that the group column exists in every file that has rows, with the same type."""
    check_present(source.reference().path, group_col, source.schema().names)
    check_same_schema(source, [group_col])


def check_finite(values: np.ndarray, what: str, column: str, part: RowRange, advice: str) -> None:
    """Check that no value of a row range is null, NaN or infinite.

    The check is necessary, because the boosting libraries accept NaN in labels, weights and margins, and treat it as a
    number.
    """
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise DataError(
            f'{part.path}, row group {part.row_group}: the {what} "{column}" is null, NaN or infinite '
            f"in {len(bad)} of {len(values)} rows, first at row {part.row_number(int(bad[0]))}: {advice}"
        )


def check_bounds(lower: np.ndarray, upper: np.ndarray, columns: Sequence[str], part: RowRange) -> None:
    """Check the bounds of the labels of a row range, because XGBoost trains with impossible bounds, too."""
    bad = np.flatnonzero(~((lower >= 0) & np.isfinite(lower) & (upper >= lower) & (upper > 0)))
    if len(bad):
        first = int(bad[0])
        raise DataError(
            f'{part.path}, row group {part.row_group}: the label\'s bounds in "{columns[0]}" and "{columns[1]}" are '
            f"wrong in {len(bad)} of {len(lower)} rows, first {lower[first]} and {upper[first]} at row "
            f"{part.row_number(first)}: a lower bound must be finite and at least 0, and an upper bound above 0 and "
            "not below the lower bound; it is infinite if the label is only known to be larger than the lower bound"
        )


def check_roles(input_cols: Sequence[str], label_col: str | None, categorical_cols: Sequence[str]) -> None:
    """Check that there are input columns, that no column is feature and label, and that all categorical columns are
    features."""
    if not input_cols:
        raise InvalidArgumentError("input_cols is empty: name at least one column to train on")
    if label_col is not None and label_col in input_cols:
        raise InvalidArgumentError(f'the label "{label_col}" is also in input_cols: remove the label from input_cols')
    for name in input_cols:
        if list(input_cols).count(name) > 1:
            raise InvalidArgumentError(f'"{name}" occurs more than once in input_cols: name each column once')
    for name in categorical_cols:
        if name not in input_cols:
            raise InvalidArgumentError(
                f'categorical_cols names "{name}", which is not among input_cols: add it to input_cols, or remove it '
                "from categorical_cols"
            )


def _check_categorical(path: str, name: str, type_: pa.DataType) -> None:
    types = pa.types
    if category_type(type_) is not None or types.is_null(type_):
        return
    if types.is_floating(type_) or types.is_decimal(type_):
        advice = (
            "remove the column from categorical_cols, or write it as integers or text (in pandas, astype('Int64') "
            "keeps nulls; in SQL, CAST(... AS BIGINT))"
        )
    elif types.is_temporal(type_):
        advice = "convert it to integers or text first, such as the month or the weekday"
    elif types.is_nested(type_):
        advice = "write each of its parts into a separate column"
    else:
        advice = "write it as text, integers or booleans"
    raise DataError(f'{path}: column "{name}" is of type {type_}, which cannot be categorical: {advice}')


def _advice(type_: pa.DataType, what: str, takes_categories: bool) -> str | None:
    """Return a text that tells the user how to convert a column of an unsupported type; None for supported types."""
    types = pa.types
    if is_number(type_) or types.is_boolean(type_) or types.is_null(type_):
        return None  # Decimals are read as float64.
    if category_type(type_) is not None:
        if what == "label":
            return "number the classes 0, 1, ... and write these numbers"
        if takes_categories:
            return "if the column is a feature, add it to categorical_cols; else convert it to numbers, or leave it out"
        return "convert it to numbers, such as a number for each of its values, or leave it out"
    if types.is_temporal(type_):
        return "convert it to numbers first, such as the day of the year, the hour or the seconds since a fixed time"
    if types.is_nested(type_):
        return "write each of its parts into a separate column"
    return "convert it to numbers first, or leave it out"


def _check_common_type(footer: Footer, name: str, files: Sequence[Footer]) -> None:
    type_ = footer.schema.field(name).type
    for other in files:
        theirs = other.schema.field(name).type
        if common_type(type_, theirs) is None:
            one, two = sorted((footer, other), key=files.index)
            raise DataError(
                f'{two.path}: column "{name}" is of type {two.schema.field(name).type}, but of type '
                f"{one.schema.field(name).type} in {one.path}, and no type holds the values of both: write the column "
                "in the same type in all files"
            )


def _check_values_fit(source: ParquetSource, footer: Footer, name: str, wide: pa.DataType) -> None:
    """Check with a file's statistics that no integer is lost in the common type of all files.

    Without statistics, :func:`shoal.data.parquet.schema.to_schema` finds such an integer when the rows are read.
    """
    type_ = footer.schema.field(name).type
    if (largest := largest_integer(type_, wide)) is None:
        return
    for low, high in source.bounds(footer.path, name):
        value = high if high > largest else low
        if abs(value) > largest:
            raise lossy(footer.path, name, type_, wide, f"it holds {value}")


def _check_any_row(source: ParquetSource) -> None:
    if source.num_rows() == 0:
        if source.filters is not None:
            raise DataError(
                f"no row of {source.place} matches the filters ({describe_filters(source.filters)}): check the "
                "filters, and check whether the files with these rows have been written yet"
            )
        if source.staged:
            raise DataError(
                "the dataset has no rows: the query or DataFrame that it was made from is empty; check the query's "
                "conditions, and the program that makes the DataFrame"
            )
        raise DataError(
            f"the dataset has no rows: {source.place}; check the paths, and the program that writes the files"
        )
