"""Check and embed the text of SQL queries, without a database."""

from __future__ import annotations

import re
from collections.abc import Sequence

ROWS = "shoal_rows"
"""Alias of the user's query when it is a subquery in the FROM clause of another query."""

_LEADING_COMMENT = re.compile(r"\s*(--[^\n]*(\n|$)|/\*.*?\*/)", re.DOTALL)
_SELECT = re.compile(r"\s*(select|with)\b", re.IGNORECASE)


def is_select(sql: str) -> bool:
    """Return whether a query begins with SELECT, or with a WITH clause, after its comments."""
    while comment := _LEADING_COMMENT.match(sql):
        sql = sql[comment.end() :]
    return _SELECT.match(sql) is not None


def as_table(sql: str) -> str:
    """Return a query as a subquery (in parentheses, with an alias) for the FROM clause of another query."""
    # The closing parenthesis is on a line of its own, because the query may end in a comment.
    return f"(\n{without_end(sql)}\n) {ROWS}"


def without_end(sql: str) -> str:
    """Return a query without a ``;`` at its end."""
    return sql.rstrip().removesuffix(";")


def used_names(names: Sequence[str], used: Sequence[str] | None) -> list[str]:
    """Return the names of the columns to keep: those that are used, in the order of the result.

    All are kept if `used` is None, or if the result lacks a used column, so that the error about it names all columns.
    """
    if used is None or not set(used) <= set(names):
        return list(names)
    return [name for name in names if name in used]
