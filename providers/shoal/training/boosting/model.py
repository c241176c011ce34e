"""Predict rows with a trained model of a boosting library, and check a model from which a training continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.data.checks import check_categories
from shoal.data.numpy_columns import Categories, as_categories, encoded
from shoal.errors import DataError, InvalidArgumentError
from shoal.training.boosting.messages import Checkpoint
from shoal.training.boosting.rows import margins_of
from shoal.training.reporting import say

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from shoal.data.connector import DataConnector
    from shoal.data.parquet.source import ParquetSource
    from shoal.training.boosting.request import TrainRequest


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


_NAMED = 5
"""Number of new categories of a column that a message lists; the others are only counted."""


@dataclass(frozen=True)
class InitModel:
    """Model from which a training continues.

    Args:
        content: The model, as the library's workers load it.
        rounds: Number of boosting rounds in the model.
        features: Names of the feature columns, in the model's order; empty if the model has no names.
        num_features: Number of feature columns.
        categories: Categories of each categorical column; the code of a category is its index.
        code_cols: Categorical columns whose categories the model does not contain, and whose codes are thus not known.
        objective: Objective, as the library describes it; empty if LightGBM's objective was a function.
        outputs: Number of raw scores per row.
        booster: Kind of the booster, such as "gbtree".
        missing: Value of the features that the model stores as missing; None: it stores none.
    """

    content: bytes
    rounds: int
    features: tuple[str, ...]
    num_features: int
    categories: Categories
    code_cols: tuple[str, ...]
    objective: str
    outputs: int
    booster: str
    missing: float | None = None

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint from which the workers start."""
        return Checkpoint(model=self.content, init_rounds=self.rounds)

    def check(self, request: TrainRequest, source: ParquetSource) -> None:
        """Check that the training has the features and the kinds of categories of this model.

        Raises:
            InvalidArgumentError: The features, the categorical columns or the value that counts as missing differ.
            DataError: The categories of a column are of another type in the training set.
        """
        named = list(request.input_cols)
        if len(named) != self.num_features or (self.features and named != list(self.features)):
            theirs = _listed(self.features) if self.features else f"{self.num_features} columns without names"
            raise InvalidArgumentError(
                f"init_model has other features than the training: the model has {theirs}, and input_cols are "
                f"{_listed(named)}. Set input_cols to the model's features, in the model's order"
            )
        if self.missing is not None and request.missing != self.missing:
            raise InvalidArgumentError(
                f"init_model was trained with missing={self.missing:g}, and this training has missing="
                f"{request.missing}: set missing={self.missing:g}"
            )
        if self.missing is None and request.missing is not None:
            say(
                f"init_model does not say which value counts as missing: if it was trained without "
                f"missing={request.missing:g}, its trees treat this value in another way than before"
            )
        if self.code_cols:
            raise InvalidArgumentError(
                f"init_model does not contain the categories of its categorical columns {_listed(self.code_cols)}, so "
                "their codes are not known: continue from a model that was trained with categorical_cols"
            )
        if set(request.categorical_cols) != set(self.categories):
            raise InvalidArgumentError(
                f"init_model has other categorical columns than the training: the model has {_listed(self.categories)},"
                f" and categorical_cols are {_listed(request.categorical_cols)}. Set categorical_cols to those of the "
                "model"
            )
        check_categories(source, {name: values.type for name, values in self.categories.items()})

    def check_learner(self, objective: str, outputs: int, booster: str) -> None:
        """Check that the training has the objective, the number of outputs and the kind of booster of this model.

        Raises:
            InvalidArgumentError: One of them differs.
        """
        for what, mine, asked in (
            ("objective", self.objective or "function", objective or "function"),
            ("number of outputs per row", self.outputs, outputs),
            ("booster", self.booster, booster),
        ):
            if mine != asked:
                raise InvalidArgumentError(
                    f"init_model was trained with another {what} than this training uses: {mine} and {asked}. Set the "
                    "parameters of the model, or train without init_model"
                )

    def categories_for(self, found: Categories) -> dict[str, pa.Array]:
        """Return this model's categories, because its trees contain their codes, and report new ones."""
        import pyarrow.compute as pc

        for name, values in found.items():
            known = self.categories[name]
            is_known = pc.is_in(as_categories(values, known.type), value_set=known)
            new = values.filter(pc.invert(is_known)).to_pylist()
            if new:
                say(
                    f'column "{name}" has {len(new)} categories that init_model does not know, which count as missing '
                    f"values: {_listed(map(str, new[:_NAMED]))}{', ...' * (len(new) > _NAMED)}"
                )
        return {name: self.categories[name] for name in found}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
