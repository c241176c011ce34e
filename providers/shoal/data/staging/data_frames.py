"""Write DataFrames of pandas, Polars, Snowpark, PySpark and others to Parquet files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from shoal.data.libraries import need
from shoal.data.parquet.paths import join
from shoal.data.staging.location import staged
from shoal.data.staging.table_writer import TableWriter, group_rows
from shoal.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    import pyarrow as pa

_TO_ARROW = ("to_arrow", "toArrow")
"""Names of the methods that convert a DataFrame to a ``pyarrow.Table``: the first in Snowpark and Polars, the second in
PySpark."""


def stage_dataframe(frame: Any, staging_location: str | os.PathLike[str] | None) -> str:
    """Write a DataFrame or table to a Parquet file in a new staging directory, one row group at a time.

    Args:
        frame: pandas DataFrame (its index is left out), ``pyarrow.Table``, or another object that :func:`is_frame`
            accepts.
        staging_location: Directory or URI in which to create a directory; :func:`default_location` if None.

    Returns:
        Path or URI of the new directory.

    Raises:
        DataError: If a column cannot be written, such as a column with values of different types, or the location is
            not writable.
        InvalidArgumentError: If `frame` is not a table.
    """
    need("pyarrow", "numpy")
    import pyarrow as pa

    with staged(staging_location) as directory:
        if _is_pandas(frame):
            frame = _pandas_reader(frame)
        elif not isinstance(frame, pa.Table):
            if not is_frame(frame):
                raise InvalidArgumentError(f"df must be a DataFrame or a pyarrow Table, not {type(frame).__name__}")
            to_arrow = _method_to_arrow(frame)
            with _converting():
                frame = pa.table(frame if to_arrow is None else to_arrow())
        schema, rows, size, slices = frame if isinstance(frame, tuple) else _table_reader(frame)
        step = group_rows(rows, size / max(rows, 1))
        with TableWriter(join(directory, "part-00000.parquet"), schema) as writer:
            for start in range(0, rows, step):
                writer.write(slices(start, min(start + step, rows)), step)
    return directory


def is_frame(value: Any) -> bool:
    """Return whether :func:`stage_dataframe` accepts an object as a table.

    The object must have ``__arrow_c_stream__``, or a method ``to_arrow()`` or ``toArrow()``, like the DataFrames of
    Snowpark and PySpark.
    """
    return not isinstance(value, type) and (hasattr(value, "__arrow_c_stream__") or _method_to_arrow(value) is not None)


def _method_to_arrow(frame: Any) -> Callable[[], Any] | None:
    """Return the method that converts a DataFrame to Arrow; None if Arrow can read the DataFrame directly, or if there
    is no such method."""
    if hasattr(frame, "__arrow_c_stream__"):
        return None
    return next((method for name in _TO_ARROW if callable(method := getattr(frame, name, None))), None)


def _is_pandas(frame: Any) -> bool:
    # A pandas DataFrame is recognised by the name of its class, because isinstance() would need an import of pandas,
    # which is slow and not necessary for other DataFrames.
    return any(
        base.__module__.split(".")[0] == "pandas" and base.__name__ == "DataFrame" for base in type(frame).__mro__
    )


def _table_reader(table: pa.Table) -> tuple[Any, int, int, Any]:
    return table.schema, table.num_rows, table.nbytes, lambda start, stop: table.slice(start, stop - start)


def _pandas_reader(frame: Any) -> tuple[Any, int, int, Any]:
    import pyarrow as pa

    columns = [str(name) for name in frame.columns]
    for name in columns:
        if columns.count(name) > 1:
            raise DataError(f'the data has several columns named "{name}": rename all but one')
    frame = frame.set_axis(columns, axis=1)
    frame.attrs = {}

    def convert(start: int, stop: int) -> Any:
        with _converting():
            return pa.Table.from_pandas(frame.iloc[start:stop], schema=schema, preserve_index=False)

    # The columns are converted one at a time, because Arrow's error message does not name the column that cannot be
    # converted.
    schema = pa.schema([])
    for name in columns:
        with _converting(name):
            schema = schema.append(pa.Schema.from_pandas(frame[[name]], preserve_index=False).field(0))
    # pandas' types, such as Int64, are stored in the file, so that `to_pandas` restores them.
    schema = convert(0, 0).schema
    return schema, len(frame), int(frame.memory_usage(index=False).sum()), convert


@contextlib.contextmanager
def _converting(column: str | None = None) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as exc:
        what = f'column "{column}" of the DataFrame' if column else "the DataFrame"
        # All arguments of the exception are shown, because pandas adds a text with the column's name as the second
        # argument: "Conversion failed for column x with type object".
        reason = "; ".join(map(str, exc.args))
        raise DataError(f"{what} cannot be written as Parquet: {reason}; convert the values to one type first") from exc
