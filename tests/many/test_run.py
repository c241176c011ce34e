"""`shoal.many.run`: what each partition gets, what becomes of those that fail, and what a restart repeats."""

from __future__ import annotations

import ctypes
import datetime
import os
import select
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal import RunConfig, many
from shoal.data import DataConnector
from shoal.errors import DataError, InvalidArgumentError, TrainingError
from shoal.kinds.partitions.engine import WorkFolder
from tests.support.without_ray import nodes_without_ray

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def nodes(fresh_home: Path) -> Iterator[None]:
    """This process is a driver with two CPUs."""
    with nodes_without_ray(2):
        yield


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table in two files of several row groups, with keys of several types."""
    folder = tmp_path_factory.mktemp("table")
    random = np.random.default_rng(0)
    for number in range(2):
        rows = 1_000
        stores = random.integers(0, 20, rows)
        frame = pd.DataFrame(
            {
                "store": pd.array(np.where(stores == 19, None, stores), "Int64"),
                "day": [datetime.date(2026, 1, 1 + day) for day in random.integers(0, 3, rows)],
                "kind": pd.Categorical(random.choice(["a", "b", "c"], rows)),
                "share": np.where(stores == 0, np.nan, stores / 4),
                "position": np.arange(rows) + number * rows,
            }
        )
        frame.to_parquet(folder / f"{number}.parquet", row_group_size=300)
    return folder


def returned(rows: pd.DataFrame, key: object) -> pd.DataFrame:
    return rows


@pytest.mark.parametrize("by", ["share", ["store", "kind", "day"]])
def test_each_partition_gets_its_rows_in_the_order_of_the_table(table: Path, by: str | list[str]) -> None:
    data = DataConnector.from_parquet(table)
    results = many.run(returned, data, by)

    frame = data.to_pandas()
    groups = list(frame.groupby(by, dropna=False, observed=True))
    assert len(results) == len(groups)
    assert results.counts == {"succeeded": len(groups), "failed": 0}
    for key, expected in groups:
        parts = key if isinstance(key, tuple) else (key,)
        plain = tuple(None if pd.isna(part) else part for part in parts)
        found = results[plain if isinstance(by, list) else plain[0]]
        rows = found.value
        assert found.rows == len(expected)
        pd.testing.assert_frame_equal(
            rows.assign(kind=rows["kind"].astype(str)),
            expected.reset_index(drop=True).assign(kind=expected["kind"].astype(str).to_numpy()),
        )
    types = {float} if by == "share" else {int, str, datetime.date}
    parts = [part for key in results.keys for part in (key if isinstance(key, tuple) else (key,))]
    assert {*map(type, parts)} == {*types, type(None)}


def test_a_partition_that_fails_costs_no_other_partition(tmp_path: Path) -> None:
    frame = pd.DataFrame({"store": np.repeat(np.arange(30), 3), "x": np.arange(90.0)})

    def train(rows: pd.DataFrame, key: int, folder: Path) -> float:
        with (folder / "calls").open("a") as file:
            file.write(f"{key}\n")
        print(f"partition {key} of {len(rows)} rows, password hunter2-hunter2")
        if key == 2:  # killed, while a child lives on that has all that its process had
            worker = os.pidfd_open(os.getppid())
            if os.fork():
                os.kill(os.getpid(), signal.SIGKILL)
            select.select([worker], [], [])
            os._exit(0)
        if key == 3:
            raise ValueError("no model for 3")
        if key == 4:
            if not os.fork():
                return -1.0
            os.wait()
        if key == 5:
            os._exit(9)
        if key == 7 and not (folder / "crashed").exists():
            (folder / "crashed").touch()
            ctypes.string_at(0)
        if key == 9:
            signal.pause()
        many.get_context().report({"mean": rows["x"].mean()})
        return float(rows["x"].sum())

    config = RunConfig(secret_env=("A_PASSWORD",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A_PASSWORD", "hunter2-hunter2")
        results = many.run(train, frame, "store", kwargs={"folder": tmp_path}, partition_timeout=2.0, run_config=config)

    assert results.counts == {"succeeded": 26, "failed": 4}
    sums = frame.groupby("store")["x"].sum()
    assert dict(results.values()) == {key: sums[key] for key in range(30) if key not in (2, 3, 5, 9)}
    assert results[7].attempts == 2
    assert results[8].metrics == {"mean": 25.0}
    assert {each.key: (each.attempts, each.error) for each in results.failed} == {
        2: (2, "the process of the function was killed by SIGKILL in 2 attempts"),
        3: (1, "ValueError: no model for 3"),
        5: (2, "the process of the function ended with exit code 9 in 2 attempts"),
        9: (1, "the function took longer than 2 s"),
    }
    assert results[3].log.startswith("partition 3 of 3 rows, password *")
    assert results[3].log.endswith("ValueError: no model for 3\n")
    assert "shoal" not in results[3].log
    assert results[5].log.startswith("partition 5 of 3 rows")
    calls = Counter((tmp_path / "calls").read_text().split())
    assert calls == Counter([str(key) for key in range(30)] + ["2", "5", "7"])
    with pytest.raises(many.PartitionFailedError, match="partition 3 has no value: ValueError: no model for 3"):
        _ = results[3].value
    with pytest.raises(many.PartitionFailedError, match=r"4 of 30 partitions have failed: 2: .* SIGKILL"):
        results.require_all()
    with pytest.raises(KeyError, match="there is no partition 30"):
        results[30]
    assert results.to_pandas()["status"].value_counts().to_dict() == {"succeeded": 26, "failed": 4}


def test_after_a_worker_was_killed_no_finished_bucket_is_repeated(tmp_path: Path) -> None:
    frame = pd.DataFrame({"store": np.arange(200)})

    def train(rows: pd.DataFrame, key: int, folder: Path) -> int:
        with (folder / "calls").open("a") as file:
            file.write(f"{key}\n")
        if key == 150 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getppid(), signal.SIGKILL)
        return key

    results = many.run(train, frame, "store", kwargs={"folder": tmp_path}, run_config=RunConfig(max_restarts=1))

    assert dict(results.values()) == {key: key for key in range(200)}
    calls = Counter(map(int, (tmp_path / "calls").read_text().split()))
    assert calls[150] == 2
    # Each worker had one bucket in work, of 32.
    assert 200 < calls.total() < 240


def test_the_random_numbers_of_a_partition_depend_only_on_the_seed_and_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frame = pd.DataFrame({"store": ["a", "b", "c", "a"]})

    def draw(rows: pd.DataFrame, key: str) -> tuple[float, int]:
        return float(np.random.random()), many.get_context().seed

    # As at a URI, where each worker gets buckets of its own.
    monkeypatch.setattr(WorkFolder, "new_claims", lambda self: None)
    first = dict(many.run(draw, frame, "store").values())
    monkeypatch.undo()
    second = dict(
        many.run(draw, frame.iloc[::-1], "store", scaling_config=many.PartitionsScalingConfig(num_workers=1)).values()
    )
    assert first == second
    assert len({*first.values()}) == 3
    assert first["a"][0] == np.random.RandomState(first["a"][1]).random_sample()


def test_a_run_that_is_repeated_with_its_id_uses_what_it_has_of_the_same_rows(tmp_path: Path) -> None:
    frame = pd.DataFrame({"store": np.arange(10), "sales": 1.0})
    config = RunConfig(job_id="nightly", artifact_location=str(tmp_path / "artifacts"))

    def train(rows: pd.DataFrame, key: int, folder: Path) -> float:
        with (folder / "calls").open("a") as file:
            file.write(f"{key}\n")
        return float(rows.sales.sum())

    def called(frame: pd.DataFrame) -> int:
        results = many.run(train, frame, "store", kwargs={"folder": tmp_path}, run_config=config)
        assert dict(results.values()) == frame.groupby("store").sales.sum().to_dict()
        return len((tmp_path / "calls").read_text().split())

    assert called(frame) == 10
    assert called(frame.copy()) == 10, "the same rows, staged again"
    folder = tmp_path / "artifacts" / "nightly" / "1" / "partitions"
    assert sorted(os.listdir(folder)) == ["manifest.parquet", "plan.json", "results"]
    assert called(frame.assign(sales=2.0)) == 20


def test_a_changed_result_file_is_not_read(tmp_path: Path) -> None:
    config = RunConfig(job_id="changed", artifact_location=str(tmp_path))
    results = many.run(lambda rows, key: "text", pd.DataFrame({"store": [1]}), "store", run_config=config)
    [path] = tmp_path.glob("changed/1/partitions/results/*.parquet")
    table = pq.read_table(path)
    pq.write_table(
        table.set_column(table.column_names.index("value"), "value", pa.array([b"other"], pa.large_binary())), path
    )
    with pytest.raises(Exception, match="was changed after the job wrote it"):
        _ = results[1].value


def test_wrong_arguments_are_refused_before_a_worker_starts(table: Path) -> None:
    data = DataConnector.from_parquet(table)
    for arguments, error, said in (
        ({"by": "shop"}, DataError, '"shop"'),
        ({"by": []}, InvalidArgumentError, "by"),
        ({"by": ["store", "store"]}, InvalidArgumentError, "by names a column twice: store"),
        ({"by": "store", "columns": ["x"]}, DataError, '"x"'),
        ({"by": "store", "data": [1]}, InvalidArgumentError, "data must be a DataConnector, .*not list"),
        ({"by": "store", "fn": "train"}, InvalidArgumentError, "fn must be a function"),
        ({"by": "store", "data": pd.DataFrame({"store": [[1]]})}, DataError, "cannot be keys of partitions"),
        ({"by": "store", "data": pd.DataFrame({"store": []})}, DataError, "has no rows"),
    ):
        with pytest.raises(error, match=said):
            many.run(**{"fn": returned, "data": data, **arguments})


def test_if_all_partitions_fail_the_run_fails() -> None:
    def train(rows: pd.DataFrame, key: int) -> None:
        raise RuntimeError("no memory for models")

    with pytest.raises(TrainingError, match=r"has failed for all 3 partitions: .: RuntimeError: no memory for models"):
        many.run(train, pd.DataFrame({"store": [1, 2, 3]}), "store")
