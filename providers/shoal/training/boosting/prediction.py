"""Predict rows with a booster (trained model) of XGBoost or LightGBM, one table at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.data.matrix import Categories, encoded
from shoal.errors import DataError
from shoal.training.boosting.rows import margins_of

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from shoal.data.connector import DataConnector
    from shoal.data.parquet.source import ParquetSource

Predict = Callable[["pa.Table", "np.ndarray | None"], "np.ndarray"]
"""Function that predicts a batch. Its arguments are the features (a table in the types of the dataset) and the margins
(float64 ``[rows]`` or ``[rows, outputs]``, or None); it returns predictions (``[rows]`` or ``[rows, classes]``)."""


@dataclass(frozen=True, slots=True)
class Output:
    """Form of the predictions of a model that is not trained yet, as its parameters determine it.

    Args:
        objective: Name of the objective, as an error names it.
        values: Number of values per row.
        classes: Number of classes; 2 if the objective has no number of classes.
        gives_classes: Whether the predictions are class numbers.
        is_unbounded: Whether the predictions are raw scores, counts or times, and so no probabilities.
    """

    objective: str
    values: int = 1
    classes: int = 2
    gives_classes: bool = False
    is_unbounded: bool = False


@dataclass(frozen=True)
class BoosterPredictor:
    """Predictor for the rows of tables and datasets, with one trained model (booster) of any boosting library.

    Args:
        predict: Function that predicts a batch.
        input_cols: Feature columns, in the order of the training.
        categories: Categories of the training set, by column; any other value counts as missing.
        base_margin_cols: Columns of margins, if the model was trained with them.
        code_cols: Categorical columns whose categories the model does not contain; their values are the integer codes
            of the training.
        classes: Classes of a classifier that another program trained, in the order of its probabilities; None if the
            model has none, or if they are 0, 1 and so on.
        gives_classes: Whether the predictions are numbers of classes and not probabilities, as with ``multi:softmax``.
    """

    predict: Predict
    input_cols: tuple[str, ...]
    categories: Categories
    base_margin_cols: tuple[str, ...] = ()
    code_cols: tuple[str, ...] = ()
    classes: tuple[Any, ...] | None = None
    gives_classes: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that a table for :meth:`predict_table` must contain; each name occurs once."""
        return tuple(dict.fromkeys((*self.input_cols, *self.base_margin_cols)))

    def check(self, source: ParquetSource) -> None:
        """Check, using only Parquet footers, that a dataset has all columns of the model, with suitable types.

        Raises:
            DataError: A column is missing, or is neither numeric nor categorical, or a margin is null.
        """
        import pyarrow as pa

        from shoal.data.checks import check_categories, check_codes, check_no_nulls, validate_columns

        # Categories that are floats come from other programs. Their columns are numeric columns.
        types = {name: values.type for name, values in self.categories.items() if values.type != pa.float64()}
        validate_columns(
            source,
            self.input_cols,
            extra_cols=self.base_margin_cols,
            categorical_cols=tuple(types),
            allow_all_null=True,
        )
        check_categories(source, types)
        check_codes(source, self.code_cols)
        for name in self.base_margin_cols:
            check_no_nulls(source, name, "base_margin")

    def predict_table(self, table: pa.Table) -> np.ndarray:
        """Return the model's predictions for the rows of a table: an array ``[rows]`` or ``[rows, classes]``.

        Raises:
            DataError: A margin is null, NaN or infinite; XGBoost would predict a class for it nevertheless.
        """
        import numpy as np

        margin = margins_of(table, self.base_margin_cols, "float64")
        for name, values in zip(self.base_margin_cols, () if margin is None else np.atleast_2d(margin.T), strict=True):
            if bad := int((~np.isfinite(values)).sum()):
                raise DataError(
                    f'the base_margin "{name}" is null, NaN or infinite in {bad} of {len(values)} rows: every row '
                    "needs a finite number, so correct these rows, or leave them out"
                )
        return self.predict(encoded(table, self.categories).select(self.input_cols), margin)

    def predict_dataset(self, connector: DataConnector) -> np.ndarray:
        """Return the predictions of a whole dataset, in row order.

        Raises:
            DataError: A column is missing, or is neither numeric nor categorical.
        """
        import numpy as np

        self.check(connector.source)
        return np.concatenate([self.predict_table(table) for table in connector.iter_batches(self.columns)])


def class_probabilities(predicted: np.ndarray) -> np.ndarray:
    """Return a classifier's probabilities in the form of a booster's: of class 1 only if there are two classes."""
    return predicted[:, 1] if predicted.ndim == 2 and predicted.shape[1] == 2 else predicted
