"""Check the datasets of a boosting training, divide the rows among the workers, and decode a worker's shard (its part).

The driver checks and divides with the Parquet footers only; the workers decode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from shoal.boosting_libraries import loaded
from shoal.data import checks
from shoal.data.numpy_columns import encoded, to_matrix, to_vector
from shoal.data.parquet.source import ParquetSource, group_starts
from shoal.data.planning import RowRange, Shard
from shoal.errors import DataError
from shoal.lazy_imports import np, pa
from shoal.training.boosting.messages import Columns, Part
from shoal.training.boosting.worker_fit import has_long_groups
from shoal.training.boosting.worker_load import FLOAT32_BYTES, stored_row_bytes

if TYPE_CHECKING:
    from shoal.data.connector import DataConnector
    from shoal.training.boosting.request import TrainRequest

CheckLabel = Callable[["np.ndarray", str, RowRange], None]
"""Type of a function that checks the labels of a column in a row range, and raises DataError if the objective refuses a
label."""


def label_check(is_refused: Callable[[np.ndarray], np.ndarray], rule: str) -> CheckLabel:
    """Return a function that raises DataError, whose message ends with `rule`, if a label is refused."""

    def check(label: np.ndarray, column: str, rows: RowRange) -> None:
        if len(bad := is_refused(label).nonzero()[0]):
            raise DataError(
                f'{rows.path}, row group {rows.row_group}: the label "{column}" is {label[bad[0]]} at row '
                f"{rows.row_number(int(bad[0]))}, but {rule}"
            )

    return check


@dataclass(frozen=True, slots=True)
class Batch:
    """The decoded rows of one row range (rows of one Parquet row group), as NumPy arrays.

    Args:
        data: Features, float32 ``[rows, columns]``; or an Arrow table in the types of the files.
        label: Labels, float32 ``[rows]``, or ``[rows, outputs]`` if there are several label columns.
        weight: Weights, float32 ``[rows]``, or None.
        base_margin: Margins ``[rows]`` or ``[rows, outputs]``, or None: float64 if `data` keeps the types of the files,
            else float32.
        group: Number of each row's group within the shard, int64 ``[rows]``, or None.
        lower: Lower bounds of the labels, float32 ``[rows]``, or None.
        upper: Upper bounds of the labels, float32 ``[rows]``, or None.
    """

    data: np.ndarray | pa.Table
    label: np.ndarray
    weight: np.ndarray | None = None
    base_margin: np.ndarray | None = None
    group: np.ndarray | None = None
    lower: np.ndarray | None = None
    upper: np.ndarray | None = None

    def __getitem__(self, rows: slice) -> Batch:
        """Return a batch that contains only the rows of a slice."""
        return self._each(lambda name: None if (values := getattr(self, name)) is None else values[rows])

    def then(self, other: Batch) -> Batch:
        """Return a batch with the rows of this batch, followed by the rows of another batch."""

        def joined(name: str) -> np.ndarray | None:
            mine, theirs = getattr(self, name), getattr(other, name)
            return None if mine is None else np.concatenate([mine, theirs])

        return self._each(joined)

    def _each(self, of: Callable[[str], Any]) -> Batch:
        return Batch(**{field.name: of(field.name) for field in fields(self)})


_WITHOUT_LABEL = "leave these rows out, or give each of them a label, before training"
_EVERY_ROW = "every row needs a finite number"
_CHANGED = "the file may have changed since the training began, so start the training again"


class ShardRows:
    """Decoded rows of a worker's shard, in batches; a boosting library may iterate over this object several times.

    If the decoded rows fit into the budget, the first pass keeps them in memory. Otherwise each pass reads the rows
    again, and at most one row group is in memory.

    Args:
        part: Rows to read.
        columns: Roles of the columns.
        budget: Maximum size of the decoded rows in memory, in bytes.
        check_label: Additional check of the labels, specific to the objective, or None.
        accepts_tables: Whether the library accepts the features of a batch as an Arrow table. Rows that are decoded in
            each pass are then not copied into a matrix. Row groups with few rows are copied, because XGBoost needs more
            time for many short columns than for a matrix.
        keep_types: Whether the features of all batches are Arrow tables in the types of the files, for a library that
            reads features as float64. Otherwise a matrix is float32.

    Attributes:
        passes: Number of times that the rows were decoded.
        seconds: Total seconds for reading and decoding.
    """

    def __init__(
        self,
        part: Part,
        columns: Columns,
        budget: int,
        check_label: CheckLabel | None = None,
        *,
        accepts_tables: bool = False,
        keep_types: bool = False,
    ) -> None:
        self.passes = 0
        self.seconds = 0.0
        self.part = part
        self.columns = columns
        self._check_label = check_label
        self._keep_types = keep_types
        row_bytes = stored_row_bytes(part, columns) if keep_types else len(columns.names) * FLOAT32_BYTES
        keep = part.shard.rows * row_bytes <= budget
        self._kept: list[Batch] | None = [] if keep else None
        self._as_tables = accepts_tables and not keep and not columns.group and has_long_groups(part.shard)
        self._complete = False

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches once, and add the time for reading and decoding to the attribute `seconds`."""
        batches = iter(self._kept) if self._complete and self._kept is not None else self._decode()
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def without_features(self) -> Iterable[Batch]:
        """Iterate over the labels, weights, margins and groups once, without decoding the features."""
        if self._complete and self._kept is not None:
            return iter(self._kept)
        columns = replace(self.columns, features=(), categories={})
        return ShardRows(self.part, columns, 0, keep_types=True)

    def forget(self) -> None:
        """Free the rows in memory. After this call, the object must not be iterated over."""
        self._kept = None

    def _decode(self) -> Iterator[Batch]:
        self.passes += 1
        if self._kept is not None:
            # If an earlier pass was interrupted, `_kept` already contains some batches. They are removed, because this
            # pass decodes all batches again.
            self._kept.clear()
        ranges = self.part.shard.ranges
        if ranges:
            pieces = self.part.connector.ingester().iter_pieces(self.part.shard, self.columns.names)
            number = _GroupNumbers(self.columns.group) if self.columns.group else None
            for rows, table in pieces:
                batch = self._batch(rows, table)
                if number:
                    batch = replace(batch, group=number(table))
                if self._kept is not None:
                    self._kept.append(batch)
                yield batch
        self._complete = True

    def _batch(self, rows: RowRange, table: pa.Table) -> Batch:
        columns = self.columns
        place = f"{rows.path}, row group {rows.row_group}"
        if table.num_rows != rows.rows:
            raise DataError(f"{place}: {table.num_rows} rows were read instead of {rows.rows}: {_CHANGED}")
        # XGBoost reports no error if a worker has fewer columns than the other workers, so the columns are checked
        # here.
        if table.column_names != columns.names:
            raise DataError(
                f"{place}: the columns {table.column_names} were read instead of {columns.names}: {_CHANGED}"
            )
        features: np.ndarray | pa.Table = encoded(table, columns.categories).select(columns.features)
        if not self._keep_types and not (self._as_tables and _needs_no_copy(features)):
            features = to_matrix(features, columns.features)
        elif self._keep_types and self._kept is not None:
            features = _copied(features)
        several = bool(columns.other_labels)
        labels = to_matrix(table, columns.labels) if several else to_vector(table, columns.label, "float32")
        for name, values in zip(columns.labels, labels.reshape(len(labels), -1).T, strict=True):
            checks.check_finite(values, "label", name, rows, _WITHOUT_LABEL)
            if self._check_label:
                self._check_label(values, name, rows)
        weight = None
        if columns.weight is not None:
            weight = to_vector(table, columns.weight, "float32")
            checks.check_finite(weight, "weight", columns.weight, rows, _EVERY_ROW)
        margins = margins_of(table, columns.base_margin, "float64" if self._keep_types else "float32")
        if margins is not None:
            for name, values in zip(columns.base_margin, margins.reshape(len(margins), -1).T, strict=True):
                checks.check_finite(values, "base_margin", name, rows, _EVERY_ROW)
        batch = Batch(features, labels, weight, margins)
        if not columns.bounds:
            return batch
        lower, upper = (to_vector(table, name, "float32") for name in columns.bounds)
        checks.check_bounds(lower, upper, columns.bounds, rows)
        return replace(batch, lower=lower, upper=upper)


