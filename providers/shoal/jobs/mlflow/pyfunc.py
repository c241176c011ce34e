"""Predict with models of any kind through pyfunc, MLflow's common interface to models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import DataError
from shoal.training.boosting.prediction import class_probabilities
from shoal.training.host.forks import ending_forks

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from shoal.data.parquet.source import ParquetSource


class PyfuncPredictor:
    """Predictor for the rows of tables with an ``mlflow.pyfunc.PyFuncModel``.

    A classifier of scikit-learn predicts probabilities if it can: of the second class ``[rows]`` if there are two
    classes, else of each class ``[rows, classes]``. Any other model predicts what its pyfunc returns.

    Args:
        model: The model.
        input_cols: Names of the input columns; used only if the model does not name its columns.

    Raises:
        DataError: Neither the model nor `input_cols` names the columns.
    """

    def __init__(self, model: Any, input_cols: Sequence[str] = ()) -> None:
        self._model = model
        self._classifier = _classifier(model)
        self.columns = features_of(model, input_cols)
        self.classes: tuple[Any, ...] | None = None
        if self._classifier is not None:
            self.classes = tuple(self._classifier.classes_.tolist())
        self.code_cols: tuple[str, ...] = ()
        self.gives_classes = None if self._classifier is None else False

    def check(self, source: ParquetSource) -> None:
        """Check that a dataset has the columns of the model; else raise a DataError."""
        if missing := sorted(set(self.columns) - set(source.schema().names)):
            raise DataError(
                f"the dataset lacks columns that the model needs: {', '.join(missing)}. Name a dataset with these "
                "columns"
            )

    def predict_table(self, table: pa.Table) -> np.ndarray:
        """Return the predictions for a table's rows: an array ``[rows]`` or ``[rows, outputs]``.

        Raises:
            DataError: The model cannot predict the rows, or its result is not one row per row of the table.
        """
        import numpy as np

        schema = self._model.metadata.get_input_schema()
        suited = _as_tensor if schema is not None and schema.is_tensor_spec() else _as_frame
        try:
            rows = suited(table.select(self.columns), schema)
            with ending_forks():
                if self._classifier is not None:
                    return class_probabilities(self._classifier.predict_proba(rows))
                predicted = np.asarray(self._model.predict(rows))
        except Exception as error:
            raise DataError(
                f"the model cannot predict these rows: {str(error).rstrip('.')}. "
                "Compare the columns with the model's signature in MLflow"
            ) from error
        if predicted.ndim not in (1, 2) or len(predicted) != table.num_rows:
            raise DataError(
                f"the model returned an array of shape {list(predicted.shape)} for {table.num_rows} rows, but must "
                "return one prediction, or one row of predictions, per row: correct the model"
            )
        return predicted


def features_of(model: Any, input_cols: Sequence[str]) -> list[str]:
    """Return the names of a model's input columns, in the model's order.

    Raises:
        DataError: Neither the model nor `input_cols` names the columns.
    """
    schema = model.metadata.get_input_schema()
    if schema is not None and not schema.is_tensor_spec() and schema.has_input_names():
        return [str(name) for name in schema.input_names()]
    if schema is None and (fitted := getattr(_raw(model), "feature_names_in_", None)) is not None:
        return [str(name) for name in fitted]
    if schema is not None and len(schema.inputs) != 1:
        raise DataError(
            "the model has a signature with several tensors, so its input is not known: log the model with "
            "signature=mlflow.models.infer_signature(inputs, predictions)"
        )
    if not input_cols:
        lacking = "has no signature" if schema is None else "has a signature that names no columns"
        raise DataError(
            f"the model {lacking}: log the model with a signature of named columns, or list the model's input columns, "
            "in the model's order, in register.input_cols of a training function, or in input_cols of a prediction's "
            "spec"
        )
    return list(input_cols)


def _raw(model: Any) -> Any:
    """Return the estimator of a model that MLflow has saved as one of scikit-learn; None for any other model."""
    return model.get_raw_model() if "sklearn" in model.metadata.flavors else None


def _classifier(model: Any) -> Any:
    """Return the classifier of scikit-learn whose probabilities are the predictions; None for any other model.

    The model's program may have chosen another function of the classifier in MLflow (`pyfunc_predict_fn`). A classifier
    with several labels per row has one array of probabilities per label, so its classes are predicted.
    """
    raw = _raw(model)
    chosen = model.metadata.flavors["python_function"].get("predict_fn", "predict")
    if raw is None or chosen != "predict" or not hasattr(raw, "predict_proba"):
        return None
    from sklearn.base import is_classifier

    return raw if is_classifier(raw) and not isinstance(raw.classes_, list) else None


def _as_frame(table: pa.Table, schema: Any) -> Any:
    frame = table.to_pandas()
    if schema is None:
        return frame
    # The columns are converted to the signature's types, because MLflow refuses float64 values for a float32 column.
    return frame.astype(dict(zip(table.column_names, schema.pandas_types(), strict=True)))


def _as_tensor(table: pa.Table, schema: Any) -> np.ndarray:
    from shoal.data.matrix import to_matrix

    [tensor] = schema.inputs
    if tensor.type.kind in "iu" and (nulls := [name for name in table.column_names if table[name].null_count]):
        raise DataError(f'column "{nulls[0]}" has nulls, but the model takes a tensor of {tensor.type}')
    return to_matrix(table, table.column_names, tensor.type).reshape(len(table), *tensor.shape[1:])
