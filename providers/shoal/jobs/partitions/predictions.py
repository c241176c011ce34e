"""Predict the rows of partitions with the models of their keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from shoal.errors import DataError, InvalidArgumentError
from shoal.jobs.partitions.keys import Key, shown_key
from shoal.jobs.partitions.messages import ModelBytes
from shoal.jobs.partitions.models import rows_bytes
from shoal.jobs.partitions.results import PartitionResults
from shoal.training.host.imports import import_lean

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


def predicted_by(model: Any, rows: pd.DataFrame, input_cols: tuple[str, ...]) -> np.ndarray:
    """Return the predictions of a model for rows.

    Raises:
        DataError: The rows lack a column of the model.
        InvalidArgumentError: The model has no method ``predict``, or its columns are not known.
    """
    kind = type(model).__module__.partition(".")[0] if type(model).__name__ == "Booster" else ""
    names = _features(model, kind) or list(input_cols)
    if missing := [name for name in names if name not in rows]:
        raise DataError(f"the rows lack columns of the model: {', '.join(missing)}")
    if kind == "xgboost":
        import xgboost

        best = model.attr("best_iteration")
        matrix = xgboost.DMatrix(rows[names], nthread=1)
        predicted: np.ndarray = model.predict(matrix, iteration_range=(0, 0 if best is None else int(best) + 1))
        return predicted
    if not hasattr(model, "predict"):
        raise InvalidArgumentError(
            f"the model is a {type(model).__name__} and has no method predict: pass predict_fn, a function of the "
            "model, the rows and the key"
        )
    options = {"num_threads": 1} if kind == "lightgbm" else {}
    found: np.ndarray = model.predict(rows[names] if names else rows, **options)
    return found


def _features(model: Any, kind: str) -> list[str]:
    """Return the names of a model's columns; empty if the model has none."""
    if kind == "xgboost":
        return list(model.feature_names or ())
    if kind == "lightgbm":
        return list(model.feature_name())
    return [str(name) for name in getattr(model, "feature_names_in_", ())]


NO_MODEL = "this key has no model"
"""Beginning of the error of a partition without a model."""


class PartitionPrediction:
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

    def __init__(
        self,
        manifest: str,
        digest: str,
        *,
        input_cols: tuple[str, ...],
        keep_cols: tuple[str, ...] | None,
        prediction_col: str,
        missing: Literal["refuse", "null"],
        predict_fn: Callable[..., Any] | None,
    ) -> None:
        self._manifest = manifest
        self._digest = digest
        self._input_cols = input_cols
        self._keep_cols = keep_cols
        self._prediction_col = prediction_col
        self._missing = missing
        self._predict_fn = predict_fn
        self._models: PartitionResults | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_models": None}

    def import_library(self) -> None:
        """Read the manifest, and import the libraries of the models, so that forked processes share both."""
        self._models = PartitionResults(self._manifest, self._digest)
        libraries = {each.kind for each in self._models} & {"xgboost", "lightgbm"}
        import_lean(sorted(libraries), complete=self._predict_fn is not None)

    def __call__(self, rows: pd.DataFrame, key: Key) -> ModelBytes:
        """Predict the rows of a partition.

        Raises:
            DataError: The key has no model, or the rows lack a column.
        """
        import numpy as np

        kept = rows if self._keep_cols is None else rows[list(self._keep_cols)]
        predicted = self._predicted(rows, key)
        if predicted is None:
            return rows_bytes(kept.assign(**{self._prediction_col: np.full(len(rows), np.nan)}))
        if len(predicted) != len(rows):
            raise DataError(
                f"the model returned {len(predicted)} predictions for {len(rows)} rows, but must return one per row"
            )
        flat = np.asarray(predicted).reshape(len(rows), -1)
        several = flat.shape[1] > 1
        names = [f"{self._prediction_col}_{i}" if several else self._prediction_col for i in range(flat.shape[1])]
        return rows_bytes(kept.assign(**dict(zip(names, flat.T, strict=True))))

    def _predicted(self, rows: pd.DataFrame, key: Key) -> Any:
        if self._models is None:
            self._models = PartitionResults(self._manifest, self._digest)
        found = self._models.get(key)
        if found is None or found.status != "succeeded":
            if self._missing == "null":
                return None
            why = "" if found is None else f", because its training has failed: {found.error}"
            raise DataError(f"{NO_MODEL}: {shown_key(key)}{why}")
        model = found.value
        if self._predict_fn is not None:
            return self._predict_fn(model, rows, key)
        return predicted_by(model, rows, self._input_cols)
