"""Predict the rows of partitions with the models of their keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.data.output_tables import with_predictions
from shoal.errors import DataError, InvalidArgumentError
from shoal.kinds.partitions.keys import Key, check_same_kinds, shown_key, some_keys
from shoal.kinds.partitions.partition_messages import ModelBytes, PartitionFunction, rows_bytes
from shoal.kinds.partitions.partition_results import PartitionResults
from shoal.lazy_imports import np, pa, pd
from shoal.training.boosting.library import owner_of
from shoal.training.host.imports import import_lean
from shoal.training.reporting import say


def predicted_by(model: Any, rows: pd.DataFrame, input_cols: tuple[str, ...]) -> np.ndarray:
    """Return the predictions of a model for rows.

    Raises:
        DataError: The rows lack a column of the model, or the model has not returned one prediction per row.
        InvalidArgumentError: The model has no method ``predict``, or its columns are not known.
    """
    owner = owner_of(model)
    library = owner if owner is not None and owner.is_booster(model) else None
    found = getattr(model, "feature_names_in_", ()) if library is None else library.columns_of(model)
    names = [str(name) for name in found] or list(input_cols)
    if missing := [name for name in names if name not in rows]:
        raise DataError(f"the rows lack columns of the model: {', '.join(missing)}")
    used = rows[names] if names else rows
    if library is not None:
        return one_per_row(library.predict_rows(model, used), rows)
    if not hasattr(model, "predict"):
        raise InvalidArgumentError(
            f"the model is a {type(model).__name__} and has no method predict: pass predict_fn, a function of the "
            "model, the rows and the key"
        )
    return one_per_row(model.predict(used), rows)


def one_per_row(predicted: Any, rows: pd.DataFrame) -> np.ndarray:
    """Return predictions as an array, ``[rows, ...]``.

    Raises:
        DataError: There is not one prediction per row.
    """
    values = np.asarray(predicted)
    if values.ndim == 0 or len(values) != len(rows):
        raise DataError(
            f"the model returned an array of shape {list(values.shape)} for {len(rows)} rows, but must return one "
            "prediction, or one row of predictions, per row: correct the model"
        )
    return values


def report_unknown(rows_of: Mapping[str, int], rows: int) -> None:
    """Print how many rows have a null prediction because their key has no model, and some of these keys.

    Args:
        rows_of: Number of rows of each key without a model, as text.
        rows: Number of all rows.

    Raises:
        DataError: No row has a model.
    """
    if not rows_of:
        return
    number, some = sum(rows_of.values()), some_keys(rows_of)
    if number == rows:
        raise DataError(
            f"none of the {rows:,} rows has a key with a model; their keys are {some}: name the column of the keys in "
            "by, and the models of these keys"
        )
    say(f"{number:,} of {rows:,} rows have null predictions, because these keys have no model: {some}")


def without_model(models: PartitionResults, key: Key) -> str:
    """Show a key that has no model, with the cause if its training has failed."""
    found = models.get(key)
    return shown_key(key) + ("" if found is None else f", because its training has failed: {found.error}")


@dataclass(eq=False, repr=False)
class PartitionPrediction(PartitionFunction):
    """Function that predicts the rows of a partition with the model of their key.

    Args:
        manifest: Path or URI of the manifest of the models.
        digest: SHA-256 of the manifest.
        input_cols: Feature columns of models that do not name their columns.
        keep_cols: Columns that are returned beside the predictions.
        prediction_col: Name of the column of the predictions.
        missing: ``null`` predicts nulls for keys without a model, ``refuse`` lets these partitions fail.
        predict_fn: Function of the model, the rows and the key that predicts; None: the model's method ``predict``.
    """

    manifest: str
    digest: str
    _: KW_ONLY
    input_cols: tuple[str, ...]
    keep_cols: tuple[str, ...] | None
    prediction_col: str
    missing: Literal["refuse", "null"]
    predict_fn: Callable[..., Any] | None
    _models: PartitionResults | None = field(default=None, init=False)

    def prepare(self, keys: pa.DataType, by: Sequence[str]) -> None:
        """Read the manifest, import the libraries of the models, and check that their keys are of the same kind."""
        self._keys, self._by = keys, tuple(by)
        self._models = PartitionResults(self.manifest, self.digest)
        libraries = {each.kind for each in self._models} & BOOSTING_LIBRARIES.keys()
        import_lean(sorted(libraries), complete=self.predict_fn is not None)
        check_same_kinds(keys, self._models.key_type, by)

    def __call__(self, table: pa.Table, key: Key) -> ModelBytes:
        """Predict the rows of a partition, and return them with their predictions.

        A partition whose key has no model has no column of predictions, because their number is not known.

        Raises:
            DataError: The key has no model, or may be a rounded one; or the rows lack a column.
        """
        kept = table if self.keep_cols is None else table.select(list(self.keep_cols))
        predicted = self._predicted(table.to_pandas(), key)
        return rows_bytes(kept if predicted is None else with_predictions(kept, predicted, self.prediction_col))

    def _predicted(self, rows: pd.DataFrame, key: Key) -> np.ndarray | None:
        assert self._models is not None
        check_same_kinds(self._keys, self._models.key_type, self._by, [key])
        if not self._models.predicts(key):
            if self.missing == "null":
                return None
            raise DataError(f"this key has no model: {without_model(self._models, key)}")
        model = self._models[key].value
        if self.predict_fn is not None:
            return one_per_row(self.predict_fn(model, rows, key), rows)
        return predicted_by(model, rows, self.input_cols)
