"""One rank by itself, without a gang."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost

from shoal.data import DataConnector
from shoal.training import memory
from shoal.training.context import get_context
from shoal.training.rows import Columns, Part
from shoal.training.task import Segment, Task
from shoal.training.xgboost import worker
from tests.training.ray_cluster import COLUMNS


def session(rows: Path, **changes: Any) -> worker._Session:
    connector = DataConnector.from_parquet(rows)
    part = Part(connector, connector.plan(1, 0)[0])
    held_out = Part(connector, connector.plan(2, 0)[0])
    values = {"params": {"nthread": 1, "max_depth": 3}, "eval_sets": {"train": part, "eval": held_out}, **changes}
    return worker._Session(Task(train=part, columns=Columns(tuple(COLUMNS), "y"), **values), get_context())


def model(of: worker._Session) -> bytes:
    checkpoint = of.boost(Segment(0, 5, True, None)).checkpoint
    assert checkpoint is not None
    return checkpoint.model


def predictions(raw: bytes, rows: Path) -> np.ndarray:
    values = DataConnector.from_parquet(rows).to_pandas()[COLUMNS].to_numpy()
    return xgboost.Booster(model_file=bytearray(raw)).inplace_predict(values)


@pytest.fixture
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_model_is_the_same_from_memory_and_from_disk(rows: Path, own_temp: Path) -> None:
    in_memory, on_disk = session(rows), session(rows, external_memory=True)
    assert in_memory.pages is None
    assert list(own_temp.glob("shoal-pages-*/*"))
    np.testing.assert_allclose(predictions(model(on_disk), rows), predictions(model(in_memory), rows), rtol=1e-5)
    assert (in_memory.prepared.passes, on_disk.prepared.passes) == (1, 3)
    on_disk.close()
    assert list(own_temp.iterdir()) == []


def test_rows_that_do_not_fit_in_memory_go_to_disk_unless_that_is_forbidden(
    rows: Path, own_temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 200_000)
    on_disk = session(rows)
    assert on_disk.prepared.external_memory
    on_disk.close()
    assert not session(rows, external_memory=False).prepared.external_memory
    monkeypatch.setattr(memory, "available_bytes", lambda: 2_000_000)
    assert not session(rows).prepared.external_memory


def test_what_a_killed_worker_left_is_removed(rows: Path, own_temp: Path) -> None:
    (own_temp / "shoal-pages-999999999-x").mkdir()
    of = session(rows, external_memory=True)
    assert [folder.name.split("-")[2] for folder in own_temp.iterdir()] == [str(os.getpid())]
    of.close()
