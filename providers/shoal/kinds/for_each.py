"""Build one spec per value of a column, to train one model for each value from one table."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

from shoal.data.connections import KNOWN, connection_variable
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.filters import Scalar, builtin_value, check_present, describe_filters
from shoal.data.parquet.filter_matching import prepare
from shoal.data.sql import count_values, narrowed_query, quoted_column
from shoal.errors import DataError, InvalidArgumentError, shown
from shoal.jobs import credentials
from shoal.jobs.kind import parse_spec
from shoal.jobs.spec import AnyJobSpec, is_spec
from shoal.training.run_config import RunConfig


def for_each(
    spec: AnyJobSpec | Mapping[str, Any],
    column: str,
    values: Iterable[Any] | None = None,
    *,
    min_rows: int = 1,
    connection_url: Callable[[str], str | None] | None = None,
) -> list[dict[str, Any]]:
    """Return one spec per value of a column. The spec of a value trains a model only on the rows with this value.

    Every dataset of a spec (for training, evaluation and the holdout) is restricted to the rows with the value. In the
    names of the registered model, the experiment and the MLflow run, in tags and in `job_id`, the placeholder
    ``{column}`` is replaced by the value. The model's name and `job_id` end in ``-<value>`` if they have no
    placeholder.

    Rows with a null in the column belong to no spec; a warning is logged with their number.

    Args:
        spec: A `JobSpec` or a `FunctionJobSpec`, or its fields. The training dataset of a `FunctionJobSpec` is the
            first one in its `dataset_map`.
        column: Name of a column that all datasets have.
        values: Values for which specs are built. By default, all values in the training dataset, in ascending order.
            shoal finds the values in the names of the partition directories, by reading the column, or by a query in
            the database.
        min_rows: Number of rows of the training dataset that a value needs. Values with fewer rows get no spec; a
            warning is logged. `min_rows` cannot be given together with `values`.
        connection_url: Function that returns the SQLAlchemy URL of a dataset's connection by its name, as in `submit`.

    Returns:
        The specs as plain data for JSON, over which an operator or a task can be mapped.

    Raises:
        DataError: A dataset cannot be read or lacks the column, or the column has no values.
        InvalidArgumentError: The spec or a value is wrong, more than 1000 values were found, or two values give the
            same name.

    Example:
        >>> specs = for_each(spec, column="carrier")
        >>> DistributedTrainOperator.partial(task_id="train", pool_name="retrain").expand(spec=specs)
    """
    base, job_id = _without_job_id(spec)
    if base.refused_by_for_each is not None:
        raise InvalidArgumentError(f"for_each accepts only the spec of a training, but {base.refused_by_for_each}")
    names = Names(base, job_id, column)
    shared = SharedColumn(base, column, connection_url)
    if values is None:
        chosen = shared.values(min_rows)
    elif min_rows != 1:
        raise InvalidArgumentError(
            f"min_rows={min_rows} applies only if shoal finds the values in the training dataset, but values are "
            "given: leave out min_rows or values"
        )
    else:
        chosen = check_values(values)
        shared.check_types(chosen)
    texts = names.texts(chosen)
    return [
        names.filled(base.with_datasets(shared.restricted_to(value)), text)
        for value, text in zip(chosen, texts, strict=True)
    ]


def _without_job_id(spec: AnyJobSpec | Mapping[str, Any]) -> tuple[AnyJobSpec, str | None]:
    """Split a spec into the parsed spec without `job_id`, and the `job_id`, which may contain a placeholder such as
    `{city}`."""
    if is_spec(spec):
        run_config = spec.run_config.model_copy(update={"job_id": None})
        return spec.model_copy(update={"run_config": run_config}), spec.run_config.job_id
    given = spec.get("run_config")
    if isinstance(given, RunConfig):
        return parse_spec({**spec, "run_config": given.model_copy(update={"job_id": None})}), given.job_id
    if isinstance(given, Mapping) and isinstance(given.get("job_id"), str):
        return parse_spec({**spec, "run_config": {**given, "job_id": None}}), given["job_id"]
    return parse_spec(spec), None


_PLACEHOLDER = re.compile(r"(?<!\{)\{([^{}\s]+)\}(?!\})")
"""Pattern of a placeholder such as ``{carrier}``. A template of Airflow such as ``{{ ds }}`` does not match."""

_NOT_IN_A_NAME = re.compile(r"[^\w.-]+")
_NOT_IN_AN_ID = re.compile(r"[^A-Za-z0-9._-]+")


class Names:
    """The names in a spec that contain a column's value: model, experiment, MLflow run, tags and job id.

    Args:
        spec: The spec, without a job id.
        job_id: Job id of the spec, which may contain the placeholder.
        column: Name of the column.

    Raises:
        InvalidArgumentError: A name has the placeholder of another column.
    """

    def __init__(self, spec: AnyJobSpec, job_id: str | None, column: str) -> None:
        self._job_id = job_id
        self._column = column
        self._placeholder = f"{{{column}}}"
        register, tracking = spec.register_as, spec.tracking
        self._model = None if register is None else register.model
        named = {
            "register.model": self._model,
            "tracking.experiment": tracking and tracking.experiment,
            "tracking.run_name": tracking and tracking.run_name,
            "run_config.job_id": job_id,
        }
        for field, name in named.items():
            for found in _PLACEHOLDER.findall(name or ""):
                if found != column:
                    raise InvalidArgumentError(
                        f'{field}="{name}" contains the placeholder {{{found}}}: the only placeholder is '
                        f"{self._placeholder}, with the name of the column. Use this placeholder, or remove the other "
                        "one"
                    )

    def texts(self, values: Sequence[Scalar]) -> list[str]:
        """Convert each value to a text that a name can contain, and check that no two values become the same text.

        Letters, digits, ``_``, ``-`` and ``.`` of a value are kept. Each sequence of other characters becomes ``_``.

        Raises:
            InvalidArgumentError: Two values give the same name or the same job id.
        """
        texts = [_NOT_IN_A_NAME.sub("_", str(value).strip()) or "_" for value in values]
        self._check_unique(values, texts)
        if self._job_id is not None:
            self._check_unique(values, [_NOT_IN_AN_ID.sub("_", text) for text in texts])
        return texts

    def _check_unique(self, values: Sequence[Scalar], texts: Sequence[str]) -> None:
        first: dict[str, Scalar] = {}
        for value, text in zip(values, texts, strict=True):
            if text in first:
                raise InvalidArgumentError(
                    f'the values {shown(first[text])} and {shown(value)} of column "{self._column}" both become '
                    f'"{text}" in names: change one of these values in the table, or leave one of them out of values='
                )
            first[text] = value

    def filled(self, spec: AnyJobSpec, text: str) -> dict[str, Any]:
        """Put a value's text into all names of a spec, and return the spec as plain data for JSON.

        Raises:
            InvalidArgumentError: A name that contains the value is too long or not legal.
        """
        document = spec.document()
        if self._model is not None:
            document["register"]["model"] = self._with_value(self._model, text)
        if tracking := document.get("tracking"):
            for field in ("experiment", "run_name"):
                tracking[field] = tracking[field] and tracking[field].replace(self._placeholder, text)
            tracking["tags"] = {name: tag.replace(self._placeholder, text) for name, tag in tracking["tags"].items()}
        if self._job_id is not None:
            document["run_config"]["job_id"] = self._with_value(self._job_id, _NOT_IN_AN_ID.sub("_", text))
        return parse_spec(document).document()

    def _with_value(self, name: str, text: str) -> str:
        """Return a name with the value in place of the placeholder, or at the end if there is no placeholder."""
        return name.replace(self._placeholder, text) if self._placeholder in name else f"{name}-{text}"


log = logging.getLogger("shoal.jobs")

MOST_VALUES = 1000
"""Largest number of values that shoal finds itself. Airflow maps a task over at most 1024 items by default."""


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
        if (training := next(spec.inputs(), None)) is None:
            raise InvalidArgumentError("the spec has no dataset to train on: add a dataset to dataset_map")
        self._training = training
        label = getattr(spec, "label_col", None) or getattr(spec.register_as, "label_col", None)
        if column == label:
            raise InvalidArgumentError(
                f'column "{column}" is the label, and all rows of a spec would have the same label: name another column'
            )
        if any(dataset.staging for dataset in datasets):
            raise InvalidArgumentError(
                "a dataset of the spec is a staged copy (of a DataFrame or a query's result). shoal removes the copy "
                "when the first of the jobs ends: write the rows to Parquet files, or give sql and a connection"
            )
        named = [each for dataset in datasets for each in dataset.connections()]
        self._urls = credentials.connections(named, os.environ, connection_url)
        KNOWN.update(self._urls)
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
        from shoal.data.connector import DataConnector

        dataset = self._training
        if dataset.sql is None:
            rows_of = DataConnector.from_spec(dataset).value_counts(self._column)
        else:
            column = self._quoted[dataset.source_key()]
            rows_of = count_values(dataset.sql, dataset.params or {}, self._url(dataset), column)
        counts: dict[Scalar, int] = {}
        nulls = 0
        for value, rows in rows_of.items():
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
            sql, params = narrowed_query(dataset.sql, dataset.params or {}, self._quoted[dataset.source_key()], value)
            return dataset.model_copy(update={"sql": sql, "params": params})

        return restricted

    def _check_present(self, datasets: Iterable[DatasetSpec]) -> None:
        from shoal.data.connector import DataConnector

        seen: set[tuple[str, ...]] = set()
        for dataset in datasets:
            if dataset.sql is not None:
                if dataset.source_key() not in self._quoted:
                    url = self._url(dataset)
                    self._quoted[dataset.source_key()] = quoted_column(
                        dataset.sql, dataset.params or {}, url, self._column
                    )
            elif dataset.paths not in seen:
                seen.add(dataset.paths)
                # The filters and splits of the dataset do not change its columns. They are left out here, because
                # applying them may require a count of the rows.
                source = DataConnector.from_spec(dataset.whole())
                schema, path = source.schema(), source.source.reference().path
                check_present(path, self._column, schema.names)
                self._types.append((path, schema.field(self._column).type))

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
