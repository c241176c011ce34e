"""Models of partitions: how they are trained with the parameters of an estimator, stored and loaded."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.boosting_libraries import Framework
from shoal.errors import InvalidArgumentError
from shoal.kinds.partitions.keys import Key
from shoal.kinds.partitions.messages import Kind, ModelBytes, PartitionFunction
from shoal.training.boosting.library import library_of, owner_of
from shoal.training.boosting.params import UserCode
from shoal.training.host.imports import import_lean

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


def stored(model: Any) -> ModelBytes:
    """Return a model as bytes: a booster in its library's format, any other model pickled."""
    library = owner_of(model)
    if library is not None and library.is_booster(model):
        return ModelBytes(library.name, library.content_of(model))
    import cloudpickle

    return ModelBytes("pickle", cloudpickle.dumps(model))


def loaded(kind: Kind, content: bytes) -> Any:
    """Return the object of which :func:`stored` has returned the bytes, or the DataFrame of :func:`rows_bytes`."""
    if kind == "rows":
        return rows_in(content).to_pandas()
    if kind != "pickle":
        return library_of(kind).booster_of(content)
    import cloudpickle

    return cloudpickle.loads(content)


def rows_bytes(table: pa.Table) -> ModelBytes:
    """Return rows as bytes, in Arrow's format."""
    import pyarrow as pa

    with io.BytesIO() as file:
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        return ModelBytes("rows", file.getvalue())


def rows_in(content: bytes) -> pa.Table:
    """Return the rows of which :func:`rows_bytes` has returned the bytes."""
    import pyarrow as pa

    return pa.ipc.open_stream(content).read_all()


@dataclass(frozen=True)
class SavedModel:
    """Function that stores the model that another function returns.

    Args:
        train: Function of the rows and the key of a partition that returns a model.
    """

    train: Callable[..., Any]

    def __call__(self, rows: pd.DataFrame, key: Key) -> ModelBytes:
        """Call the function, and return its model as bytes.

        Raises:
            InvalidArgumentError: The function has returned no model.
        """
        model = self.train(rows, key)
        if model is None:
            raise InvalidArgumentError("the function returned None: return the model")
        return stored(model)


@dataclass(frozen=True)
class EstimatorTraining(PartitionFunction):
    """Function that trains a booster on the rows of a partition, as the plain library does in one process.

    Args:
        framework: Name of the library.
        params: All parameters of the library, with the seed.
        rounds: Number of boosting rounds.
        input_cols: Feature columns.
        label_col: Column of the labels.
        weight_col: Column of the weights; None: all rows have the same weight.
        user_code: Callbacks and objective.
    """

    framework: Framework
    params: Mapping[str, Any]
    rounds: int
    input_cols: tuple[str, ...]
    label_col: str
    weight_col: str | None = None
    user_code: UserCode = field(default_factory=UserCode)

    def prepare(self, keys: pa.DataType, by: Sequence[str]) -> None:
        """Import the library. Keys of any kind can be trained."""
        import_lean([self.framework], complete=bool(self.user_code))

    def __call__(self, table: pa.Table, key: Key) -> ModelBytes:
        """Train a booster on the rows."""
        rows = table.to_pandas()
        weight = None if self.weight_col is None else rows[self.weight_col]
        given = {"data": rows[list(self.input_cols)], "label": rows[self.label_col], "weight": weight}
        return stored(library_of(self.framework).train_rows(given, self.params, self.rounds, self.user_code))
