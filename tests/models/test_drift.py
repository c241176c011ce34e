"""What is expected of the drift from the champion's training rows, with a champion whose profile is given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.profile import profile_of
from shoal.errors import DataError
from shoal.models import drift


def test_drift_of_a_column_that_cannot_be_compared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"a": [1.0, 2.0], "b": [1.0, 2.0]}), tmp_path / "rows.parquet")
    champion = profile_of(pa.chunked_array([[1.0, 2.0]]), is_category=False)
    monkeypatch.setattr(drift, "_of_champion", lambda *_: ("1", {"a": champion}))

    def compared(columns: list[str]) -> Mapping[str, float]:
        dataset = DatasetSpec.parse({"paths": [str(tmp_path)], "expect": {"drift": {"max": 1, "columns": columns}}})
        source = DataConnector.from_spec(dataset).source
        return drift.profiled(MagicMock(), MagicMock(), dataset, source, ["a", "b"]).drift

    assert compared(["a"]) == {"a": 0}
    with pytest.raises(DataError, match="no drift is known of b: version 1 has other columns"):
        compared(["a", "b"])
