"""Check a SQL query and the name of its connection, run it, and write the rows in chunks to staged Parquet files."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, repeat, takewhile
from typing import Any

from shoal.data.connections import CONNECTION_PREFIX
from shoal.data.filters import check_present, check_unique
from shoal.data.parquet.files import need
from shoal.data.postgresql import read_tables
from shoal.data.query_text import ROWS, as_table, is_select, used_names, without_end
from shoal.data.row_writer import write_tables
from shoal.data.staged_data import staged
from shoal.errors import DataAccessError, DataError, InvalidArgumentError, shown
from shoal.lazy_imports import pa, sa
from shoal.secrets.redaction import redact_value

log = logging.getLogger(__name__)

# Number of rows that are fetched from the database at a time. 32 Ki rows of 50 columns take about 100 MB as Python
# objects.
CHUNK_ROWS = 32_768

_FILE_OPTIONS = {
    "postgresql": ("sslrootcert", "sslcert", "sslkey", "sslcrl", "sslcrldir", "passfile"),
    "mysql": ("ssl_ca", "ssl_cert", "ssl_key", "ssl_capath"),
    "mariadb": ("ssl_ca", "ssl_cert", "ssl_key", "ssl_capath"),
}
"""Options of URLs that name files, by dialect. libpq connects without the client's certificate, and may not check that
of the server, if the file is missing."""


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_EXECUTABLE_COMMENT = re.compile(r"/\*M?!")
_TABLE_NAME = re.compile(r"""\s*["`\[]?\w+["`\]]?(\.["`\[]?\w+["`\]]?)*\s*;?\s*""")
_ORDER_BY = re.compile(r"\border\s+by\b", re.IGNORECASE)


def check_connection_name(name: str) -> None:
    """Check that the text is the name of a connection and not a URL, which could contain a password."""
    if not _NAME.fullmatch(name):
        # The message does not show the value, because the value may be a URL with a password.
        raise InvalidArgumentError(
            'connection must be a name of letters, digits, "_", "-" and ".", not a URL: set the environment variable '
            f"{CONNECTION_PREFIX}<NAME> to the URL and give the name"
        )


def check_query(sql: str, params: Mapping[str, Any]) -> None:
    """Check, without a database, that SQL text is a single SELECT and that all its parameters have values.

    This check finds mistakes, but cannot prevent that a statement writes. :func:`shoal.data.sql.stage_select`
    prevents writes with a read-only transaction or connection.
    """
    body = without_end(sql)
    if ";" in body:
        # A ";" inside a quoted text or a comment is also refused. Each database has its own rules for quotes and
        # comments, so this code cannot reliably find the end of a quoted text or comment.
        raise InvalidArgumentError(
            'sql contains a ";" before its end: give only one statement. If the ";" belongs to a text value, pass the '
            "value as a parameter, such as :name with params={'name': ...}"
        )
    if executable := _EXECUTABLE_COMMENT.search(body):
        raise InvalidArgumentError(
            f'sql contains "{executable[0]}", which begins a comment that MySQL or MariaDB runs as SQL: remove the '
            "comment. If it belongs to a text value, pass the value as a parameter, such as :name with "
            "params={'name': ...}"
        )
    if not is_select(body):
        raise InvalidArgumentError(
            f"sql must be a SELECT, or a WITH clause followed by a SELECT, not {shown(body.strip())}"
        )
    named = set(sa.text(body).compile().params)
    if missing := sorted(named - set(params)):
        raise InvalidArgumentError(
            f"sql has the parameter :{missing[0]}, but params has no value for it: add the value to params, or "
            "write \\: if the colon belongs to a text"
        )
    if unused := sorted(set(params) - named):
        raise InvalidArgumentError(
            f'params has "{unused[0]}", but sql has no parameter :{unused[0]}: correct the name, or remove it from '
            "params"
        )


def narrowed_query(
    sql: str, params: Mapping[str, Any], column: str, value: bool | int | float | str
) -> tuple[str, dict[str, Any]]:
    """Return a query that selects only the rows of the given query in which a column has a given value."""
    name = "each_value"
    while name in params:
        name += "_"
    return f"SELECT * FROM {as_table(sql)} WHERE {ROWS}.{column} = :{name}", {**params, name: value}


def stage_query(
    query: Any, connection: Any, staging_location: str | os.PathLike[str] | None, partition_by: str | None = None
) -> str:
    """Run a SQL query and write its rows to a Parquet file in a new staging directory."""
    with staged(staging_location) as directory, _reading(query) as stack:
        tables, is_url = None, isinstance(connection, str | sa.URL)
        # PostgreSQL has further statements that return rows, such as SHOW, which ADBC cannot copy.
        if is_url and isinstance(query, str) and is_select(query) and not sa.text(query).compile().params:
            tables = read_tables(sa.text(query), {}, _checked(connection), stack, partition_by=partition_by)
        write_tables(tables or _run(query, connection, stack, partition_by=partition_by), directory)
    return directory


@contextlib.contextmanager
def _reading(query: Any) -> Iterator[contextlib.ExitStack]:
    """Check a query, yield a stack that closes connections at the end, and convert SQLAlchemy's errors."""
    if isinstance(query, str) and _TABLE_NAME.fullmatch(query):
        raise InvalidArgumentError(
            f"the query {query!r} is only a name: to read all rows of a table, write SELECT * FROM {query.strip('; ')}"
        )
    if not _ORDER_BY.search(str(query)):
        log.warning(
            "the query has no ORDER BY, so the database may return its rows in another order each time: the digest of "
            "the rows, and the model, may then differ"
        )
    with contextlib.ExitStack() as stack:
        try:
            yield stack
        except UnicodeEncodeError:
            raise InvalidArgumentError(
                "the query contains a lone surrogate (an invalid Unicode character): remove this character"
            ) from None
        except sa.exc.SQLAlchemyError as exc:
            # Only the first line of the error is shown, which is the database's message. The other lines repeat the
            # query with its parameters, which may be confidential.
            raise _query_error(exc) from exc


def stage_select(
    sql: str,
    params: Mapping[str, Any],
    url: str,
    directory: str,
    columns: Sequence[str] | None = None,
    partition_by: str | None = None,
    only_first: bool = False,
) -> int:
    """Run a SELECT that must not change the database, write its rows to Parquet files, and return their number.

    PostgreSQL, MySQL and MariaDB run the SELECT in a read-only transaction, SQLite on a connection with ``PRAGMA
    query_only``. On any other database the transaction is rolled back at its end. The rollback does not undo a
    statement that commits by itself (such as DDL in Oracle), a function that commits, or values taken from a sequence.
    No transaction prevents writes outside of the tables, such as to a file on the server (``INTO OUTFILE``) or to
    another server. Therefore use a database account that is allowed only to read.

    Args:
        sql: The SELECT.
        params: Values of its parameters.
        url: SQLAlchemy's URL of the database.
        directory: Directory of staged data.
        columns: Columns to keep, if the result has all of them; None: all.
        partition_by: Column by whose ranges several connections read the rows; only of PostgreSQL by ADBC.
        only_first: Whether to write only the first rows, as many as the driver returns at a time.
    """
    statement = _statement(sql, params)
    options: dict[str, Any] = {"columns": columns, "partition_by": partition_by}
    with _reading(statement) as stack:
        tables = read_tables(statement, params, _checked(url), stack, read_only=True, **options)
        if tables is None:
            try:
                connection = stack.enter_context(_read_only(url))
            except sa.exc.SQLAlchemyError as exc:
                raise DataAccessError(f"the database cannot be reached: {str(exc).splitlines()[0]}") from None
            tables = _run(statement, connection, stack, **options)
        return write_tables(islice(tables, 1) if only_first else tables, directory)


def quoted_column(sql: str, params: Mapping[str, Any], url: str, column: str) -> str:
    """Return the name of a query's column, with quotes around the name if the database requires quotes.

    The query is run so that it returns no rows and cannot change the database; see :func:`stage_select`.
    """
    with _select_read_only(f"SELECT * FROM {as_table(sql)} WHERE 1 = 0", params, url) as result:
        check_present("the query", column, list(result.keys()))
        quoted: str = result.connection.dialect.identifier_preparer.quote(column)
    # Each ":" gets a backslash, because SQLAlchemy would otherwise treat the ":" as the beginning of a parameter.
    return quoted.replace(":", r"\:")


def count_values(sql: str, params: Mapping[str, Any], url: str, column: str) -> dict[Any, int]:
    """Let the database count how many rows of a query's result have each value of a column.

    The query cannot change the database; see :func:`stage_select`.
    """
    statement = f"SELECT {column}, COUNT(*) FROM {as_table(sql)} GROUP BY {column}"
    with _select_read_only(statement, params, url) as result:
        return dict(result.all())


@contextlib.contextmanager
def _select_read_only(sql: str, params: Mapping[str, Any], url: str) -> Iterator[Any]:
    """Run a SELECT that must not change the database (see `stage_select`), and yield its result."""
    try:
        with _read_only(url) as connection:
            yield connection.execute(_statement(sql, params), execution_options={"sqlite_raw_colnames": True})
    except sa.exc.SQLAlchemyError as exc:
        raise _query_error(exc) from None


def _query_error(error: Exception) -> DataError:
    """Return the error that is raised for a failed query, without the lines that contain the query's parameters."""
    # These exceptions are raised after a lost connection, a deadlock or a timeout, so a retry may help. SQLite also
    # raises them for a wrong column, where a retry does not help but does no harm.
    retryable = isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError)
    return (DataAccessError if retryable else DataError)(f"the query failed: {str(error).splitlines()[0]}")


