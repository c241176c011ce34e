"""Check the SQL query in a dataset's spec: one SELECT with bound parameters, and the name of a connection."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shoal.errors import InvalidArgumentError, shown

CONNECTION_PREFIX = "SHOAL_CONNECTION_"
"""Prefix of the names of environment variables that contain the URLs of database connections."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_LEADING_COMMENT = re.compile(r"\s*(--[^\n]*(\n|$)|/\*.*?\*/)", re.DOTALL)
_EXECUTABLE_COMMENT = re.compile(r"/\*M?!")
_ROWS = "shoal_rows"
"""Alias of the user's query when it is a subquery in the FROM clause of another query."""

_SELECT = re.compile(r"\s*(select|with)\b", re.IGNORECASE)


def check_connection_name(name: str) -> None:
    """Check that the text is the name of a connection and not a URL, which could contain a password.

    Raises:
        InvalidArgumentError: If the text is not a legal name.
    """
    if not _NAME.fullmatch(name):
        # The message does not show the value, because the value may be a URL with a password.
        raise InvalidArgumentError(
            'connection must be a name of letters, digits, "_", "-" and ".", not a URL: set the environment variable '
            f"{CONNECTION_PREFIX}<NAME> to the URL and give the name"
        )


def check_query(sql: str, params: Mapping[str, Any]) -> None:
    """Check, without a database, that SQL text is a single SELECT and that all its parameters have values.

    This check finds mistakes, but cannot prevent that a statement writes. :func:`shoal.data.staging.sql.stage_select`
    prevents writes with a read-only transaction or connection.

    Raises:
        InvalidArgumentError: If the statement is not a single SELECT or WITH, or contains a comment that a database
            runs as SQL. Also if a parameter has no value, or a value has no parameter.
    """
    import sqlalchemy as sa

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
    rest = body
    while comment := _LEADING_COMMENT.match(rest):
        rest = rest[comment.end() :]
    if not _SELECT.match(rest):
        raise InvalidArgumentError(
            f"sql must be a SELECT, or a WITH clause followed by a SELECT, not {shown(rest.strip())}"
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
    return f"SELECT * FROM {as_table(sql)} WHERE {_ROWS}.{column} = :{name}", {**params, name: value}


def as_table(sql: str) -> str:
    """Return a query as a subquery (in parentheses, with an alias) for the FROM clause of another query."""
    # The closing parenthesis is on a line of its own, because the query may end in a comment.
    return f"(\n{without_end(sql)}\n) {_ROWS}"


def without_end(sql: str) -> str:
    """Return a query without a ``;`` at its end."""
    return sql.rstrip().removesuffix(";")


def connection_variable(name: str) -> str:
    """Return the name of the environment variable for a connection's URL, such as SHOAL_CONNECTION_WAREHOUSE."""
    return CONNECTION_PREFIX + re.sub(r"[^A-Z0-9]", "_", name.upper())