def margins_of(table: pa.Table, columns: tuple[str, ...], dtype: str) -> np.ndarray | None:
    """Return the margins of a table's rows: ``[rows]``, or ``[rows, outputs]`` if there are several columns of margins;
    None without such columns."""
    if not columns:
        return None
    return to_vector(table, columns[0], dtype) if len(columns) == 1 else to_matrix(table, columns, dtype)


def _copied(table: pa.Table) -> pa.Table:
    """Copy a table, because a table that is a part of a larger one, or of Ray's object store, would keep all of it in
    memory."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(stream.getvalue()).read_all()


def _needs_no_copy(table: pa.Table) -> bool:
    """Return whether XGBoost can read a table as it is: all columns are numbers, and none is a slice of an Arrow array,
    because XGBoost ignores where a slice begins."""
    types = pa.types
    return all(
        (types.is_integer(column.type) or types.is_float32(column.type) or types.is_float64(column.type))
        and all(chunk.offset == 0 for chunk in column.chunks)
        for column in table.columns
    )


class _GroupNumbers:
    """Callable that numbers the groups of rows in the successive tables of a shard; a group may continue in the next
    table.

    Args:
        column: Name of the group column.
    """

    def __init__(self, column: str) -> None:
        self._column = column
        self._last = -1
        self._before: pa.Scalar | None = None

    def __call__(self, table: pa.Table) -> np.ndarray:
        """Return the group number of each row of the next table, as an int64 array ``[rows]``."""
        values = table.column(self._column).combine_chunks()
        numbers = self._last + group_starts(values, self._before).cumsum()
        self._last, self._before = int(numbers[-1]), values[-1]
        return numbers


def in_whole_groups(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Move rows between batches, so that all rows of a group are in one batch; batches without groups are not
    changed."""
    held: Batch | None = None
    for batch in batches:
        if batch.group is None:
            yield batch
            continue
        whole = batch if held is None else held.then(batch)
        assert whole.group is not None
        last = int(whole.group.searchsorted(whole.group[-1]))
        held = whole[last:]
        if last:
            yield whole[:last]
    if held is not None:
        yield held


