"""The versions of tables that a job reads: found once, kept for all attempts, and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from shoal.data import DataConnector
from shoal.jobs import JobSpec
from shoal.jobs.driver.table_versions import pinned
from tests.data.tables.unpacking import unpack


def document(table: Path, **options: Any) -> dict[str, Any]:
    dataset = {"format": "delta", "paths": [str(table)], **options}
    return {"framework": "xgboost", "dataset": dataset, "input_cols": ["x"], "label_col": "y", "n_estimators": 1}


@pytest.mark.parametrize("options", [{}, {"as_of": "2100-01-01 00:00:00+00:00"}])
def test_a_later_attempt_reads_the_version_of_the_first(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = pa.table({"x": [1.0, 2.0], "y": [0.0, 1.0]})
    write_deltalake(tmp_path, rows)
    spec = JobSpec.model_validate(document(tmp_path, **options) | {"eval_set": {"all": document(tmp_path)["dataset"]}})
    stored: dict[str, Any] = {}

    first = pinned(spec, None, lambda found: stored.update(found) or stored)
    write_deltalake(tmp_path, rows, mode="append")
    second = pinned(spec, stored, lambda _: pytest.fail("the versions are known"))

    assert first == second and {dataset.version for dataset in second.datasets()} == {0}
    assert DataConnector.from_spec(second.dataset).num_rows() == 2
    assert second.dataset.origin == (f"{tmp_path}, version 0",) and second.fingerprint == spec.fingerprint


def test_an_iceberg_tag_of_digits_is_a_tag(tmp_path: Path) -> None:
    metadata = unpack(tmp_path) / "iceberg/db/snapshots/metadata"
    newest = max(metadata.glob("v*.metadata.json"), key=lambda path: int(path.name[1:].split(".")[0]))
    table = json.loads(newest.read_text())
    table["refs"]["0070"] = table["refs"]["release"]
    newest.write_text(json.dumps(table))
    spec = JobSpec.model_validate(document(metadata.parent, format="iceberg", version="0070"))
    assert spec.dataset.version == "0070"
    assert pinned(spec, None, lambda found: found).dataset.version == table["refs"]["release"]["snapshot-id"]


def test_a_version_in_the_spec_is_read_as_it_is(tmp_path: Path) -> None:
    spec = JobSpec.model_validate(document(tmp_path, version=7))
    assert pinned(spec, None, lambda _: pytest.fail("nothing is open")) is spec