def _statement(sql: str, params: Mapping[str, Any]) -> Any:
    # The parameters are bound without a type. With a type, SQLAlchemy would add a cast such as `::VARCHAR` to the
    # statement, and PostgreSQL cannot compare the result of this cast with a date.
    bound = [sa.bindparam(name, value, sa.types.NullType()) for name, value in params.items()]
    return sa.text(without_end(sql)).bindparams(*bound)


@contextlib.contextmanager
def _read_only(url: str) -> Iterator[Any]:
    """Connect to a database, and yield the connection. The connection is read-only if the database supports read-only
    connections."""
    engine = _engine(url, poolclass=sa.NullPool)
    database = engine.url.database
    # SQLite would create a missing database file, so the file is checked first.
    if engine.dialect.name == "sqlite" and database and database != ":memory:" and not os.path.exists(database):
        raise DataError(f"the SQLite database {database} does not exist: check the path in the URL")
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection = connection.execution_options(postgresql_readonly=True)
        elif engine.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA query_only = ON")
        elif engine.dialect.name in ("mysql", "mariadb"):
            connection.exec_driver_sql("SET SESSION TRANSACTION READ ONLY")
            # READ ONLY applies only to transactions that begin later, so the open transaction is ended here.
            connection.rollback()
        yield connection


