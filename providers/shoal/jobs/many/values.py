"""List the values of a column, and restrict all datasets of a spec to the rows with one of these values."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

from shoal.data.spec import DatasetSpec
from shoal.data.syntax import Scalar, builtin_value, connection_variable, describe_filters, narrowed_query
from shoal.errors import DataError, InvalidArgumentError, shown
from shoal.jobs import credentials
from shoal.jobs.specs.function import AnyJobSpec, FunctionJobSpec
from shoal.jobs.specs.training import JobSpec

log = logging.getLogger("shoal.jobs")

MOST_VALUES = 1000
"""Largest number of values that shoal accepts if it finds the values of a column itself. A column with more values is
probably not the column that the user meant. Airflow maps a task over at most 1024 items by default."""


class SharedColumn:
    """A column that all datasets of a spec have.

    Args:
        spec: The spec.
        column: Name of the column.
        connection_url: Function that returns the SQLAlchemy URL of a dataset's connection by its name.

    Raises:
        DataError: A dataset cannot be read, or lacks the column.
        InvalidArgumentError: The column is the label, the spec has no dataset, a dataset is a staged copy, or a
            database connection is not known.
    """

    def __init__(self, spec: AnyJobSpec, column: str, connection_url: Callable[[str], str | None] | None) -> None:
        self._column = column
        datasets = list(spec.datasets())
        training = next(spec.inputs(), None)
        if training is None:
            raise InvalidArgumentError("the spec has no dataset to train on: add a dataset to dataset_map")
        self._training = training
        if column == _label_of(spec):
            raise InvalidArgumentError(
                f'column "{column}" is the label, and all rows of a spec would have the same label: name another column'
            )
        if any(dataset.staging for dataset in datasets):
            raise InvalidArgumentError(
                "a dataset of the spec is a staged copy (of a DataFrame or a query's result). shoal removes the copy "
                "when the first of the jobs ends: write the rows to Parquet files, or give sql and a connection"
            )
        named = [dataset.connection for dataset in datasets if dataset.connection]
        self._urls = credentials.connections(named, os.environ, connection_url)
        self._quoted: dict[str, str] = {}
        """Quoted name of the column for the database, by the key of the query."""
        self._types: list[tuple[str, Any]] = []
        """Path and Arrow type of the column in each dataset of Parquet files."""
        self._check_present(datasets)

    def values(self, min_rows: int) -> list[Scalar]:
        """Return, in ascending order, the column's values that have at least `min_rows` rows in the training dataset.

        Values with fewer rows, and rows without a value, are left out, and a warning is logged for them.

        Raises:
            DataError: The column has no values, or none with enough rows.
            InvalidArgumentError: There are more than 1000 values, or their type is not supported.
        """
        counts: dict[Scalar, int] = {}
        nulls = 0
        for value, rows in self._counts().items():
            # NaN counts as null: NaN is not equal to itself, so a filter for NaN would find no rows.
            if value is None or value != value:
                nulls += rows
            else:
                plain = _plain(value)
                counts[plain] = counts.get(plain, 0) + rows
        if nulls:
            log.warning(
                'column "%s" has no value in %d of %d rows: no spec contains these rows',
                self._column, nulls, nulls + sum(counts.values()),
            )  # fmt: skip

        # In SQLite, a column may contain values of several types, which Python cannot compare. So the values are sorted
        # by type first.
        ordered = sorted(counts, key=lambda value: (type(value).__name__, value))
        kept = [value for value in ordered if counts[value] >= min_rows]
        if few := [value for value in ordered if counts[value] < min_rows]:
            log.warning(
                'column "%s" has fewer than %d rows with %s: there is no spec for %s',
                self._column, min_rows, ", ".join(map(shown, few[:20])) + (", ..." if len(few) > 20 else ""),
                "it" if len(few) == 1 else "them",
            )  # fmt: skip
        if not kept:
            raise DataError(self._no_values_message(counts, min_rows))
        if len(kept) > MOST_VALUES:
            raise InvalidArgumentError(
                f'column "{self._column}" has {len(kept)} values, but at most {MOST_VALUES} are accepted: name another '
                "column, raise min_rows, or list the wanted values in values="
            )
        return kept

    def check_types(self, values: Sequence[Scalar]) -> None:
        """Check that the column's type in every dataset can be compared with the values that the user gave.

        Raises:
            DataError: The column of a dataset has another type than a value.
        """
        from shoal.data.parquet.filter_matching import prepare

        for path, type_ in self._types:
            for value in values:
                prepare(path, (self._column, "=", value), type_)

    def restricted_to(self, value: Scalar) -> Callable[[DatasetSpec], DatasetSpec]:
        """Return a function that restricts a dataset to the rows in which the column of `for_each` has a given
        value."""

        def restricted(dataset: DatasetSpec) -> DatasetSpec:
            if dataset.sql is None:
                filters = tuple((*terms, (self._column, "=", value)) for terms in dataset.filters or ((),))
                return dataset.model_copy(update={"filters": filters})
            sql, params = narrowed_query(dataset.sql, dataset.params or {}, self._quoted[_key(dataset)], value)
            return dataset.model_copy(update={"sql": sql, "params": params})

        return restricted

    def _check_present(self, datasets: Iterable[DatasetSpec]) -> None:
        from shoal.data.connector import DataConnector
        from shoal.data.staging.sql import quoted_column
        from shoal.data.syntax import check_present

        seen: set[tuple[str, ...]] = set()
        for dataset in datasets:
            if dataset.sql is not None:
                if _key(dataset) not in self._quoted:
                    url = self._url(dataset)
                    self._quoted[_key(dataset)] = quoted_column(dataset.sql, dataset.params or {}, url, self._column)
            elif dataset.paths not in seen:
                seen.add(dataset.paths)
                # The filters and splits of the dataset do not change its columns. They are left out here, because
                # applying them may require a count of the rows.
                source = DataConnector.from_spec(dataset.model_copy(update={"filters": None, "splits": ()}))
                schema, path = source.schema(), source.source.reference().path
                check_present(path, self._column, schema.names)
                self._types.append((path, schema.field(self._column).type))

    def _counts(self) -> dict[Any, int]:
        """Count the training rows for each value of the column."""
        from shoal.data.connector import DataConnector
        from shoal.data.staging.sql import count_values

        dataset = self._training
        if dataset.sql is None:
            return DataConnector.from_spec(dataset).value_counts(self._column)
        return count_values(dataset.sql, dataset.params or {}, self._url(dataset), self._quoted[_key(dataset)])

    def _url(self, dataset: DatasetSpec) -> str:
        return self._urls[connection_variable(str(dataset.connection))]

    def _no_values_message(self, counts: dict[Scalar, int], min_rows: int) -> str:
        source = self._training.origin[0]
        rows = f" with {describe_filters(self._training.filters)}" if self._training.filters else ""
        if counts:
            return (
                f'no value of column "{self._column}" has {min_rows} rows in {source}{rows}; the most frequent value '
                f"has {max(counts.values())}: lower min_rows"
            )
        return (
            f'{source} has no rows{rows} that have a value in column "{self._column}": check the table and the filters'
        )


def check_values(values: Iterable[Any]) -> list[Scalar]:
    """Check the values that the user gave, and convert them to plain data.

    Raises:
        InvalidArgumentError: There are no values, a value is null or of a wrong type, or a value is given twice.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidArgumentError(f"values must be a list of values, not {shown(values)}")
    plain = [_plain(value) for value in values]
    if not plain:
        raise InvalidArgumentError(
            "values is empty: give at least one value, or leave values out to use all values of the column"
        )
    for index, value in enumerate(plain):
        if value in plain[:index]:
            raise InvalidArgumentError(f"values contains {shown(value)} twice: give each value only once")
    return plain


def _plain(value: Any) -> Scalar:
    """Convert a value of the column to a type that a dataset's filter can contain: a bool, a number or a text."""
    value = builtin_value(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal) and value == value.to_integral_value():
        return int(value)
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise InvalidArgumentError(
        f"the value {shown(value)} is not supported: a value must be a bool, an integer, a finite number, a text or a "
        "date"
    )


def _key(dataset: DatasetSpec) -> str:
    return str(dataset.query_key())


def _label_of(spec: AnyJobSpec) -> str | None:
    if isinstance(spec, JobSpec):
        return spec.label_col
    register = spec.register_as if isinstance(spec, FunctionJobSpec) else None
    return None if register is None else register.label_col
