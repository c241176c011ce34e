"""Read the rows of a query from PostgreSQL by ADBC: as Arrow tables, in the types of the server."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import chain, cycle, repeat, takewhile
from typing import Any, TypeVar

from shoal.data.filters import check_present, check_unique
from shoal.data.query_text import ROWS, as_table, used_names, without_end
from shoal.errors import DataAccessError, DataError
from shoal.lazy_imports import pa, pc

T = TypeVar("T")

RANGE_ROWS = 131_072
"""Number of rows of a range of keys, which one connection reads at a time: 50 MB for 50 columns of numbers."""

MOST_CONNECTIONS = 4
"""Largest number of connections that read ranges of keys; there are no more than CPUs."""

_SERVED = frozenset(
    ("bool", "int2", "int4", "int8", "float4", "float8", "numeric", "text", "varchar", "bpchar", "name", "bytea",
     "uuid", "date", "timestamp", "timestamptz")
)  # fmt: skip
"""Types that ADBC reads completely. It flattens arrays of several dimensions, and returns the bytes of other types."""

_RETRYABLE = ("08", "40", "53", "54", "55", "57", "58")
"""Classes of SQLSTATE of a lost connection, a deadlock, a timeout or a lack of resources, as psycopg divides them."""

_QUERY = re.compile(r" '.*'(?=: \S+:  )", re.DOTALL)
"""Query, with the values in it, in the driver's error messages."""

_DAYS = (-719_162, 2_932_897)
"""First day of the year 1, and of the year 10,000, counted from 1970. PostgreSQL has others, also infinity."""


@contextlib.contextmanager
def _errors(what: str = "the query failed") -> Iterator[None]:
    """Convert an error of the driver. The message has neither the query nor the values in it."""
    try:
        yield
    except Exception as exc:  # the driver is optional; its errors have a state
        if not (isinstance(exc, OSError | pa.ArrowException) or hasattr(exc, "sqlstate")):
            raise
        # Errors of Arrow's reader have no state: an OSError may be a lost connection.
        state = getattr(exc, "sqlstate", None) or ("" if isinstance(exc, pa.ArrowException) else _RETRYABLE[0])
        kind = DataAccessError if state.startswith(_RETRYABLE) else DataError
        raise kind(f"{what}: {_QUERY.sub('', str(exc)).splitlines()[0]}") from None


@_errors()
def read_tables(
    statement: Any, params: Mapping[str, Any], url: Any, stack: contextlib.ExitStack, *,
    columns: Sequence[str] | None = None, partition_by: str | None = None, read_only: bool = False,
) -> Iterator[pa.Table] | None:  # fmt: skip
    """Run a SELECT, and return an iterator of its rows; None if they have to be read without ADBC.

    ADBC needs the extra `adbc`, options of the URL that libpq knows, as those for psycopg, and a type of each column
    that it reads completely. Threads read the next rows while the caller processes the last ones, so that also a signal
    ends the caller.

    Args:
        statement: SQLAlchemy's text clause with the SELECT.
        params: Values of its parameters.
        url: SQLAlchemy's URL of the database.
        stack: Closes the connections; after an error, it cancels their queries first.
        columns: Columns to read, if the result has all of them; None: all.
        partition_by: Column by whose ranges several connections read the rows. They see the same snapshot, and the
            rows are returned in the order of the column, nulls last.
        read_only: Whether the SELECT must not change the database.
    """
    is_suitable = url.get_backend_name() == "postgresql" and ("psycopg" in url.drivername or not url.query)
    if not is_suitable or find_spec("adbc_driver_postgresql") is None:
        return None
    cursor = _connect(url, stack)
    mode = "READ ONLY" if read_only else "ISOLATION LEVEL READ COMMITTED"
    mode = "ISOLATION LEVEL REPEATABLE READ, READ ONLY" if partition_by else mode
    cursor.execute(f"SET TRANSACTION {mode}")
    sql = _with_values(url, statement, params)
    schema = cursor.adbc_execute_schema(sql)
    check_unique(schema.names, "the query returns", "rename all but one with AS")
    names = used_names(schema.names, columns)
    types = {field.name: field.metadata[b"POSTGRESQL:type"].decode() for field in schema}
    if not _SERVED.issuperset(types[name] for name in names):
        return None
    rows = as_table(sql)
    if names != schema.names or partition_by:
        sql = f"SELECT {', '.join(map(_quoted, names))} FROM {rows}"
    cursors, key, total = [cursor], "", 0
    ranges: list[str] = []
    if partition_by:
        check_present("the query", partition_by, schema.names)
        key = _quoted(partition_by)
        total, ranges = _ranges(cursor, rows, key)
        [[snapshot]] = _columns(cursor, "SELECT pg_export_snapshot()")
        for _ in range(min(MOST_CONNECTIONS, os.cpu_count() or 1, len(ranges)) - 1):
            cursors.append(_connect(url, stack))
            cursors[-1].execute(f"SET TRANSACTION {mode}")
            cursors[-1].execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
    pool = stack.enter_context(ThreadPoolExecutor(len(cursors)))
    stack.push(partial(_cancel, cursors))
    if not partition_by:
        following = partial(next, _tables(cursor, sql), None)
        return takewhile(lambda table: table is not None, _ahead(pool, repeat(following), 2))

    def read(free: Any, condition: str) -> list[pa.Table]:
        return list(_tables(free, f"{sql} WHERE {condition} ORDER BY {key}"))

    calls = (partial(read, *each) for each in zip(cycle(cursors), ranges, strict=False))
    return _complete(chain.from_iterable(_ahead(pool, calls, len(cursors))), total)


