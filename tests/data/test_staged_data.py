"""How long the files of staged data exist."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path

import pyarrow as pa
import pytest

from shoal.data import DataConnector, staged_data
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.frames import stage_dataframe
from shoal.os_processes import ProcessId, host_id

TABLE = pa.table({"x": [1, 2, 3]})


@pytest.fixture
def staged(tmp_path: Path) -> DataConnector:
    return DataConnector.from_dataframe(TABLE, staging_location=tmp_path)


@pytest.fixture
def folder(staged: DataConnector) -> Path:
    return Path(str(staged.staging))


def stage_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: ProcessId) -> str:
    """Files that another process has staged."""
    monkeypatch.setattr(ProcessId, "mine", staticmethod(lambda: process))
    return stage_dataframe(TABLE, tmp_path)


def test_they_go_with_the_last_object_that_uses_them(tmp_path: Path) -> None:
    whole = DataConnector.from_dataframe(TABLE, staging_location=tmp_path)
    folder = Path(str(whole.staging))
    part, _ = whole.random_split([0.5, 0.5])
    del whole, _
    assert folder.exists()
    spec = part.to_spec().model_copy(update={"sharded": True})
    del part
    assert folder.exists()
    again = DataConnector.from_spec(copy.deepcopy(spec))
    del spec
    reader = again.ingester()
    del again
    assert folder.exists()
    del reader
    assert not folder.exists()
    assert DataConnector.from_dataframe(TABLE, staging_location=tmp_path).to_arrow().num_rows == 3
    assert list(tmp_path.iterdir()) == []


def test_another_process_does_not_hold_them(staged: DataConnector, folder: Path) -> None:
    elsewhere = pickle.loads(pickle.dumps(staged))
    assert elsewhere.to_arrow().num_rows == 3
    spec = DatasetSpec.model_validate_json(staged.to_spec().model_dump_json())
    assert (spec, hash(spec)) == (staged.to_spec(), hash(staged.to_spec()))
    del elsewhere, spec
    assert folder.exists()
    child = os.fork()
    if not child:
        staged.source.staged_copy._release()  # as when a forked child drops its copy of the connector
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.exists()


def test_the_marker_names_the_process(staged: DataConnector, folder: Path) -> None:
    assert json.loads((folder / staged_data.MARKER).read_text()) == {"process": ProcessId.mine().to_json()}
    assert staged_data.is_held(str(folder))
    assert not staged_data.discard_unused(str(folder))


@pytest.mark.parametrize(
    ("process", "held"),
    [(ProcessId("an earlier boot", 1, 1, host_id()), False), (ProcessId("its boot", 1, 1, "another host"), True)],
    ids=["dead", "on another host"],
)
def test_files_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: ProcessId, held) -> None:
    location = stage_elsewhere(tmp_path, monkeypatch, process)
    assert staged_data.is_held(location) is held
    assert staged_data.discard_unused(location) is not held
    assert Path(location).exists() is held


def test_a_job_keeps_them_after_their_process_has_let_go(tmp_path: Path) -> None:
    connector = DataConnector.from_dataframe(TABLE, staging_location=tmp_path)
    location = str(connector.staging)
    staged_data.claim(location, "one-1")
    staged_data.claim(location, "two-1")
    assert connector.num_rows() == 3  # claims are no data
    del connector
    assert not staged_data.is_held(location)
    staged_data.unclaim(location, "one-1")
    staged_data.unclaim(location, "one-1")
    assert not staged_data.discard_unused(location)
    staged_data.unclaim(location, "two-1")
    assert staged_data.discard_unused(location)
    assert list(tmp_path.iterdir()) == []


def test_files_that_somebody_else_has_removed_disturb_nothing(tmp_path: Path, caplog) -> None:
    connector = DataConnector.from_dataframe(TABLE, staging_location=tmp_path)
    assert staged_data.discard(str(connector.staging))
    del connector
    assert caplog.text == ""


def test_a_spec_that_was_only_written_as_json_may_be_submitted_by_another_process_later(tmp_path: Path) -> None:
    """As where one Airflow task returns the spec, and the next one trains."""
    connector = DataConnector.from_dataframe(TABLE, staging_location=tmp_path)
    location = str(connector.staging)
    assert location in connector.to_spec().model_dump_json()
    del connector
    assert staged_data.is_held(location, unknown=True)
    staged_data.claim(location, "one-1")
    staged_data.unclaim(location, "one-1")
    assert staged_data.discard_unused(location)
