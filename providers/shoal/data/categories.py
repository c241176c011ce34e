"""Columns of categories: the same number for the same value in every worker, in every eval set and at prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from shoal.data.parquet.source import ParquetSource

Categories = Mapping[str, "pa.Array"]
"""Column -> its categories, ascending, in the type that `category_type` gives; the code of one is its place, from 0."""

MOST_CATEGORIES = 100_000
"""Categories that a column may have. Every worker and every model holds them all (2 MB of text), and where there are
more, such as the ids of customers, each has too few rows to learn from."""


def category_type(type_: pa.DataType) -> pa.DataType | None:
    """The type that a column's categories are compared in, however wide they are stored.

    Args:
        type_: Type of the column.

    Returns:
        large_string, int64 or bool; None if the column cannot be one of categories.
    """
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(type_):
        type_ = type_.value_type
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return pa.large_string()
    if types.is_integer(type_):
        return pa.int64()
    return pa.bool_() if types.is_boolean(type_) else None


def find_categories(source: ParquetSource, columns: Sequence[str]) -> dict[str, pa.Array]:
    """Read columns, one row group at a time, and find their categories.

    Args:
        source: The rows.
        columns: Columns of text, whole numbers or booleans; nulls are no category.

    Returns:
        Each column's categories, the same for the same rows in whatever order they come; columns in the order given.

    Raises:
        DataError: If a column has too many of them, or none.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not columns:
        return {}
    schema = source.schema()
    found = {name: pa.array([], category_type(schema.field(name).type)) for name in columns}
    ranges = source.ranges()
    for rows, table in zip(ranges, source.read(ranges, columns), strict=True):
        for name, known in found.items():
            new = pc.unique(_comparable(table, name, known.type)).drop_null()
            found[name] = pc.unique(pa.chunked_array([known, new]))
            if len(found[name]) > MOST_CATEGORIES:
                raise DataError(
                    f'column "{name}" has more than {MOST_CATEGORIES:,} categories, counted up to {rows.path}, row '
                    f"group {rows.row_group}: join the rare ones into one, or leave the column out"
                )
    for name, values in found.items():
        if not len(values):
            raise DataError(f'column "{name}" is null in every row: leave it out, or mend what writes it')
    return {name: values.take(pc.sort_indices(values)) for name, values in found.items()}


def encoded(table: pa.Table, categories: Categories) -> pa.Table:
    """The table with codes in place of categories: int32, null where a value is null or no category.

    Args:
        table: Some rows.
        categories: What `find_categories` found; columns that are not in it stay as they are.

    Raises:
        DataError: If a column holds whole numbers that int64 does not.
    """
    import pyarrow.compute as pc

    for name, values in categories.items():
        codes = pc.index_in(_comparable(table, name, values.type), value_set=values)
        table = table.set_column(table.column_names.index(name), name, codes)
    return table


def to_lists(categories: Categories) -> dict[str, list[Any]]:
    """Categories as JSON holds them: str, int or bool by column."""
    return {name: values.to_pylist() for name, values in categories.items()}


def from_lists(lists: Mapping[str, Sequence[Any]]) -> dict[str, pa.Array]:
    """Categories out of what `to_lists` made of them.

    Raises:
        DataError: If they are of a type that `find_categories` does not find, as another program's may be.
    """
    import pyarrow as pa

    categories = {}
    for name, values in lists.items():
        array = pa.array(values)
        type_ = category_type(array.type)
        if type_ is None:
            raise DataError(f'the model has categories of type {array.type} in "{name}", which shoal does not know')
        categories[name] = array.cast(type_)
    return categories


def _comparable(table: pa.Table, name: str, type_: pa.DataType) -> pa.ChunkedArray:
    import pyarrow as pa

    try:
        return table.column(name).cast(type_)
    except pa.ArrowInvalid as exc:
        raise DataError(f'column "{name}" of categories: {exc}: write them as text') from exc
