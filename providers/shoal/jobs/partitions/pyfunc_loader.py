"""A model of MLflow that predicts each row with the model of its partition. MLflow loads it by the name of this module.

The models are loaded when a row needs them, and those that were used last are kept.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import DataError
from shoal.jobs.partitions.keys import Key, encoded
from shoal.jobs.partitions.predictions import predicted_by
from shoal.jobs.partitions.result_files import MANIFEST
from shoal.jobs.partitions.results import PartitionResult, PartitionResults

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa

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

    Args:
        folder: Local folder of the model.
    """

    def __init__(self, folder: str) -> None:
        options = json.loads(Path(folder, OPTIONS).read_text())
        self.by: tuple[str, ...] = tuple(options["by"])
        self.input_cols: tuple[str, ...] = tuple(options["input_cols"])
        self.results = PartitionResults(str(Path(folder, MANIFEST)))
        self._types = _key_types(Path(folder, MANIFEST), self.by)
        self._kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def predict(self, model_input: pd.DataFrame, params: Any = None) -> np.ndarray:
        """Return the predictions of rows, ``[rows]`` or ``[rows, outputs]``."""
        import numpy as np

        rows = model_input.reset_index(drop=True)
        codes, keys = self._keys(rows)
        found = {code: self.results.get(key) for code, key in enumerate(keys)}
        known = {code: each for code, each in found.items() if each is not None and each.status == "succeeded"}
        predicted: np.ndarray | None = None
        # In the order of the files, so that each row group is read once.
        for code in sorted(known, key=lambda code: known[code].place):
            positions = np.flatnonzero(codes == code)
            values = np.asarray(predicted_by(self._model(known[code]), rows.iloc[positions], self.input_cols))
            if predicted is None:
                predicted = np.full((len(rows), *values.shape[1:]), np.nan)
            predicted[positions] = values
        return np.full(len(rows), np.nan) if predicted is None else predicted

    def _keys(self, rows: pd.DataFrame) -> tuple[np.ndarray, list[Key]]:
        """Return the keys of rows, converted to the types of the keys of the models."""
        import pyarrow as pa

        columns = {}
        for name, type_ in self._types.items():
            if name not in rows:
                raise DataError(f'the rows lack the column "{name}", which selects the model')
            try:
                columns[name] = pa.Array.from_pandas(rows[name], type=type_)
            except pa.ArrowException as error:
                raise DataError(f'the column "{name}" has values that are not of type {type_}: {error}') from error
        return encoded(pa.table(columns), self.by)

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


def _key_types(manifest: Path, by: Sequence[str]) -> dict[str, pa.DataType]:
    import pyarrow as pa
    from pyarrow import parquet

    found = parquet.read_schema(manifest).field("key").type
    if not pa.types.is_struct(found):
        return {by[0]: found}
    return {name: found.field(name).type for name in by}
