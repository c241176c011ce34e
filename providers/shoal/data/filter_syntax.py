"""Check filters of rows, and convert the filters to a form that can be stored as JSON in a job's spec.

The syntax of the filters is the same as in pyarrow, pandas and Dask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any, Literal, get_args

from shoal.errors import InvalidArgumentError, shown

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
            "remove the null from the list of values, or remove the term"
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
