"""When the matrices are kept on disk, and what is left of their files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.data import DataConnector
from shoal.training.boosting.messages import Columns, Part, Task
from shoal.training.host import memory
from shoal.training.xgboost.worker import page_folder
from tests.support.two_node_cluster import COLUMNS


def task(rows: Path, external_memory: bool | None = None) -> Task:
    connector = DataConnector.from_parquet(rows)
    parts = [Part(connector, connector.plan(workers, 0)[0]) for workers in (1, 2)]
    return Task(parts[0], {"eval": parts[1]}, Columns(tuple(COLUMNS), "y"), {}, external_memory=external_memory)


def test_matrices_that_do_not_fit_in_memory_go_to_disk_unless_that_is_forbidden(
    rows: Path, own_temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 200_000)
    with page_folder(task(rows), 1) as folder:
        assert folder is not None
        assert [*own_temp.iterdir()] == [folder]
    assert [*own_temp.iterdir()] == []
    with page_folder(task(rows, external_memory=False), 1) as folder:
        assert folder is None
    monkeypatch.setattr(memory, "available_bytes", lambda: 2_000_000)
    with page_folder(task(rows), 1) as folder:
        assert folder is None
    with page_folder(task(rows), 10) as folder:
        assert folder is not None


def test_files_of_a_killed_worker_are_removed(rows: Path, own_temp: Path) -> None:
    (own_temp / "shoal-pages-999999999-x").mkdir()
    with page_folder(task(rows, external_memory=True), 1):
        assert [folder.name.split("-")[2] for folder in own_temp.iterdir()] == [str(os.getpid())]
