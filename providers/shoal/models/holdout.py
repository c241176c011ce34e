"""Read and check the holdout, the rows on which models are compared, and evaluate models on it.

The check comes before the training, so that a wrong holdout does not cost hours of training.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shoal.data.connector import DataConnector
from shoal.data.numpy_columns import to_vector
from shoal.data.parquet.source import ParquetSource
from shoal.errors import DataError
from shoal.jobs.register import Register
from shoal.kinds.partitions.logged_model import PartitionedModel
from shoal.lazy_imports import np, pa
from shoal.models import training_record
from shoal.models.decision import Baseline, CommonKeys, Evaluation, Predictions, Slice, UnseenRows
from shoal.models.loading import Predictor
from shoal.models.metrics import BaselineKind, best_constant, check_predictions, constant, metric_value, takes_classes
from shoal.models.training_record import Overlap, TrainingRows

if TYPE_CHECKING:
    from numpy.typing import NDArray


_MOST_SLICES = 1_000
"""Largest number of slices. With a column of ids or times in `by`, the report could have a million lines."""

_NAMED_FILES = 3
"""Number of files that an error message lists; the other files are only counted."""


@dataclass(frozen=True)
class Holdout:
    """Labels, groups and slices of the holdout; the features are read later, for each model.

    Attributes:
        connector: Dataset with the holdout's rows.
        labels: Labels, float64 ``[rows]``.
        groups: Number of the group of each row, ``[rows]``; None if no metric is a ranking metric.
        slices: Positions of the rows of each slice, by the slice's value in the column `by`; empty if the rules name no
            `by`.
        time_col: Name of the time column. None: the only time column in the dataset's filters.
    """

    connector: DataConnector
    labels: NDArray[np.floating]
    groups: NDArray[np.intp] | None
    slices: Mapping[str, NDArray[np.intp]]
    time_col: str | None = None

    @classmethod
    def read(cls, register: Register, label_col: str, group_col: str | None = None) -> Holdout:
        """Read the labels, groups and slices of the holdout that `register` names.

        Raises:
            DataError: The holdout does not exist, has no rows, lacks a column, or has a null label.
        """

        connector: DataConnector = DataConnector.from_spec(register.holdout)
        group_col = group_col if register.ranks else None
        columns = list(dict.fromkeys(name for name in (label_col, group_col, register.by) if name is not None))
        check_columns(connector, columns)
        if not (tables := list(connector.iter_batches(columns))):
            raise DataError("the holdout has no rows: set register.holdout to a dataset that has rows")
        table = pa.concat_tables(tables, promote_options="permissive")
        try:
            labels = to_vector(table, label_col)
        except (pa.ArrowException, ValueError) as error:
            type_ = table.schema.field(label_col).type
            raise DataError(
                f'the holdout\'s label column "{label_col}" must be numeric, but is {type_}: convert it to numbers'
            ) from error
        _check_labels(connector, labels, label_col)

        def codes(column: str) -> tuple[NDArray[np.intp], list[object]]:
            values = table.column(column)
            if pa.types.is_dictionary(values.type):
                values = values.cast(values.type.value_type)
            encoded = values.dictionary_encode(null_encoding="encode").combine_chunks()
            return encoded.indices.to_numpy().astype(np.intp), encoded.dictionary.to_pylist()

        groups = None if group_col is None else codes(group_col)[0]
        slices: dict[str, NDArray[np.intp]] = {}
        if register.by is not None:
            numbers, values = codes(register.by)
            if len(values) > _MOST_SLICES:
                raise DataError(
                    f'register.by names column "{register.by}", which has {len(values)} different values in the '
                    f"holdout: name a column with at most {_MOST_SLICES} different values"
                )
            order = np.argsort(numbers, kind="stable")
            parts = np.split(order, np.cumsum(np.bincount(numbers, minlength=len(values)))[:-1])
            null = "null"
            while null in {str(value) for value in values if value is not None}:
                null = f"({null})"
            names = [null if value is None else str(value) for value in values]
            slices = {name: parts[index] for name, index in sorted((name, index) for index, name in enumerate(names))}
        return cls(connector, labels, groups, slices, register.holdout.time_col)

    def baseline(self, register: Register) -> Baseline | None:
        """Compute the baseline: the metric that a constant prediction reaches on the holdout.

        The constant is computed from the holdout's own labels, so that no other constant of the same kind does better
        on these rows. A model that beats the baseline has therefore learned something from its features.

        Returns:
            The baseline; None if the rules in `register` ask for none.
        """
        if register.baseline is None:
            return None
        kind = best_constant(register.metric) if register.baseline == "auto" else register.baseline
        return Baseline(kind, self.of_constant(kind, register.metric))

    def part(self, rows: NDArray[np.bool_]) -> Holdout:
        """Return a holdout with the labels, groups and slices of some rows only. Its connector still has all rows."""
        positions = np.cumsum(rows) - 1
        slices = {name: positions[each[rows[each]]] for name, each in self.slices.items()}
        return replace(
            self,
            labels=self.labels[rows],
            groups=None if self.groups is None else self.groups[rows],
            slices={name: each for name, each in slices.items() if len(each)},
        )

    def of_constant(self, kind: BaselineKind, metric: str) -> float:
        """Compute the value of a metric for a constant prediction."""
        predictions = constant(kind, metric, self.labels)
        return metric_value(metric, self.labels, predictions, self.groups)


def _check_labels(holdout: DataConnector, labels: NDArray[np.floating], label_col: str) -> None:
    """Check that every row of the holdout has a label.

    Raises:
        DataError: A label is null or NaN. The message names the file, the row group and the number of such rows.
    """
    nulls = np.isnan(labels)
    if not nulls.any():
        return
    start = 0
    for part in holdout.source.ranges():
        count, start = int(nulls[start : start + part.rows].sum()), start + part.rows
        if count:
            raise DataError(
                f'{part.path}, row group {part.row_group}: the label "{label_col}" of the holdout is null in {count} '
                f"of {part.rows} rows: leave these rows out, or give each of them a label"
            )


def check_columns(holdout: DataConnector, columns: Iterable[str]) -> None:
    """Check that the holdout has all of the given columns.

    Raises:
        DataError: At least one column is missing; the message names the missing columns.
    """
    if missing := sorted(set(columns) - set(holdout.schema().names)):
        raise DataError(
            f"the holdout lacks columns that the model needs: {', '.join(missing)}. Name a dataset with these columns "
            "in register.holdout"
        )


def check_holdout(
    register: Register,
    label_col: str,
    input_cols: Sequence[str],
    *,
    group_col: str | None = None,
    trained_on: TrainingRows | None = None,
    selected_on: TrainingRows | None = None,
    check: Callable[[ParquetSource], None] | None = None,
) -> str:
    """Check, before the training, that the holdout's rows, columns, labels and groups allow a comparison of models.

    Raises:
        DataError: The holdout does not exist, has no rows, lacks a column, or has labels that do not suit a metric. Or
            `overlap` is "refuse", and the model will be trained on rows of the holdout or on rows from the same period,
            or a search will choose its parameters on such rows (`selected_on`).
    """
    holdout = Holdout.read(register, label_col, group_col)
    check_columns(holdout.connector, input_cols)
    if check is not None:
        try:
            check(holdout.connector.source)
        except DataError as error:
            raise DataError(f"register.holdout: {error}") from error
    # Constant predictions show whether the labels and groups suit every metric.
    holdout.baseline(register)
    for metric in register.all_metrics:
        holdout.of_constant(best_constant(metric), metric)
    # A promotion needs the digest of the holdout. If the holdout has filters, the digest is computed from all its rows,
    # so unreadable rows are found here, before the training.
    digest = holdout.connector.digest()
    for rows, *use in (
        (trained_on, "the model is trained on", "training rows", "training"),
        (selected_on, "the search chooses the parameters on", "holdout of the search", "the search"),
    ):
        overlap = training_record.compare(rows or TrainingRows(), holdout.connector, holdout.time_col)
        if overlap and register.overlap == "refuse":
            raise DataError(_refusal(overlap, *use))
    return digest


def _refusal(overlap: Overlap, use: str, used: str, place: str) -> str:
    """Return the error message for a holdout that contains rows that were used before, or rows from the same period:
    for which use, the name of these rows, and where they were used."""
    if overlap.files:
        named = ", ".join(
            f"{each.rows} rows of {each.path}"
            + ("" if each.recorded == each.path else f" (in {place}: {each.recorded})")
            for each in overlap.files[:_NAMED_FILES]
        )
        others = len(overlap.files) - _NAMED_FILES
        more = f" and {others} other files" if others > 0 else ""
        return (
            f"the holdout has rows that {use}, so the model's metric would be better than on new rows: "
            f"{named}{more}. Name a holdout without these rows, or set "
            'register.overlap="flag" to compare the models nevertheless'
        )
    training, held_out = overlap.training, overlap.holdout
    assert training is not None and held_out is not None
    return (
        f"the holdout has rows from the same period as the {used}, so they may be rows that {use}: "
        f"{training.column} is {training.first} to {training.last} in the {used}, and {held_out.first} to "
        f"{held_out.last} in the holdout. Choose a holdout that begins after the {used} or ends before them, or "
        'set register.overlap="flag" to compare the models nevertheless'
    )


_TRIED_ROWS = 1_000
"""Rows that a trial predicts. One row would not show whether 1.0 is a class or a probability."""

_NAMED_CLASSES = 5
"""Number of classes that an error message lists."""

_LARGEST_CLASS = 10_000
"""Largest number of a class. The predictions get one column per class number up to the largest."""


def try_out(model: Predictor, holdout: DataConnector, metric: str) -> None:
    """Check, with the first rows of the holdout, that a model can predict them and that the metric can be computed.

    Raises:
        DataError: The holdout lacks a column that the model needs, or the predictions do not suit the metric.
    """
    _check(model, holdout)
    for table in holdout.iter_batches(list(model.columns)):
        if table.num_rows:
            tried = table.slice(0, _TRIED_ROWS)
            predicted = _predicted(model, tried)
            if isinstance(model, PartitionedModel):
                predicted = predicted[~model.unknown(tried)[0]]
            if len(predicted):
                check_predictions(metric, predicted, gives_classes=model.gives_classes)
                return


def evaluate(
    model: Predictor,
    holdout: Holdout,
    names: Sequence[str],
    *,
    overlap: Overlap | None = None,
) -> Evaluation:
    """Compute the metrics of a model on the holdout.

    Raises:
        DataError: The holdout lacks a column that the model needs, or the predictions do not suit the metric
            that decides.
    """
    predictions = _predict(model, holdout.connector)
    if predictions.unknown is None:
        evaluation = replace(_measure(predictions, holdout, names), predictions=predictions)
    else:
        evaluation = on_rows(predictions, holdout, names, ~predictions.unknown)
    if overlap is None:
        return evaluation
    period = None if overlap.training is None else str(overlap.training)
    return replace(evaluation, overlap=overlap.rows, period=period)


def on_rows(
    predictions: Predictions, holdout: Holdout, names: Sequence[str], rows: NDArray[np.bool_], *, defined: bool = False
) -> Evaluation:
    """Compute the metrics of predictions on some rows of the holdout. They are NaN if they are not defined there.

    Raises:
        DataError: The metric that decides is `defined` on these rows, but not for these predictions.
    """
    try:
        if not rows.any():
            raise DataError("there are no rows")
        return replace(_measure(predictions, holdout.part(rows), names, rows), predictions=predictions)
    except DataError:
        if defined:
            raise
        return Evaluation(float("nan"), dict.fromkeys(names, float("nan")), predictions=predictions)


def on_unseen_rows(
    challenger: Predictions,
    champion: Predictions,
    holdout: Holdout,
    names: Sequence[str],
    seen: NDArray[np.bool_],
    known: NDArray[np.bool_] | None,
) -> UnseenRows:
    """Compute the metrics of challenger and champion on the rows of the holdout that neither was trained on, and whose
    keys both know (None: all)."""
    if holdout.groups is not None:
        seen = np.bincount(holdout.groups, weights=seen)[holdout.groups] > 0
    rows = ~seen if known is None else ~seen & known
    both = (on_rows(each, holdout, names, rows) for each in (challenger, champion))
    return UnseenRows(int(rows.sum()), len(seen) if known is None else int(known.sum()), *both)


def on_common_keys(
    challenger: Predictions, champion: Predictions, holdout: Holdout, names: Sequence[str]
) -> tuple[NDArray[np.bool_], CommonKeys] | None:
    """Return the rows of the holdout whose keys both models know, with the challenger's metrics on them; None if both
    know the keys of all rows."""
    unknown = [each.unknown for each in (challenger, champion) if each.unknown is not None]
    if not unknown:
        return None
    rows = ~functools.reduce(operator.or_, unknown)
    others = {**challenger.unknown_keys, **champion.unknown_keys}
    return rows, CommonKeys(int(rows.sum()), len(rows), on_rows(challenger, holdout, names, rows), others)


def _measure(
    predictions: Predictions, holdout: Holdout, names: Sequence[str], rows: NDArray[np.bool_] | None = None
) -> Evaluation:
    """Compute the metrics of predictions; see :func:`evaluate`."""
    predicted = predictions.values if rows is None else predictions.values[rows]
    every = predictions.values if predictions.unknown is None else predictions.values[~predictions.unknown]

    def value(name: str, part: Any = slice(None)) -> float:
        # All predictions show whether they are classes or probabilities; a few of them may not.
        is_class = takes_classes(name, every, predictions.gives_classes)
        groups = None if holdout.groups is None else holdout.groups[part]
        return metric_value(name, holdout.labels[part], predicted[part], groups, gives_classes=is_class)

    values = {}
    for name in names:
        try:
            values[name] = value(name)
        except DataError as error:
            if name == names[0]:
                raise
            print(f"{name} is NaN: {error}", flush=True)
            values[name] = float("nan")
    slices = {}
    for name, part in holdout.slices.items():
        try:
            measured = value(names[0], part)
        except DataError:  # the metric is not defined on this slice; the AUC, for example, needs rows of both classes
            measured = float("nan")
        slices[name] = Slice(len(part), measured)
    return Evaluation(values[names[0]], values, slices)


def _predict(model: Predictor, holdout: DataConnector) -> Predictions:
    """Return a model's predictions for all rows of the holdout, in the order of the rows."""
    _check(model, holdout)
    parts, unknown, keys = [], [], Counter[str]()
    for table in holdout.iter_batches(list(model.columns)):
        if table.num_rows:
            parts.append(_predicted(model, table))
            if isinstance(model, PartitionedModel):
                lacks, named = model.unknown(table)
                unknown.append(lacks)
                keys.update(named)
    values = np.concatenate(parts) if parts else np.empty(0)
    return Predictions(values, model.gives_classes, np.concatenate(unknown) if keys else None, keys)


def _check(model: Predictor, holdout: DataConnector) -> None:
    check_columns(holdout, model.columns)
    model.check(holdout.source)


def _predicted(model: Predictor, table: pa.Table) -> np.ndarray:
    """Return the predictions for the rows of a table, with one column per class number if they are probabilities of
    classes that are not 0, 1 and so on."""
    predicted = model.predict_table(table)
    classes = model.classes
    if classes is None or list(classes) == list(range(len(classes))):
        return predicted
    if not all(isinstance(each, int | float) and each == int(each) and 0 <= each <= _LARGEST_CLASS for each in classes):
        named = ", ".join(repr(each) for each in classes[:_NAMED_CLASSES])
        raise DataError(
            f"the model's classes are {named}{', ...' if len(classes) > _NAMED_CLASSES else ''}, but the holdout's "
            "labels are class numbers 0, 1 and so on: use a model that was trained on class numbers"
        )
    if predicted.ndim == 1:
        predicted = np.column_stack([1 - predicted, predicted])
    columns = np.zeros((len(predicted), int(max(classes)) + 1))
    columns[:, [int(each) for each in classes]] = predicted
    return columns