def _run(
    query: Any, connection: Any, stack: contextlib.ExitStack, *, columns: Any = None, partition_by: Any = None
) -> Iterator[pa.Table]:
    """Run a query with SQLAlchemy, and return an iterator of its rows; see :func:`read_tables`.

    The result of most drivers does not contain complete SQL types, so the types are inferred from the values.
    """
    if partition_by is not None:
        need("adbc_driver_postgresql", extra="adbc")
        raise InvalidArgumentError(
            "partition_by is possible only for a SELECT in text form from PostgreSQL, with a URL as connection, and if "
            "no column is of a type such as json or an array: omit partition_by, or CAST such columns in the query"
        )
    if isinstance(connection, str | sa.URL):
        engine = _engine(connection)
        stack.callback(engine.dispose)
        connection = stack.enter_context(engine.connect())
    elif isinstance(connection, sa.Engine):
        connection = stack.enter_context(connection.connect())
    elif not isinstance(connection, sa.Connection):
        raise InvalidArgumentError(
            f"connection must be a SQLAlchemy URL, Engine or Connection, not {type(connection).__name__}"
        )
    statement = sa.text(query) if isinstance(query, str) else query
    if not isinstance(statement, sa.Executable):
        raise InvalidArgumentError(f"query must be SQL text or a SQLAlchemy selectable, not {type(query).__name__}")
    options = {
        # With `stream_results`, SQLAlchemy uses a server-side cursor if the database supports such cursors, so that not
        # all rows are in memory at once.
        "stream_results": True,
        "max_row_buffer": CHUNK_ROWS,
        # Without `sqlite_raw_colnames`, SQLAlchemy shortens the name "a.b" of a SQLite column to "b".
        "sqlite_raw_colnames": True,
    }
    execute = partial(connection.execute, statement, execution_options=options)
    result = execute()
    stack.callback(result.close)
    if not result.returns_rows:
        raise InvalidArgumentError("the query is not a statement that returns rows: pass a SELECT statement")
    names = [str(name) for name in result.keys()]  # noqa: SIM118 - not a dict
    check_unique(names, "the query returns", "rename all but one with AS")
    return _tables(result, execute, names, used_names(names, columns))


