"""A model of MLflow that predicts each row with the model of its partition. MLflow loads it by the name of this module.

The models are loaded when a row needs them, and those that were used last are kept.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.data.parquet.source import ParquetSource
from shoal.errors import DataError
from shoal.kinds.partitions.keys import (
    Key,
    check_not_rounded,
    check_same_kinds,
    encoded,
    key_type,
    shown_key,
    type_of_columns,
)
from shoal.kinds.partitions.predictions import predicted_by
from shoal.kinds.partitions.result_files import MANIFEST
from shoal.kinds.partitions.results import PartitionResult, PartitionResults

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray

OPTIONS = "model.json"
"""Name of the file with the columns of the keys and the features."""

_MOST_MODELS = 1_000
_MOST_BYTES = 256 * 2**20
"""Greatest number of models that are kept, and greatest sum of their sizes as files."""


def _load_pyfunc(path: str) -> PartitionedModel:
    """Load the model from its folder; MLflow calls this function by its name."""
    return PartitionedModel(path)


class PartitionedModel:
    """Model that predicts each row with the model of its partition. A row whose key has no model is predicted as NaN.

    MLflow calls :meth:`predict`. Jobs use the other methods, which read the keys from Arrow tables, in which a null
    stays a null.

    Args:
        folder: Local folder of the model.
    """

    classes: tuple[Any, ...] | None = None
    gives_classes: bool | None = None
    code_cols: tuple[str, ...] = ()

    def __init__(self, folder: str) -> None:
        options = json.loads(Path(folder, OPTIONS).read_text())
        self.by: tuple[str, ...] = tuple(options["by"])
        self.input_cols: tuple[str, ...] = tuple(options["input_cols"])
        self.results = PartitionResults(str(Path(folder, MANIFEST)))
        self._kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def get_raw_model(self) -> PartitionedModel:
        """Return this model; MLflow's ``PyFuncModel`` has a method of this name."""
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that a table must contain: those of the keys, and the features."""
        return tuple(dict.fromkeys((*self.by, *self.input_cols)))

    def check(self, source: ParquetSource) -> None:
        """Check that a dataset has the columns of the model, and keys of the kind that the models have.

        Raises:
            DataError: A column is missing, or the keys are of another kind.
        """
        self._check_columns(source.schema().names)
        check_same_kinds(key_type(source, self.by), self.results.key_type, self.by)

    def predict(self, model_input: pd.DataFrame, params: Any = None) -> np.ndarray:
        """Return the predictions of rows, ``[rows]`` or ``[rows, outputs]``."""
        import pyarrow as pa

        self._check_columns(map(str, model_input.columns))
        rows = model_input.reset_index(drop=True)
        keys = {}
        for name in self.by:
            try:
                keys[name] = pa.array(rows[name], from_pandas=True)
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise DataError(f'the column "{name}" has values that cannot be keys: {error}') from error
        # MLflow makes objects of nullable numbers, which the boosting libraries refuse.
        for name in [name for name in self.input_cols if rows[name].dtype == object]:
            with contextlib.suppress(pa.ArrowException, TypeError, ValueError):
                rows[name] = pa.array(rows[name], from_pandas=True).to_pandas()
        return self._predicted(pa.table(keys), rows)

    def predict_table(self, table: pa.Table) -> np.ndarray:
        """Return the predictions of a table's rows, ``[rows]`` or ``[rows, outputs]``."""
        return self._predicted(table, table.select(list(self.columns)).to_pandas())

    def unknown(self, table: pa.Table) -> tuple[NDArray[np.bool_], dict[str, int]]:
        """Return which rows of a table have a key without a model, and the number of rows of each such key."""
        import numpy as np

        codes, keys = self._encoded(table)
        rows = np.bincount(codes, minlength=len(keys))
        lacks = np.array([not self.results.predicts(key) for key in keys], bool)
        return lacks[codes], {shown_key(keys[code]): int(rows[code]) for code in np.flatnonzero(lacks).tolist()}

    def _encoded(self, table: pa.Table) -> tuple[np.ndarray, list[Key]]:
        """Return the index of each row's key and the different keys, which are of the kind that the models have."""
        found, wanted = type_of_columns(table.schema, self.by), self.results.key_type
        check_same_kinds(found, wanted, self.by)
        codes, keys = encoded(table, self.by)
        check_not_rounded(keys, found, wanted, self.by)
        return codes, keys

    def _check_columns(self, names: Iterable[str]) -> None:
        if missing := sorted(set(self.columns) - set(names)):
            raise DataError(
                f"the rows lack columns that the model needs: {', '.join(missing)}. The keys are in "
                f"{', '.join(self.by)}, and select the model of each row"
            )

    def _predicted(self, table: pa.Table, rows: pd.DataFrame) -> np.ndarray:
        """Predict rows, of which `table` has the keys."""
        import numpy as np

        codes, keys = self._encoded(table)
        found = {code: self.results[key] for code, key in enumerate(keys) if self.results.predicts(key)}
        predicted: np.ndarray | None = None
        # In the order of the files, so that each row group is read once.
        for code in sorted(found, key=lambda code: found[code].place):
            positions = np.flatnonzero(codes == code)
            values = self._predicted_by(found[code], rows.iloc[positions])
            if predicted is None:
                predicted = np.full((len(rows), *values.shape[1:]), np.nan)
            if values.shape[1:] != predicted.shape[1:]:
                raise DataError(
                    f"the model of key {shown_key(found[code].key)} returns {values.shape[1:]} values per row, but "
                    f"another one {predicted.shape[1:]}: train models with equal outputs"
                )
            predicted[positions] = values
        return np.full((len(rows), *self._outputs(rows)), np.nan) if predicted is None else predicted

    def _predicted_by(self, found: PartitionResult, rows: pd.DataFrame) -> np.ndarray:
        import numpy as np

        values = predicted_by(self._model(found), rows, self.input_cols)
        try:
            return np.asarray(values, np.float64)
        except ValueError as error:
            raise DataError(
                f"the model of key {shown_key(found.key)} predicts values that are no numbers: {error}"
            ) from error

    def _outputs(self, rows: pd.DataFrame) -> tuple[int, ...]:
        """Return the shape of one prediction, which rows without a model must have, too."""
        first = next((each for each in self.results if each.status == "succeeded"), None)
        return () if first is None or not len(rows) else self._predicted_by(first, rows.head(1)).shape[1:]

    def _model(self, found: PartitionResult) -> Any:
        text = found.text
        if text in self._kept:
            self._kept.move_to_end(text)
            return self._kept[text][0]
        model = found.value
        self._kept[text] = model, found.size_bytes
        while len(self._kept) > _MOST_MODELS or (
            len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > _MOST_BYTES
        ):
            self._kept.popitem(last=False)
        return model
