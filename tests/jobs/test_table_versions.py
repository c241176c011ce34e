"""The versions of tables that a job reads: found once, kept for all attempts, and reported."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from shoal.data import DataConnector
from shoal.data.dataset_spec import DatasetSpec, content_of
from shoal.errors import DataError, InvalidArgumentError
from shoal.jobs import JobSpec
from shoal.jobs.driver.table_versions import check_expectations, divided, pinned
from shoal.kinds.training.driver import _input_digests
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


def test_each_dataset_of_a_table_keeps_its_own_selection(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"x": [1.0, 2.0, 3.0], "y": [0.0, 1.0, 2.0]}))
    filtered = document(tmp_path, filters=[["x", ">", 2.5]])["dataset"]
    spec = JobSpec.model_validate(document(tmp_path, filters=[["x", "<", 2.5]]) | {"eval_set": {"late": filtered}})
    found = pinned(spec, None, lambda found: found)
    rows = [DataConnector.from_spec(each).to_arrow().column("x").to_pylist() for each in found.inputs()]
    assert rows == [[1.0, 2.0], [3.0]] and {each.version for each in found.inputs()} == {0}


def test_another_table_at_the_same_path_is_noticed(tmp_path: Path) -> None:
    def write(*ids: int) -> None:
        shutil.rmtree(tmp_path / "table", ignore_errors=True)
        write_deltalake(tmp_path / "table", pa.table({"x": [*map(float, ids)], "y": [*map(float, ids)]}))

    write(0, 1)
    spec = JobSpec.model_validate(document(tmp_path / "table"))
    stored: dict[str, Any] = {}
    content = content_of(pinned(spec, None, lambda found: stored.update(found) or stored).dataset)
    kept = json.loads(json.dumps(stored))
    assert content_of(pinned(spec, kept, lambda _: kept).dataset) == content != [str(tmp_path / "table"), 0]
    write(2, 3)
    with pytest.raises(DataError, match="was replaced by another table since the job's first attempt"):
        pinned(spec, kept, lambda _: kept)
    assert content_of(spec.dataset.model_copy(update={"version": 0})) != content


def test_two_versions_of_a_table_are_two_inputs(tmp_path: Path) -> None:
    for _ in range(3):
        write_deltalake(tmp_path, pa.table({"x": [1.0], "y": [0.0]}), mode="append")

    def digest(train: int, holdout: int) -> str:
        given = {"eval_set": {"all": document(tmp_path, version=holdout)["dataset"]}}
        spec = JobSpec.model_validate(document(tmp_path, version=train) | given)
        found = _input_digests(spec, DataConnector.from_spec(spec.dataset), "rows", None)
        assert found is not None
        return found["the files of the datasets"]

    assert len({digest(0, 2), digest(1, 2), digest(0, 1)}) == 3


def test_the_schema_of_a_snapshot_is_a_part_of_the_version(tmp_path: Path) -> None:
    table = unpack(tmp_path) / "iceberg/db/snapshots"
    spec = JobSpec.model_validate(document(table, format="iceberg", version="audit"))
    fixed = pinned(spec, None, lambda found: found).dataset
    assert "-schema-" in str(fixed.version) and content_of(fixed) is not None


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


def write_days(path: Path, *days: int) -> None:
    rows = {"day": [date(2024, 1, day) for day in days], "x": [*map(float, days)], "y": [*map(float, days)]}
    pq.write_table(pa.table(rows), path)


def test_all_parts_and_attempts_have_the_newest_time_of_the_first_although_files_are_appended(tmp_path: Path) -> None:
    write_days(tmp_path / "a.parquet", *range(1, 21))
    stored: dict[str, Any] = {"a table": [3, "id"]}

    def keep(found: dict[str, Any]) -> dict[str, Any]:
        stored.update({**found, **stored})
        return json.loads(json.dumps(stored))

    def part(name: str, last: int) -> dict[str, Any]:
        split = {"column": "day", "holdout": 3, "gap": 1, "part": name}
        return {"paths": [str(tmp_path)], "filters": [["x", "<=", last]], "time_split": split}

    # The filters of the holdout select older rows: alone, they would have an older newest time.
    given = {"dataset": part("train", 15), "eval_set": {"held out": part("holdout", 14)}}
    spec = JobSpec.model_validate({"framework": "xgboost", "input_cols": ["x"], "label_col": "y", **given})
    first = divided(spec, keep)
    write_days(tmp_path / "b.parquet", 2, 12, 13, 15, 16)
    second = divided(spec, keep)
    assert first == second and divided(first, lambda _: pytest.fail("the newest times are known")) == first

    def days(dataset: DatasetSpec) -> set[int]:
        return {day.day for day in DataConnector.from_spec(dataset).to_arrow().column("day").to_pylist()}

    assert (days(second.dataset), days(second.eval_set["held out"])) == ({*range(1, 12)}, {13, 14})


def test_all_attempts_measure_the_age_of_rows_when_the_first_was_created(tmp_path: Path) -> None:
    write_days(tmp_path / "a.parquet", 1, 2, 3)
    fresh = {"column": "day", "within": "2d"}
    dataset = {"paths": [str(tmp_path)], "expect": {"fresh": fresh}}
    given = {"framework": "xgboost", "dataset": dataset, "input_cols": ["x"], "label_col": "y"}
    spec, at = JobSpec.model_validate(given), datetime(2024, 1, 5, 12, tzinfo=UTC).timestamp()
    stored: dict[str, Any] = {}

    def keep(found: dict[str, Any]) -> dict[str, Any]:
        stored.update({**found, **stored})
        return stored

    for later in (0, 10 * 86_400):
        check_expectations(spec, at + later, keep)
    with pytest.raises(DataError, match='newest "day" is 2024-01-03, more than 2d before 2024-01-15T12:00:00'):
        check_expectations(spec, at + 10 * 86_400, lambda found: found)


@pytest.mark.parametrize(
    ("place", "legal"), [("dataset", True), ("eval", False), ("holdout", False), ("without register", False)]
)
def test_drift_is_expected_only_of_the_training_rows_of_a_registered_model(place: str, legal: bool) -> None:
    def dataset(name: str) -> dict[str, Any]:
        drifting = name == place or (name == "dataset" and place == "without register")
        return {"paths": [f"/{name}"], **({"expect": {"drift": {"max": 0.25}}} if drifting else {})}

    given: dict[str, Any] = {"dataset": dataset("dataset"), "eval_set": {"eval": dataset("eval")}}
    if place != "without register":
        given["register"] = {"model": "m", "metric": "rmse", "holdout": dataset("holdout")}
    fields = {"framework": "xgboost", "input_cols": ["x"], "label_col": "y", **given}
    if legal:
        assert JobSpec.parse(fields).dataset.expect is not None
    else:
        with pytest.raises(InvalidArgumentError, match=r"expect\.drift compares training rows"):
            JobSpec.parse(fields)