MAX_EVAL_ROWS = 1_000_000
"""Maximum number of rows of an eval set if every worker evaluates the whole eval set.

LightGBM does not combine the metrics of its workers, and XGBoost combines some metrics only approximately, such as an
AUC without groups. In these cases each worker gets all rows of an eval set, so that the metrics are exact and all
workers stop early at the same round. The maximum keeps the copies of an eval set small. XGBoost combines all other
metrics exactly, so an eval set of any size is then divided among its workers.
"""


def checked_data(
    request: TrainRequest, *, takes_categories: bool = True
) -> tuple[DataConnector, dict[str, DataConnector]]:
    """Open the training set and the eval sets, and check their columns, using only the Parquet files' footers.

    Args:
        request: The training.
        takes_categories: Whether the user can name categorical columns.

    Raises:
        DataError: A footer shows an error (the message names file, column and row group), or an eval set has too many
            rows.
    """
    from shoal.data.connector import DataConnector

    train = DataConnector.from_spec(request.dataset)
    check_columns(request, train, takes_categories=takes_categories)
    types = {name: train.schema().field(name).type for name in request.categorical_cols}
    _check_values(request, train.source)
    eval_sets = {}
    for name, spec in request.eval_set.items():
        connector = train if spec == request.dataset else DataConnector.from_spec(spec)
        if not loaded(request.framework).combines_metrics:
            refuse_long_eval_sets({name: connector}, f"the metrics of {request.framework}")
        eval_sets[name] = connector
        if connector is train:
            continue
        try:
            check_columns(request, connector, takes_categories=False, allow_all_null=True)
            checks.check_categories(connector.source, types)
            _check_values(request, connector.source)
        except DataError as exc:
            raise DataError(f'eval_set "{name}": {exc}') from exc
    return train, eval_sets


def check_columns(
    request: TrainRequest, dataset: DataConnector, *, takes_categories: bool = True, allow_all_null: bool = False
) -> None:
    """Check that a dataset has the columns that the training names, of types that can be trained on."""
    checks.validate_columns(
        dataset.source,
        request.input_cols,
        request.label_col,
        request.extra_cols,
        categorical_cols=request.categorical_cols,
        allow_all_null=allow_all_null,
        takes_categories=takes_categories,
    )
    if request.group_col is not None:
        checks.check_group(dataset.source, request.group_col)