def _connect(url: Any, stack: contextlib.ExitStack) -> Any:
    """Connect to the database, and return a cursor in a transaction that is rolled back at the end."""
    from adbc_driver_postgresql.dbapi import connect

    _, options = _dialect(url).create_connect_args(url)
    options["client_encoding"] = "utf8"
    escaped = {name: re.sub(r"(['\\])", r"\\\1", str(value)) for name, value in options.items()}
    with _errors("the database cannot be reached"):
        connection = connect(" ".join(f"{name}='{value}'" for name, value in escaped.items()))
    stack.enter_context(contextlib.closing(connection))
    return stack.enter_context(contextlib.closing(connection.cursor()))


def _dialect(url: Any) -> Any:
    return url.set(drivername="postgresql+psycopg").get_dialect()()


def _cancel(cursors: Sequence[Any], kind: type[BaseException] | None, *_: object) -> None:
    for cursor in cursors if kind is not None else ():
        with contextlib.suppress(Exception):  # a query that has ended
            cursor.adbc_cancel()


def _columns(cursor: Any, sql: str) -> list[list[Any]]:
    """Run a query, and return the values of each column."""
    cursor.execute(sql)
    return [column.to_pylist() for column in cursor.fetch_arrow_table().columns]


def _quoted(column: str) -> str:
    return ROWS + '."' + column.replace('"', '""') + '"'


def _with_values(url: Any, statement: Any, params: Mapping[str, Any]) -> str:
    """Return the text of a statement with the values of its parameters.

    Of a statement with bound parameters, ADBC would keep the whole result in memory, and it would give texts a type
    with which PostgreSQL compares no date.
    """
    written = {name: _literal(value) for name, value in params.items()}
    # SQLAlchemy doubles each "%" for psycopg's way to write parameters.
    return without_end(str(statement.compile(dialect=_dialect(url))) % written) + "\n"


def _literal(value: Any) -> str:
    """Return a value as a literal in which each character is an escape sequence.

    No value can end the literal, or the quotes or comment in which a statement may have the parameter by mistake. As a
    bound parameter, a literal gets the type that the statement needs if the value is a text.
    """
    if value is None:
        return "(NULL)"
    type_ = {bool: "::bool", float: "::float8", int: "::numeric"}.get(type(value), "")
    if type(value) is int and abs(value) < 2**63:
        type_ = "::int4" if abs(value) < 2**31 else "::int8"
    return "(E'" + "".join(f"\\U{ord(character):08X}" for character in str(value)) + f"'{type_})"


