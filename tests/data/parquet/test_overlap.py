from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from shoal.data import DataConnector
from shoal.data.parquet.overlap import RecordedFile, record_rows, shared_mask, shared_rows

ROWS = 100


def write(path: Path, seed: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame({"a": np.random.default_rng(seed).random(ROWS)}).to_parquet(path, row_group_size=30)
    return str(path)


def shared(trained_on: DataConnector, holdout: DataConnector) -> dict[str, int]:
    """Shared rows by file, after the record was stored as JSON and read again."""
    stored = json.loads(json.dumps([file.to_json() for file in record_rows(trained_on.source)]))
    recorded = [RecordedFile.from_json(file) for file in stored]
    assert recorded == record_rows(trained_on.source)
    return {file.path: file.rows for file in shared_rows(recorded, holdout.source)}


def test_other_files_share_no_rows(tmp_path: Path):
    first, second = write(tmp_path / "1.parquet", 1), write(tmp_path / "2.parquet", 2)

    assert shared(DataConnector.from_parquet(first), DataConnector.from_parquet(second)) == {}
    assert shared(DataConnector.from_parquet([first, second]), DataConnector.from_parquet(second)) == {second: ROWS}
    assert shared_rows([], DataConnector.from_parquet(first).source) == []


def test_filters_of_one_file_share_the_rows_that_match_both(tmp_path: Path):
    path = tmp_path / "x.parquet"
    pd.DataFrame({"month": np.repeat(np.arange(1, 11), 10), "a": np.arange(ROWS)}).to_parquet(path, row_group_size=30)

    def months(*filters: tuple) -> DataConnector:
        return DataConnector.from_parquet(path, filters=list(filters))

    before, last = months(("month", "<", 10)), months(("month", "=", 10))
    assert shared(before, last) == {}
    assert shared(last, before) == {}
    assert shared(before, months(("month", ">=", 8))) == {str(path): 20}
    assert shared(DataConnector.from_parquet(path), last) == {str(path): 10}
    assert shared(last, DataConnector.from_parquet(path)) == {str(path): 10}
    train, holdout = before.random_split([0.7, 0.3], seed=1)
    assert shared(train, holdout) == {}
    assert shared(train, before) == {str(path): train.num_rows()}
    for other in (before, holdout, last, months(("month", ">=", 4), ("a", "<", 77))):
        mine = set(train.to_pandas()["a"])
        mask = shared_mask(record_rows(train.source), other.source)
        assert mask.tolist() == [a in mine for a in other.to_pandas()["a"]]


def test_filters_that_do_not_fit_the_holdout_s_partitions_count_every_row(tmp_path: Path):
    for month in ("1", "2", "unknown"):
        write(tmp_path / f"month={month}" / "x.parquet", len(month))
    numbers = [tmp_path / f"month={month}" for month in ("1", "2")]
    trained_on = DataConnector.from_parquet(numbers, filters=[("month", ">=", 2)])

    # With a month that is no number, months are texts, which cannot be compared with 2.
    assert shared(trained_on, DataConnector.from_parquet(tmp_path)) == {str(numbers[1] / "x.parquet"): ROWS}


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


def test_windows_of_one_file_share_only_the_rows_that_match_both(tmp_path: Path):
    path = tmp_path / "flights.parquet"
    frame = pd.DataFrame({"month": [1, 2, 2, 3, 3, 4, 4, 4], "x": [0, 1, 0, 1, 0, 1, 0, 1]})
    frame.to_parquet(path, row_group_size=3)
    whole = DataConnector.from_parquet(path)

    def window(*terms: tuple[str, str, int]) -> DataConnector:
        return DataConnector.from_parquet(path, filters=terms)

    def rows(trained_on: DataConnector, holdout: DataConnector) -> int:
        return sum(shared(trained_on, holdout).values())

    trained_on = window(("month", "<=", 3))
    assert shared(trained_on, window(("month", ">", 3))) == {}
    assert rows(trained_on, window(("month", ">=", 3))) == 2
    assert rows(trained_on, trained_on) == 5
    assert rows(trained_on, window(("x", "=", 1))) == 2
    assert rows(trained_on, whole) == 5
    assert rows(whole, window(("month", "=", 4))) == 3
    parts = window(("month", ">=", 2)).random_split([0.5, 0.5])
    assert shared(parts[0], parts[1]) == {}
    assert sum(rows(trained_on, part) for part in parts) == 4