def check_features(request: TrainRequest, schema: pa.Schema, source: ParquetSource) -> None:
    """Check, before the training and using only Parquet footers, that the model will be able to predict a dataset.

    Raises:
        DataError: A column is missing or of an unsuitable type, or a margin is null.
    """
    categorical = request.categorical_cols
    types = {name: schema.field(name).type for name in categorical if name in schema.names}
    check_predictable(source, request.input_cols, request.margin_cols, categorical, types)


def check_predictable(
    source: ParquetSource,
    input_cols: tuple[str, ...],
    margin_cols: tuple[str, ...],
    categorical_cols: tuple[str, ...],
    types: Mapping[str, pa.DataType],
) -> None:
    """Check, using only Parquet footers, that a model of these columns can predict a dataset.

    Args:
        source: Files of the dataset.
        input_cols: Names of the feature columns.
        margin_cols: Names of the columns of margins.
        categorical_cols: Names of the feature columns whose values are categories.
        types: Types of the categories, by column.

    Raises:
        DataError: A column is missing or of an unsuitable type, or a margin is null.
    """
    checks.validate_columns(
        source, input_cols, None, margin_cols, categorical_cols=categorical_cols, allow_all_null=True
    )
    checks.check_categories(source, types)
    for name in margin_cols:
        checks.check_no_nulls(source, name, "base_margin")


def _check_values(request: TrainRequest, source: ParquetSource) -> None:
    for label in dict.fromkeys((*request.columns.labels, *request.bound_cols)):
        checks.check_no_nulls(source, label)
    for margin in request.margin_cols:
        checks.check_no_nulls(source, margin, "base_margin")
    if request.weight_col is not None:
        checks.check_no_nulls(source, request.weight_col, "weight")
        checks.check_weight(source, request.weight_col)


def refuse_long_eval_sets(eval_sets: Mapping[str, DataConnector], metrics: str) -> None:
    """Raise DataError if an eval set has too many rows for every worker to evaluate the whole eval set.

    Raises:
        DataError: An eval set has too many rows.
    """
    for name, connector in eval_sets.items():
        if connector.num_rows() > MAX_EVAL_ROWS:
            raise DataError(
                f'eval_set "{name}" has {connector.num_rows():,} rows, but every worker evaluates the whole eval set '
                f"for {metrics}, so at most {MAX_EVAL_ROWS:,} rows are allowed: use a part of the eval set, for "
                "example with random_split, or with XGBoost a metric that is a mean over rows, such as logloss"
            )


def shard_datasets(
    train: DataConnector,
    eval_sets: Mapping[str, DataConnector],
    num_workers: int,
    seed: int,
    group_col: str | None,
    *,
    by_columns: bool = False,
    whole: bool = False,
) -> list[tuple[Part, dict[str, Part]]]:
    """Divide the training set and the eval sets among the workers.

    Args:
        train: Training set.
        eval_sets: Eval sets, by name.
        num_workers: Number of workers.
        seed: Seed of the random order of the rows.
        group_col: Column of groups, or None.
        by_columns: Whether each worker gets all rows of all datasets, because the workers divide the columns.
        whole: Whether each worker gets all rows of the eval sets.

    Raises:
        DataError: A dataset has too few rows or groups for the workers.
    """

    def all_rows(connector: DataConnector) -> list[Part]:
        return [Part(connector, connector.plan(1, seed, group_col)[0])] * num_workers

    mine = all_rows(train) if by_columns else [Part(train, shard) for shard in train.plan(num_workers, seed, group_col)]
    evals: list[dict[str, Part]] = [{} for _ in range(num_workers)]
    for name, connector in eval_sets.items():
        if connector is train and not whole:
            parts = mine
        elif whole or by_columns:
            parts = all_rows(connector)
        else:
            # If there are fewer rows (or groups) than workers, the last workers get an empty shard.
            most = connector.num_groups(group_col) if group_col else connector.num_rows()
            shards = connector.plan(min(num_workers, most), seed, group_col)
            parts = [Part(connector, shard) for shard in (*shards, *[Shard(())] * (num_workers - len(shards)))]
        for rank, part in enumerate(parts):
            evals[rank][name] = part
    return list(zip(mine, evals, strict=True))
