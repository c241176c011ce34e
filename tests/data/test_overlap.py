from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from shoal.data import DataConnector
from shoal.data.parquet.overlap import RecordedFile, record, shared_rows

ROWS = 100


def write(path: Path, seed: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame({"a": np.random.default_rng(seed).random(ROWS)}).to_parquet(path, row_group_size=30)
    return str(path)


def shared(trained_on: DataConnector, holdout: DataConnector) -> dict[str, int]:
    """Shared rows by file, after the record was stored as JSON and read again."""
    stored = json.loads(json.dumps([file.to_json() for file in record(trained_on.source)]))
    recorded = [RecordedFile.from_json(file) for file in stored]
    assert recorded == record(trained_on.source)
    return {file.path: file.rows for file in shared_rows(recorded, holdout.source)}


def test_other_files_share_no_rows(tmp_path: Path):
    first, second = write(tmp_path / "1.parquet", 1), write(tmp_path / "2.parquet", 2)

    assert shared(DataConnector.from_parquet(first), DataConnector.from_parquet(second)) == {}
    assert shared(DataConnector.from_parquet([first, second]), DataConnector.from_parquet(second)) == {second: ROWS}
    assert shared_rows([], DataConnector.from_parquet(first).source) == []


@pytest.mark.parametrize("spelling", ["a directory", "a link", "a URI", "a copy", "a glob"])
def test_a_file_is_the_same_by_any_name(tmp_path: Path, spelling: str):
    path = Path(write(tmp_path / "data" / "x.parquet", 1))
    other = tmp_path / "other.parquet"
    if spelling == "a link":
        os.symlink(path, other)
    if spelling == "a copy":
        shutil.copy(path, other)
    again = {"a directory": path.parent, "a URI": path.as_uri(), "a glob": tmp_path / "*" / "*.parquet"}

    found = shared(DataConnector.from_parquet(path), DataConnector.from_parquet(again.get(spelling, other)))

    assert list(found.values()) == [ROWS]


def test_parts_of_one_split_share_no_rows_and_those_of_two_splits_do(tmp_path: Path):
    whole = DataConnector.from_parquet([write(tmp_path / f"{seed}.parquet", seed) for seed in range(3)])
    train, rest = whole.random_split([0.8, 0.2], seed=0)
    valid, test = rest.random_split([0.5, 0.5], seed=1)
    _, other = whole.random_split([0.8, 0.2], seed=5)

    for one, two in ((train, rest), (train, test), (valid, test)):
        assert shared(one, two) == shared(two, one) == {}
    assert sum(shared(rest, test).values()) == test.num_rows()
    assert sum(shared(whole, test).values()) == test.num_rows()
    mine, theirs = (set(part.to_pandas()["a"]) for part in (train, other))
    assert sum(shared(train, other).values()) == len(mine & theirs) > 0


def test_an_equal_frame_staged_twice_is_the_same(fresh_home: Path):
    frame = pd.DataFrame({"a": np.random.default_rng(0).random(ROWS)})

    assert sum(shared(DataConnector.from_dataframe(frame), DataConnector.from_dataframe(frame)).values()) == ROWS
    assert shared(DataConnector.from_dataframe(frame), DataConnector.from_dataframe(frame * 2)) == {}


def test_files_without_rows_are_not_the_same(tmp_path: Path):
    pd.DataFrame({"a": [1.0]}).iloc[:0].to_parquet(tmp_path / "1.parquet")
    shutil.copy(tmp_path / "1.parquet", tmp_path / "2.parquet")
    empty, too = (DataConnector.from_parquet(tmp_path / name) for name in ("1.parquet", "2.parquet"))

    assert shared(empty, too) == {}
