"""Rows as datasets of Hugging Face's library, which is not among shoal's dependencies."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.compat.snowflake import DataConnector, ShardedDataConnector
from shoal.data import ShardedDataConnector as OwnConnector
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.planning import ALONE, GangPosition, set_current_position
from shoal.data.row_copies import copy_rows
from shoal.errors import InvalidArgumentError, MissingExtraError

ROWS = pa.table(
    {
        "number": [0, 1, None, 3, 4, 5, 6],
        "text": ["a", "ab", "abc", None, "mn", "mnm", "mnmn"],
        "list": [[i, i * 10] for i in range(7)],
    }
)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    paths = [str(tmp_path / f"{number}.parquet") for number in range(2)]
    pq.write_table(ROWS.slice(0, 4), paths[0], row_group_size=3)
    pq.write_table(ROWS.slice(4), paths[1])
    return paths


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_library_is_named(files: list[str], streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"datasets is not installed .* `pip install datasets`"):
        DataConnector.from_parquet(files).to_huggingface_dataset(streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_limits_and_batches(files: list[str], streaming: bool) -> None:
    datasets = pytest.importorskip("datasets")
    connector = DataConnector.from_parquet(files)
    dataset = connector.to_huggingface_dataset(streaming=streaming)
    assert isinstance(dataset, datasets.IterableDataset if streaming else datasets.Dataset)
    assert list(dataset) == list(dataset) == ROWS.to_pylist()  # a second epoch, too
    assert dataset.features["list"].feature.dtype == "int64"
    few = connector.to_huggingface_dataset(streaming=streaming, limit=5, batch_size=2, drop_last_batch=True)
    assert list(few) == ROWS.to_pylist()[:5]
    whole = connector.to_huggingface_dataset(streaming=streaming, batch_size=3, drop_last_batch=True)
    assert list(whole) == ROWS.to_pylist()[:6]
    for wrong in ({"limit": -1}, {"batch_size": 0, "drop_last_batch": True}):
        with pytest.raises(InvalidArgumentError):
            connector.to_huggingface_dataset(streaming=streaming, **wrong)


@pytest.mark.parametrize("streaming", [False, True])
def test_pictures_and_names_of_classes_stay(tmp_path: Path, files: list[str], streaming: bool) -> None:
    datasets = pytest.importorskip("datasets")
    pillow = pytest.importorskip("PIL.Image")
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"picture": [pillow.new("RGB", (2, 3), color) for color in ("red", "blue")], "kind": ["dog", "cat"]}
    path = str(tmp_path / "pictures.parquet")
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    found = DataConnector.from_parquet(path).to_huggingface_dataset(streaming=streaming)
    assert found.features == features
    assert [row["picture"].getpixel((0, 0)) for row in found] == [(255, 0, 0), (0, 0, 255)]
    assert [row["kind"] for row in found] == [1, 0]
    (tmp_path / "staged").mkdir()
    copy_rows(DatasetSpec.parse({"paths": [path]}), None, str(tmp_path / "staged"))
    assert DataConnector.from_parquet(tmp_path / "staged").to_huggingface_dataset().features == features


@pytest.mark.parametrize("streaming", [False, True])
def test_a_shuffled_dataset_has_every_row(files: list[str], streaming: bool) -> None:
    pytest.importorskip("datasets")
    connector = DataConnector.from_parquet(files, filters=[("text", "!=", "mnm")])
    shuffled = list(connector.to_huggingface_dataset(streaming=streaming, shuffle=True))
    kept = [row for row in ROWS.to_pylist() if row["text"] not in (None, "mnm")]
    assert shuffled != kept and sorted(shuffled, key=lambda row: row["list"]) == kept
    assert len(list(connector.to_huggingface_dataset(streaming=streaming, shuffle=True, limit=2))) == 2


def test_each_rank_has_its_own_rows(files: list[str]) -> None:
    pytest.importorskip("datasets")
    spec = ShardedDataConnector.from_parquet(files).to_spec()
    in_worker = OwnConnector.from_spec(spec.model_dump())
    assert isinstance(in_worker, OwnConnector)
    try:
        rows = []
        for rank in range(2):
            set_current_position(GangPosition(rank, 2, 0))
            rows += list(in_worker.get_shard().to_huggingface_dataset(streaming=True))
            assert len(in_worker.to_huggingface_dataset()) == 7
    finally:
        set_current_position(ALONE)
    assert sorted(rows, key=lambda row: row["list"]) == ROWS.to_pylist()


def test_a_stream_outlives_the_connector_of_staged_rows(fresh_home: Path, files: list[str]) -> None:
    pytest.importorskip("datasets")
    stream = DataConnector.from_dataframe(ROWS).to_huggingface_dataset(streaming=True)
    assert list(stream) == ROWS.to_pylist()
    divided = [list(stream.shard(2, index)) for index in range(stream.num_shards)]
    assert divided == [ROWS.to_pylist()]
