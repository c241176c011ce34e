"""What a dataset's spec may contain: names of columns, SQL queries and filters."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any, Literal, get_args

from shoal.errors import DataError, InvalidArgumentError, shown


def check_present(path: str, name: str, present: Sequence[str]) -> None:
    """Check that a file has exactly one column of a given name.

    Raises:
        DataError: If the file has no column or several columns with this name. The message contains similar names.
    """
    if present.count(name) > 1:
        raise DataError(f'{path} has several columns named "{name}": rename all but one')
    if name in present:
        return
    lower = {column.lower(): column for column in present}
    near = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3)]
    if near:
        hint = "; did you mean " + " or ".join(f'"{column}"' for column in near) + "?"
    else:
        shown = ", ".join(present[:20]) + (", ..." if len(present) > 20 else "")
        hint = f"; its columns are {shown}" if present else "; it has no columns"
    raise DataError(f'{path} has no column "{name}"{hint}')


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


Operator = Literal["=", "!=", "<", ">", "<=", ">=", "in", "not in"]
Scalar = bool | int | float | str
Term = tuple[str, Operator, Scalar | tuple[Scalar, ...]]
"""One comparison of a filter: (column, operator, value). The value of "in" and "not in" is a tuple of values. A null in
the column matches no term."""

Filters = tuple[tuple[Term, ...], ...]
"""Filters of rows, as a tuple of alternatives. Each alternative is a tuple of terms (comparisons). A row matches the
filters if it matches all terms of at least one alternative."""

OPERATORS: tuple[Operator, ...] = get_args(Operator)

_FORM = 'write filters=[["month", ">=", 3], ["month", "<", 6]], or a list of such lists, which are joined with OR'


def parse_filters(given: Any) -> Filters:
    """Check the filters that the user wrote, and convert them to nested tuples (:data:`Filters`).

    Raises:
        InvalidArgumentError: If the form, an operator or a value is wrong. The message names the term.
    """
    if not _is_list(given):
        raise InvalidArgumentError(f"filters must be a list, not {shown(given)}: {_FORM}")
    if not given:
        raise InvalidArgumentError(f"filters is empty: omit filters to read all rows, or {_FORM}")
    if isinstance(given[0], str):
        raise InvalidArgumentError(f"filters={shown(given)} is a single term: put it into a list, [{shown(given)}]")
    # The user may give one list of terms (comparisons), or a list of such lists. In a list of terms, `given[0][0]` is
    # the name of a column. In a list of lists, `given[0][0]` is a term.
    flat = _is_list(given[0]) and bool(given[0]) and isinstance(given[0][0], str)
    alternatives = [given] if flat else given
    parsed = []
    for terms in alternatives:
        if not _is_list(terms) or not terms:
            raise InvalidArgumentError(f"filters has the element {shown(terms)}, which is not a list of terms: {_FORM}")
        parsed.append(tuple(_parse_term(term) for term in terms))
    return tuple(parsed)


def describe_filters(filters: Filters) -> str:
    """Return the filters as a short text for a message, such as ``month >= 3 and month < 6``."""
    return " or ".join(" and ".join(describe_term(term) for term in terms) for terms in filters)


def describe_term(term: Term) -> str:
    """Return one comparison of a filter as a short text for a message, such as ``month >= 3``."""
    column, operator, value = term
    return f"{column} {operator} {shown(list(value) if isinstance(value, tuple) else value)}"


def columns_of(filters: Filters) -> list[str]:
    """Return the names of the columns that the filters compare, without duplicates."""
    return list(dict.fromkeys(column for terms in filters for column, _, _ in terms))


def builtin_value(value: Any) -> Any:
    """Convert a NumPy scalar to a Python object, and a date or datetime to ISO 8601 text. Other values are not
    changed."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    # The check also accepts a datetime, because datetime is a subclass of date.
    return value.isoformat() if isinstance(value, date) else value


def _parse_term(given: Any) -> Term:
    if not _is_list(given) or len(given) != 3:
        raise InvalidArgumentError(f"filters has the term {shown(given)}: a term is [column, operator, value]; {_FORM}")
    column, operator, value = given
    if not isinstance(column, str):
        raise InvalidArgumentError(
            f"filters has the term {shown(given)}: the name of the column must be a text, not {shown(column)}"
        )
    if operator == "==":
        operator = "="
    if operator not in OPERATORS:
        raise InvalidArgumentError(
            f"filters has the term {shown(given)} with the unknown operator {shown(operator)}: use one of "
            f"{', '.join(OPERATORS)}"
        )
    if operator not in ("in", "not in"):
        return column, operator, _parse_scalar(value, given)
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | dict):
        raise InvalidArgumentError(
            f'filters has the term {shown(given)}: "{operator}" takes a list of values, not {shown(value)}'
        )
    values = tuple(_parse_scalar(item, given) for item in value)
    # The values of a set are sorted, so that equal sets give equal JSON.
    if isinstance(value, set | frozenset):
        values = tuple(sorted(values, key=lambda item: (str(type(item)), item)))
    if not values:
        raise InvalidArgumentError(f'filters has the term {shown(given)}: "{operator}" needs at least one value')
    return column, operator, values


def _parse_scalar(value: Any, term: Any) -> Scalar:
    value = builtin_value(value)
    if value is None:
        raise InvalidArgumentError(
            f"filters has the term {shown(term)}, which compares with null, but no row matches such a comparison: "
            "remove the null from the list of values, or remove the term. A term with any other value leaves out the "
            "rows with null, as != -1 does if no row has -1"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidArgumentError(f"filters has the term {shown(term)}: a value must be finite, not {value}")
    if isinstance(value, bool | int | float | str):
        return value
    raise InvalidArgumentError(
        f"filters has the term {shown(term)}: a value must be a bool, a number, a text, a date or a datetime, not "
        f"{type(value).__name__}"
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
