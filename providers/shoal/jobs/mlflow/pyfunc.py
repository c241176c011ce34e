"""Predict with models of any kind through pyfunc, MLflow's common interface to models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from shoal.data.connector import DataConnector


def features_of(model: Any, input_cols: Sequence[str]) -> list[str]:
    """Return the names of a model's input columns, in the model's order.

    Args:
        model: An ``mlflow.pyfunc.PyFuncModel``.
        input_cols: Names of the input columns; used only if the model's signature is a tensor, which has no names.

    Raises:
        DataError: Neither the signature nor `input_cols` names the columns.
    """
    schema = model.metadata.get_input_schema()
    if schema is not None and not schema.is_tensor_spec() and schema.has_input_names():
        return [str(name) for name in schema.input_names()]
    if schema is not None and not input_cols:
        raise DataError(
            "the model's signature names no columns: list the model's input columns, in the model's order, in "
            "register.input_cols, or in input_cols of a prediction's spec"
        )
    if schema is None or len(schema.inputs) != 1:
        raise DataError(
            "the model has no signature with named columns or with exactly one tensor, so its input is not known: log "
            "the model with signature=mlflow.models.infer_signature(inputs, predictions)"
        )
    return list(input_cols)


def predict(model: Any, connector: DataConnector, columns: Sequence[str]) -> np.ndarray:
    """Predict every row of a dataset.

    Args:
        model: An ``mlflow.pyfunc.PyFuncModel`` with a signature.
        connector: The dataset.
        columns: Input columns of the model, in the model's order.

    Returns:
        Predictions ``[rows]`` or ``[rows, outputs]``, in row order.

    Raises:
        DataError: The model cannot predict the rows.
    """
    import numpy as np

    parts = [predict_table(model, table, columns) for table in connector.iter_batches(columns)]
    return np.concatenate(parts) if parts else np.empty(0)


def predict_table(model: Any, table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """Predict the rows of a table; see :func:`predict` for the arguments.

    Raises:
        DataError: The model cannot predict the rows.
    """
    import numpy as np

    schema = model.metadata.get_input_schema()
    suited = _as_tensor if schema.is_tensor_spec() else _as_frame
    try:
        return np.asarray(model.predict(suited(table.select(columns), schema)))
    except Exception as error:
        raise DataError(
            f"the model cannot predict these rows: {str(error).rstrip('.')}. "
            "Compare the columns with the model's signature in MLflow"
        ) from error


def _as_frame(table: pa.Table, schema: Any) -> Any:
    # The columns are converted to the signature's types, because MLflow refuses float64 values for a float32 column.
    return table.to_pandas().astype(dict(zip(table.column_names, schema.pandas_types(), strict=True)))


def _as_tensor(table: pa.Table, schema: Any) -> np.ndarray:
    from shoal.data.matrix import to_matrix

    [tensor] = schema.inputs
    if tensor.type.kind in "iu" and (nulls := [name for name in table.column_names if table[name].null_count]):
        raise DataError(f'column "{nulls[0]}" has nulls, but the model takes a tensor of {tensor.type}')
    return to_matrix(table, table.column_names, tensor.type).reshape(len(table), *tensor.shape[1:])