def _ranges(cursor: Any, rows: str, key: str) -> tuple[int, list[str]]:
    """Return the number of rows, and conditions that divide them by ranges of a column, with its nulls last."""
    counted = f"SELECT {key} AS k, row_number() OVER (ORDER BY {key}) AS n, count(*) OVER () AS total FROM {rows}"
    every = f"SELECT quote_literal(k::text), total FROM ({counted}) keys WHERE n % {RANGE_ROWS} = 1 ORDER BY n"
    literals, totals = _columns(cursor, every)
    bounds = list(dict.fromkeys(filter(None, literals)))[1:]
    lower = [f"{key} IS NOT NULL", *(f"{key} >= {bound}" for bound in bounds)]
    upper = [*(f" AND {key} < {bound}" for bound in bounds), ""]
    return max(totals, default=0), [*map(str.__add__, lower, upper), f"{key} IS NULL"]


def _complete(tables: Iterable[pa.Table], total: int) -> Iterator[pa.Table]:
    """Yield the rows of all ranges. Each range has run the query again, which may have had other rows then."""
    for table in tables:
        total -= table.num_rows
        yield table
    if total:
        raise DataError(
            "the query has other rows each time, as with random(), TABLESAMPLE or a LIMIT whose order is not unique: "
            "omit partition_by"
        )


def _ahead(pool: ThreadPoolExecutor, calls: Iterable[Callable[[], T]], most: int) -> Iterator[T]:
    """Yield the results of calls in their order, of which `most` are running or waiting."""
    waiting: deque[Future[T]] = deque()
    for call in calls:
        if len(waiting) == most:
            yield waiting.popleft().result()
        waiting.append(pool.submit(call))
    while waiting:
        yield waiting.popleft().result()


def _tables(cursor: Any, sql: str) -> Iterator[pa.Table]:
    """Run a query, and yield its rows; if it returns none, a table without rows."""
    with _errors():
        cursor.execute(sql)
        reader = cursor.fetch_record_batch()
        tables = map(pa.Table.from_batches, ([batch] for batch in reader))
        for table in chain([next(tables, reader.schema.empty_table())], tables):
            yield pa.table(list(map(_plain, table.schema, table.columns)), names=table.schema.names)


def _plain(field: pa.Field, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column with a NUMERIC as decimals. Refuse dates that neither Python nor Parquet's readers know."""
    name = field.metadata[b"POSTGRESQL:type"]
    if name == b"numeric":
        texts = pa.chunked_array([chunk.storage for chunk in values.chunks], pa.string())
        try:
            return _decimals(texts, int(field.metadata[b"POSTGRESQL:typmod"]))
        except ValueError as exc:
            raise DataError(
                f'column "{field.name}" of the query cannot be written as Parquet: {exc}; CAST the column to another '
                "type in the query"
            ) from None
    if name in (b"date", b"timestamp", b"timestamptz"):
        number, unit = (pa.int32(), 1) if name == b"date" else (pa.int64(), 86_400_000_000)
        least, most = pc.min_max(values.cast(number)).as_py().values()
        if least is not None and not _DAYS[0] * unit <= least <= most < _DAYS[1] * unit:
            raise DataError(
                f'column "{field.name}" of the query has a date before the year 1 or after 9999, such as infinity: '
                "leave such rows out, or write NULL for them in the query"
            )
    return values


def _decimals(texts: pa.ChunkedArray, typmod: int) -> pa.ChunkedArray:
    """Convert texts to decimals of the column's precision and scale; without these, with room for 18 digits before the
    point, so that the rows that are read together make no difference.
    """
    precision, scale = (typmod - 4) >> 16, (typmod - 4) & 0x7FF
    if typmod < 4 or not scale <= precision <= 76:
        digits = pc.utf8_ltrim(texts, "-0")
        lengths, points = pc.utf8_length(digits), pc.find_substring(digits, ".")
        whole = pc.if_else(pc.less(points, 0), lengths, points)
        scale = max(0, (pc.max(pc.subtract(lengths, whole)).as_py() or 0) - 1)
        precision = max(18, pc.max(whole).as_py() or 0) + scale
    return texts.cast((pa.decimal128 if precision <= 38 else pa.decimal256)(precision, scale))