def _tables(result: Any, execute: Callable[[], Any], names: list[str], kept: list[str]) -> Iterator[pa.Table]:
    """Yield the rows of a result, in the types of the server if the driver returns Arrow data."""
    begun = False
    try:
        for batch in _ARROW_BATCHES.get(result.context.dialect.name, lambda cursor: ())(result.cursor):
            table = batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])
            begun = True
            yield table.rename_columns(names).select(kept)
    except Exception as exc:  # each driver has errors of its own, also if one of its optional packages is missing
        message = str(exc).partition("\n")[0]
        if begun:
            raise DataAccessError(f"the query failed: {message}") from None
        log.info("the driver returns no Arrow data, so the types of the columns follow from the values: %s", message)
        # The driver may have taken rows from the old result.
        result = execute()
    if begun:
        return
    # The first table is yielded even if it is empty, so that the columns are known if the query returns no rows.
    yield _to_table(names, kept, result.fetchmany(CHUNK_ROWS))
    while rows := result.fetchmany(CHUNK_ROWS):
        yield _to_table(names, kept, rows)


_ARROW_BATCHES: dict[str, Callable[[Any], Iterable[Any]]] = {
    "snowflake": lambda cursor: cursor.fetch_arrow_batches(),
    "databricks": lambda cursor: takewhile(len, map(cursor.fetchmany_arrow, repeat(CHUNK_ROWS))),
    # Small results have no job. Without the client of the Storage API, which has no public name, rows come as JSON.
    "bigquery": lambda cursor: (
        job.result().to_arrow_iterable(cursor.connection._bqstorage_client) if (job := cursor.query_job) else ()
    ),
}
"""Functions that return the rows of a driver's cursor as Arrow data, by the name of SQLAlchemy's dialect."""


def _checked(url: Any) -> Any:
    """Parse and check a URL."""
    try:
        found = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        # The message of the exception may contain a password, so it is not shown.
        raise InvalidArgumentError(
            "connection is not a valid SQLAlchemy URL: write DIALECT+DRIVER://USER:PASSWORD@HOST:PORT/DATABASE, with a "
            "number as the port and a percent-encoded password"
        ) from None
    # If the password contains an "@" that is not encoded, the rest of the password is parsed as the host. The URL is
    # refused, because a database driver would show the host, and so a part of the password, in its error message.
    if "@" in (found.host or ""):
        raise InvalidArgumentError('the password in connection contains an "@": write %40 for the "@"')
    _check_files(found)
    return found


def _engine(url: Any, **options: Any) -> Any:
    found = _checked(url)
    try:
        return sa.create_engine(found, **options)
    except sa.exc.NoSuchModuleError:
        raise InvalidArgumentError(
            f'connection has the SQLAlchemy dialect "{found.drivername}", which is not installed here: correct the '
            "URL, or install the package with this dialect"
        ) from None
    except ModuleNotFoundError as exc:
        raise InvalidArgumentError(
            f"connection {redact_value(str(url))} needs a database driver that is not installed: {exc}"
        ) from exc


def _check_files(url: Any) -> None:
    """Check that this machine has the files, such as certificates, that a URL's options name."""
    for option in _FILE_OPTIONS.get(url.get_backend_name(), ()):
        path = url.query.get(option)
        # libpq accepts two values that name no file: the system's certificates, and a key in a token (ENGINE:KEY).
        is_file = isinstance(path, str) and path != "system" and not (option == "sslkey" and ":" in path)
        if is_file and not os.access(path, os.R_OK):
            raise DataError(
                f"the option {option} of the connection names {path}, which {socket.gethostname()} does not have or "
                "cannot read. The query runs on this machine: for a job, this is the head of its pool. Put the file "
                "there, or correct the path"
            )


def _to_table(names: list[str], kept: list[str], rows: Sequence[Any]) -> pa.Table:
    columns: dict[str, Any] = {}
    for j, name in enumerate(names):
        if name not in kept:
            continue
        try:
            columns[name] = pa.array([row[j] for row in rows])
        except (pa.ArrowInvalid, pa.ArrowTypeError) as exc:
            raise DataError(
                f'column "{name}" of the query cannot be written as Parquet: {exc}; CAST the column to another type in '
                "the query"
            ) from exc
    return pa.table(columns)
