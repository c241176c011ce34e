"""Models of partitions in files, written without a job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from shoal.kinds.partitions import partition_messages
from shoal.kinds.partitions.keys import Key
from shoal.kinds.partitions.logged_model import OPTIONS, PartitionedModel
from shoal.kinds.partitions.partition_messages import ModelBytes, Outcome
from shoal.kinds.partitions.partition_results import PartitionResults
from shoal.kinds.partitions.result_files import MANIFEST, ResultWriter, complete_files, manifest_of


@dataclass(frozen=True)
class Times:
    """Model that multiplies the column ``a`` by one factor, or by several."""

    factor: float | tuple[float, ...]

    def predict(self, rows: pd.DataFrame) -> np.ndarray:
        return np.multiply.outer(rows["a"].to_numpy(), np.array(self.factor))


def written(folder: Path, values: Mapping[Key, ModelBytes | None], key_type: pa.DataType) -> PartitionResults:
    """Write the outcomes of partitions into two result files; those without a value have failed."""
    (folder / "results").mkdir(parents=True)
    for bucket in range(2):
        writer = ResultWriter(str(folder / "results"), bucket, key_type)
        part = [*values.items()][bucket::2]
        writer.expect(len(part))
        for key, value in part:
            status, error = ("failed", "too few rows") if value is None else ("succeeded", "")
            writer.add(Outcome(key, status, 1, 1, 0.0, {}, error, "", value))
        writer.close()
    tables = complete_files(str(folder / "results"))
    (folder / MANIFEST).write_bytes(manifest_of(tables.values()))
    return PartitionResults(str(folder / MANIFEST))


def model_of(
    folder: Path,
    factors: Mapping[Key, float | tuple[float, ...] | None],
    key_type: pa.DataType,
    by: Sequence[str] = ("key",),
) -> PartitionedModel:
    """Write a model that multiplies ``a`` by the factor of the row's key. None: its training has failed."""
    written(
        folder,
        {key: None if each is None else partition_messages.stored(Times(each)) for key, each in factors.items()},
        key_type,
    )
    (folder / OPTIONS).write_text(json.dumps({"by": [*by], "input_cols": ["a"]}))
    return PartitionedModel(str(folder))
