"""Torch datasets over real Parquet files, by themselves and in a real DataLoader."""

from __future__ import annotations

import base64
import copy
import datetime
import decimal
import gc
import itertools
import json
import math
import pickle
import random
import sys
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shoal.data import DataConnector, RayDataIngester, ShardedDataConnector, shuffling
from shoal.data.planning import ALONE, GangPosition, set_current_position
from shoal.data.torch_dataset import TorchDataset
from shoal.errors import DataError, InvalidArgumentError, MissingExtraError
from tests.data.conftest import Write


def in_workers(*values: Any) -> Any:
    """Parameters with which the DataLoader starts processes."""
    return pytest.param(*values, marks=pytest.mark.processes)


WORKERS = [(0, False), in_workers(1, False), in_workers(2, False), in_workers(2, True)]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    set_current_position(ALONE)


@pytest.fixture
def numbers(write: Write) -> DataConnector:
    """103 rows, x = 0, 1, ..., in 11 row groups of two files."""
    write("numbers/0.parquet", 10, x=list(range(60)))
    write("numbers/1.parquet", 10, x=list(range(60, 103)))
    return DataConnector.from_parquet(write("numbers/2.parquet", x=pa.array([], pa.int64())).parent)


@pytest.fixture
def brief_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A DataLoader, whatever its dataset, waits five seconds at the end for a worker that raised an error."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()


@pytest.fixture
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the row groups were large: no more than four are shuffled at a time."""
    monkeypatch.setattr(shuffling, "BUFFER_ROWS", 1)


def xs(items: Any) -> list[int]:
    """The column x of all items, whether they are rows, batches or what DataLoader makes of either."""
    found: list[int] = []
    for item in items:
        x = item["x"]
        found += x.flatten().tolist() if isinstance(x, torch.Tensor) else [x]
    return found


def loader(dataset: TorchDataset, num_workers: int = 0, persistent: bool = False, **kwargs: Any) -> DataLoader:
    return DataLoader(dataset, num_workers=num_workers, persistent_workers=persistent, **kwargs)


# Items

TYPES: dict[str, tuple[pa.Array, torch.dtype]] = {
    "i8": (pa.array([1, -2, 3], pa.int8()), torch.int8),
    "i16": (pa.array([1, -2, 3], pa.int16()), torch.int16),
    "i32": (pa.array([1, -2, 3], pa.int32()), torch.int32),
    "i64": (pa.array([1, -2, 2**60], pa.int64()), torch.int64),
    "u8": (pa.array([1, 2, 255], pa.uint8()), torch.uint8),
    "u16": (pa.array([1, 2, 2**16 - 1], pa.uint16()), torch.int32),
    "u32": (pa.array([1, 2, 2**32 - 1], pa.uint32()), torch.int64),
    "u64": (pa.array([1, 2, 2**63 - 1], pa.uint64()), torch.int64),
    "f16": (pa.array(np.array([0.5, 1, 2], np.float16)), torch.float16),
    "f32": (pa.array([0.5, 1, 2], pa.float32()), torch.float32),
    "f64": (pa.array([0.1, 1, 2], pa.float64()), torch.float64),
    "bool": (pa.array([True, False, True]), torch.bool),
    "decimal": (pa.array([decimal.Decimal("1.25"), decimal.Decimal(2), decimal.Decimal(-3)]), torch.float64),
    "category": (pa.array([7, 9, 7]).dictionary_encode(), torch.int64),
}
OBJECTS: dict[str, pa.Array] = {
    "text": pa.array(["a", "", "ü" * 20]),
    "large": pa.array(["a", "b", "c"], pa.large_string()),
    "base64": pa.array([base64.b64encode(bytes([i] * 30)).decode() for i in range(3)]),
    "bytes": pa.array([b"a", b"\x00", b""]),
    "fixed": pa.array([b"ab", b"cd", b"ef"], pa.binary(2)),
    "categories": pa.array(["a", "b", "a"]).dictionary_encode(),
}


@pytest.fixture
def typed(write: Write) -> DataConnector:
    columns = {**{name: array for name, (array, _) in TYPES.items()}, **OBJECTS}
    return DataConnector.from_parquet(write("typed.parquet", 2, **columns))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_is_a_tensor_per_column(typed: DataConnector, shuffle: bool) -> None:
    (batch,) = typed.to_torch_dataset(batch_size=3, shuffle=shuffle)
    assert list(batch) == [*TYPES, *OBJECTS]
    order = [[1, -2, 3].index(value) for value in batch["i8"].tolist()]
    for name, (array, dtype) in TYPES.items():
        assert batch[name].dtype == dtype and batch[name].shape == (3,), name
        expected = [float(v) if isinstance(v, decimal.Decimal) else v for v in array.to_pylist()]
        assert batch[name].tolist() == [expected[i] for i in order], name
    for name, array in OBJECTS.items():
        assert batch[name] == [array[i].as_py() for i in order], name


def test_dataloader_adds_a_dimension(typed: DataConnector) -> None:
    batches = list(DataLoader(typed.to_torch_dataset(batch_size=2, columns=list(TYPES))))
    assert [{value.shape for value in batch.values()} for batch in batches] == [{(1, 2)}, {(1, 1)}]
    assert {name: value.dtype for name, value in batches[0].items()} == {n: dtype for n, (_, dtype) in TYPES.items()}
    whole = DataLoader(typed.to_torch_dataset(batch_size=2), batch_size=None)
    assert [batch["text"] for batch in whole] == [["a", ""], ["ü" * 20]]
    assert [batch["i64"].shape for batch in whole] == [(2,), (1,)]


def test_a_row_is_plain_python(typed: DataConnector) -> None:
    rows = list(typed.to_torch_dataset())
    assert len(rows) == 3
    kinds = {name: type(value) for name, value in rows[0].items()}
    floats = ("f16", "f32", "f64", "decimal")
    assert kinds == {
        **{name: float if name in floats else bool if name == "bool" else int for name in TYPES},
        **{name: bytes if name in ("bytes", "fixed") else str for name in OBJECTS},
    }
    assert [row["text"] for row in rows] == OBJECTS["text"].to_pylist()
    assert [row["u64"] for row in rows] == TYPES["u64"][0].to_pylist()
    assert [row["decimal"] for row in rows] == [1.25, 2.0, -3.0]
    (batch,) = DataLoader(typed.to_torch_dataset(), batch_size=8)
    assert batch["i8"].tolist() == [1, -2, 3] and batch["bool"].dtype == torch.bool
    assert batch["base64"] == OBJECTS["base64"].to_pylist() and batch["bytes"] == OBJECTS["bytes"].to_pylist()


PICTURES = [{"bytes": bytes([i]) * 9, "path": None if i else "a.png"} for i in range(5)]
"""Pictures as Hugging Face's library `datasets` writes them."""


def test_structs_and_lists_of_texts_are_plain_python(write: Write) -> None:
    words = [["a"], [], ["b", "c"], ["d"], ["e"]]
    connector = DataConnector.from_parquet(write("a.parquet", 2, picture=PICTURES, words=words, box=[[1, 2]] * 5))
    rows = list(connector.to_torch_dataset())
    assert [row["picture"] for row in rows] == PICTURES and [row["words"] for row in rows] == words
    assert rows[0]["box"].tolist() == [1, 2]
    first, second = connector.to_torch_dataset(batch_size=3)
    assert first["picture"] + second["picture"] == PICTURES and first["words"] + second["words"] == words
    assert first["box"].shape == (3, 2)
    shuffled = list(connector.to_torch_dataset(shuffle=True))
    assert sorted(row["picture"]["bytes"] for row in shuffled) == [one["bytes"] for one in PICTURES]


def test_few_pictures_are_shuffled_at_a_time(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffling, "BUFFER_BYTES", 5_000)
    pictures = [{"bytes": random.Random(i).randbytes(1_000)} for i in range(20)]
    connector = DataConnector.from_parquet(write("a.parquet", 2, picture=pictures))
    order = [row["picture"] for row in connector.to_torch_dataset(shuffle=True)]
    found = [pictures.index(picture) for picture in order]
    assert sorted(found) == list(range(20)) != found
    # Two row groups of two rows are shuffled together.
    assert all(len({number // 2 for number in found[i : i + 4]}) == 2 for i in range(0, 20, 4))


def test_numbers_get_a_dimension_of_their_own(typed: DataConnector) -> None:
    (batch,) = typed.to_torch_dataset(batch_size=3, expand_dims=True)
    assert {name: batch[name].shape for name in TYPES} == dict.fromkeys(TYPES, (3, 1))
    assert batch["text"] == OBJECTS["text"].to_pylist()
    rows = list(typed.to_torch_dataset(expand_dims=True))
    assert torch.cat([row["f64"] for row in rows]).tolist() == [0.1, 1, 2] and rows[0]["f64"].shape == (1,)
    (loaded,) = DataLoader(typed.to_torch_dataset(expand_dims=True, columns=["f64", "i8"]), batch_size=8)
    assert torch.cat([loaded["f64"], loaded["i8"]], dim=1).shape == (3, 2)


def test_batches_may_be_changed_and_kept(numbers: DataConnector) -> None:
    batches = list(numbers.to_torch_dataset(batch_size=4))
    for batch in batches:
        assert batch["x"].untyped_storage().nbytes() == 8 * len(batch["x"])
        batch["x"] += 1000
    assert xs(batches) == list(range(1000, 1103)) and xs(numbers.to_torch_dataset(4)) == list(range(103))


def test_nulls_are_nan_in_floats(write: Write) -> None:
    half = pa.array([np.float16(0.5), None, np.float16(2)], pa.float16())
    values = {"d": decimal.Decimal("0.5"), "f": 0.5, "g": 0.5}
    columns = {name: pa.array([value, None, value]) for name, value in values.items()}
    columns["g"] = columns["g"].cast(pa.float32())
    connector = DataConnector.from_parquet(write("a.parquet", h=half, **columns))
    (batch,) = connector.to_torch_dataset(batch_size=3)
    for name, value in batch.items():
        assert value.isnan().tolist() == [False, True, False], name
        assert value[0] == 0.5, name
    assert batch["h"].dtype == torch.float16
    rows = list(connector.to_torch_dataset())
    assert all(math.isnan(value) for value in rows[1].values())


@pytest.mark.parametrize(
    "values",
    [pa.array([1, None]), pa.array([True, None]), pa.array(["a", None]), pa.array(["a", None]).dictionary_encode()],
)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_other_nulls_are_refused_by_name(write: Write, values: pa.Array, batch_size: int | None) -> None:
    path = write("a.parquet", 2, bad=pa.concat_arrays([values.slice(0, 1)] * 4 + [values]))
    items = iter(DataConnector.from_parquet(path).to_torch_dataset(batch_size))
    for _ in range(2 if batch_size else 4):
        next(items)
    with pytest.raises(DataError, match=r"a\.parquet, row group 2: column \"bad\" .*null in 1 of 2 rows"):
        next(items)


def test_integers_that_torch_cannot_compute_with(write: Write) -> None:
    path = write("a.parquet", 1, u=pa.array([1, 2**63], pa.uint64()))
    items = iter(DataConnector.from_parquet(path).to_torch_dataset(batch_size=1))
    assert next(items)["u"].tolist() == [1]
    with pytest.raises(
        DataError, match=r"a\.parquet, row group 1: column \"u\" of type uint64 holds 9223372036854775808"
    ):
        next(items)


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        (pa.array([datetime.datetime(2026, 1, 1)]), "seconds since a fixed time"),
        (pa.array([datetime.date(2026, 1, 1)]), "day of the year"),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "separate column"),
        (pa.nulls(1), "null in every row"),
    ],
)
def test_types_that_torch_has_nothing_for(write: Write, values: pa.Array, advice: str) -> None:
    connector = DataConnector.from_parquet(write("a.parquet", x=[1], bad=values))
    with pytest.raises(DataError, match=rf"a\.parquet: column \"bad\" is of type .*{advice}.*columns="):
        connector.to_torch_dataset()
    assert list(connector.to_torch_dataset(columns=["x"])) == [{"x": 1}]


def test_columns(write: Write) -> None:
    path = write("a.parquet", alpha=[1, 2], beta=[3.0, 4.0], gamma=["a", "b"])
    connector = DataConnector.from_parquet(path)
    assert list(connector.to_torch_dataset(columns=["beta", "alpha"])) == [
        {"beta": 3.0, "alpha": 1},
        {"beta": 4.0, "alpha": 2},
    ]
    assert [list(row) for row in connector.to_torch_dataset(columns=("gamma", "alpha"))] == [["gamma", "alpha"]] * 2
    connector.num_rows()
    path.write_bytes(b"never read")
    with pytest.raises(DataError, match='no column "alpa"; did you mean "alpha"'):
        connector.to_torch_dataset(columns=["beta", "alpa"])
    for columns in ("alpha", [], ["alpha", "alpha"], [1]):
        with pytest.raises(InvalidArgumentError, match="column"):
            connector.to_torch_dataset(columns=columns)


@pytest.mark.parametrize("batch_size", [0, -1, True, 2.0, "8"])
def test_batch_size_is_refused_by_name(numbers: DataConnector, batch_size: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="batch_size"):
        numbers.to_torch_dataset(batch_size)


def test_files_that_differ_and_no_rows(write: Write, tmp_path: Path) -> None:
    write("d/0.parquet", x=pa.array([1], pa.int32()), c=pa.array(["a"]).dictionary_encode())
    write("d/1.parquet", x=pa.array([1], pa.int64()), c=pa.array(["b"], pa.large_string()))
    connector = DataConnector.from_parquet(tmp_path / "d")
    assert list(connector.to_torch_dataset()) == [{"x": 1, "c": "a"}, {"x": 1, "c": "b"}]
    write("d/1.parquet", x=["1"])
    with pytest.raises(DataError, match=r"1\.parquet: column \"x\" is of type string, but of type int32 in"):
        DataConnector.from_parquet(tmp_path / "d").to_torch_dataset(columns=["x"])
    empty = DataConnector.from_parquet(write("e.parquet", x=pa.array([], pa.int64())))
    with pytest.raises(DataError, match="no rows"):
        empty.to_torch_dataset()


def test_partitions_and_splits(write: Write, tmp_path: Path) -> None:
    write("p/month=1/a.parquet", 5, x=list(range(20)))
    write("p/month=2/a.parquet", 5, x=list(range(20, 40)))
    whole = DataConnector.from_parquet(tmp_path / "p")
    rows = next(iter(whole.to_torch_dataset(batch_size=40, shuffle=True)))
    assert sorted(rows["x"].tolist()) == list(range(40))
    assert ((rows["x"] >= 20) == (rows["month"] == 2)).all()
    parts = [xs(part.to_torch_dataset(7, shuffle=True)) for part in whole.random_split([0.7, 0.3])]
    assert [len(part) for part in parts] == [28, 12] and sorted(parts[0] + parts[1]) == list(range(40))


# Order


def test_order_without_shuffle(numbers: DataConnector) -> None:
    dataset = numbers.to_torch_dataset()
    assert xs(dataset) == xs(dataset) == list(range(103))
    assert [len(batch["x"]) for batch in numbers.to_torch_dataset(25)] == [25, 25, 25, 25, 3]


@pytest.mark.parametrize("batch_size", [None, 7])
def test_each_epoch_has_a_new_seeded_order(numbers: DataConnector, batch_size: int | None, small_buffer: None) -> None:
    dataset, again = (numbers.to_torch_dataset(batch_size, shuffle=True) for _ in range(2))
    epochs = [xs(dataset) for _ in range(4)]
    assert all(sorted(epoch) == list(range(103)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4 and list(range(103)) not in epochs
    assert [xs(again) for _ in range(4)] == epochs
    # Row groups are shuffled, and their rows into one another.
    groups = [x // 10 for x in epochs[0]]
    assert 1 < len(set(groups[:33])) <= 4 and groups[:33] != sorted(groups[:33], key=groups.index)
    again.set_epoch(2)
    assert [xs(again), xs(again)] == epochs[2:]
    for rank, seed in ((0, 1), (1, 0)):
        set_current_position(GangPosition(rank, 2, seed))
        assert xs(numbers.to_torch_dataset(batch_size, shuffle=True)) != epochs[0]
    with pytest.raises(InvalidArgumentError, match="-1"):
        dataset.set_epoch(-1)


def test_an_iterator_that_is_not_used_is_no_epoch(numbers: DataConnector) -> None:
    dataset, again = (numbers.to_torch_dataset(shuffle=True) for _ in range(2))
    iter(dataset)
    first, second = iter(dataset), iter(dataset)
    assert list(itertools.islice(first, 50)) + list(second) + list(first) == [
        *itertools.islice(again, 50),
        *again,
        *(row for i, row in enumerate(numbers.to_torch_dataset(shuffle=True)) if i >= 50),
    ]


# DataLoader's workers


@pytest.mark.parametrize(("num_workers", "persistent"), WORKERS)
@pytest.mark.parametrize("batch_size", [None, 8])
def test_workers_divide_the_rows_in_every_epoch(
    numbers: DataConnector, batch_size: int | None, num_workers: int, persistent: bool
) -> None:
    outer = {"batch_size": 4} if batch_size is None else {}
    several = loader(numbers.to_torch_dataset(batch_size, shuffle=True), num_workers, persistent, **outer)
    epochs = []
    for _ in range(3):
        torch.manual_seed(0)  # As someone does who wants each epoch to be repeatable: no reason to repeat the order.
        epochs.append(xs(several))
    assert all(sorted(epoch) == list(range(103)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # A new DataLoader for each epoch, new workers, other random numbers of DataLoader's: the same orders.
    dataset = numbers.to_torch_dataset(batch_size, shuffle=True)
    assert [xs(loader(dataset, num_workers, **outer)) for _ in range(2)] == epochs[:2]
    dataset.set_epoch(0)
    assert xs(loader(dataset, num_workers, **outer)) == epochs[0]


def test_one_worker_hands_out_what_none_does(numbers: DataConnector) -> None:
    one, none = (loader(numbers.to_torch_dataset(8, shuffle=True), workers) for workers in (1, 0))
    assert xs(one) == xs(none)


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_go_on_after_one_that_was_left(numbers: DataConnector, persistent: bool) -> None:
    whole = loader(numbers.to_torch_dataset(8, shuffle=True), 2, persistent)
    epochs = [xs(whole) for _ in range(3)]
    left = loader(numbers.to_torch_dataset(8, shuffle=True), 2, persistent)
    next(iter(left))
    assert [xs(left), xs(left)] == epochs[1:]
    # The main process counts on from its workers, and they from it.
    alone = numbers.to_torch_dataset(8, shuffle=True)
    alone.set_epoch(3)
    assert xs(left.dataset) == xs(alone)
    assert xs(left) == xs(loader(alone, 2))
    # Workers that live on hear of it, too.
    left.dataset.set_epoch(1)
    assert xs(left) == epochs[1]


@pytest.mark.parametrize("num_workers", [0, in_workers(1), in_workers(2)])
def test_length_is_right_with_any_number_of_workers(numbers: DataConnector, num_workers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dataset, outer, expected in (
            (numbers.to_torch_dataset(8), 1, 13),
            (numbers.to_torch_dataset(8, drop_last_batch=True), 1, 12),
            (numbers.to_torch_dataset(8), None, 13),
            (numbers.to_torch_dataset(), 2, 52),
        ):
            batches = DataLoader(dataset, num_workers=num_workers, batch_size=outer)
            assert len(batches) == expected == sum(1 for _ in batches)
    assert len(numbers.to_torch_dataset()) == 103


@pytest.mark.processes
def test_spawned_workers_count_with_the_others(numbers: DataConnector) -> None:
    dataset, plain = (numbers.to_torch_dataset(8, shuffle=True) for _ in range(2))
    spawned = loader(dataset, 1, multiprocessing_context="spawn")
    assert [xs(spawned), xs(dataset)] == [xs(plain), xs(plain)]


@pytest.mark.parametrize("make", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_copies_count_for_themselves(numbers: DataConnector, make: Any) -> None:
    dataset = numbers.to_torch_dataset(8, shuffle=True)
    first = xs(dataset)
    other = make(dataset)
    second = xs(dataset)
    assert first != second == xs(other)
    assert sorted(xs(loader(other, 2))) == list(range(103))


# Positions


@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_at_a_position(
    numbers: DataConnector, batch_size: int | None, shuffle: bool, small_buffer: None
) -> None:
    def make() -> TorchDataset:
        return numbers.to_torch_dataset(batch_size, shuffle)

    plain = make()
    epochs = [[xs([item]) for item in plain] for _ in range(4)]
    watched = make()
    list(watched)
    for before in range(0, len(epochs[1]), 1 if batch_size else 9):
        watched.set_epoch(1)
        items = iter(DataLoader(watched, batch_size=None))
        given = [xs([next(items)]) for _ in range(before)]
        state = json.loads(json.dumps(watched.state_dict()))
        assert state["epoch"] == 1 and state["items"] == before
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.state_dict()["items"] == before
        rest = [[xs([item]) for item in DataLoader(resumed, batch_size=None)] for _ in range(3)]
        assert [given + rest[0], *rest[1:]] == epochs[1:]
        assert given + [xs([item]) for item in items] == epochs[1]


def test_resume_at_the_end_of_an_epoch(numbers: DataConnector) -> None:
    plain = numbers.to_torch_dataset(8, shuffle=True)
    list(plain)
    state = plain.state_dict()
    assert state["ended"]
    resumed = numbers.to_torch_dataset(8, shuffle=True)
    resumed.load_state_dict(state)
    assert xs(resumed) == xs(plain)
    # The epoch counts whoever reads it; a position in its midst needs the same rows in the same order.
    other = numbers.to_torch_dataset(16, shuffle=True)
    other.load_state_dict(state)
    assert other.state_dict()["epoch"] == 1


def test_positions_elsewhere_are_refused(numbers: DataConnector) -> None:
    dataset = numbers.to_torch_dataset(8, shuffle=True)
    next(iter(dataset))
    state = dataset.state_dict()
    set_current_position(GangPosition(1, 2))
    others = [numbers.to_torch_dataset(8, shuffle=True)]
    set_current_position(ALONE)
    others += [numbers.to_torch_dataset(9, shuffle=True), numbers.to_torch_dataset(8)]
    others += [part.to_torch_dataset(8, shuffle=True) for part in numbers.random_split([1, 1])]
    for other, name in zip(others, ("rank", "batch_size", "shuffle", "plan", "plan"), strict=True):
        with pytest.raises(InvalidArgumentError, match=f"{name} was .*set_epoch"):
            other.load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match="must be a result of"):
        dataset.load_state_dict({"step": 1})


@pytest.mark.processes
def test_a_position_is_not_for_workers(numbers: DataConnector, brief_end: None) -> None:
    dataset = numbers.to_torch_dataset(8, shuffle=True)
    next(iter(dataset))
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(InvalidArgumentError, match="called in the main process"):
        next(iter(loader(dataset, 1)))


@pytest.mark.processes
def test_only_its_loader_knows_where_workers_are(numbers: DataConnector) -> None:
    dataset = numbers.to_torch_dataset(8, shuffle=True)
    list(loader(dataset, 2))
    with pytest.raises(InvalidArgumentError, match="StatefulDataLoader"):
        dataset.state_dict()
    dataset.set_epoch(1)
    assert dataset.state_dict()["epoch"] == 1


class Watched(IterableDataset):
    """Hands out each item with the position after it, as StatefulDataLoader's workers note it."""

    def __init__(self, dataset: TorchDataset, states: dict[int, Any] | None = None) -> None:
        self.dataset = dataset
        self.states = states or {}

    def __iter__(self) -> Iterator[tuple[list[int], int, dict[str, Any]]]:
        worker = get_worker_info().id
        # What StatefulDataLoader's workers do before they make their iterator; with forked ones, once.
        if worker in self.states:
            self.dataset.load_state_dict(self.states.pop(worker))
        items = iter(self.dataset)
        for item in items:
            yield xs([item]), worker, self.dataset.state_dict()


@pytest.mark.processes
@pytest.mark.parametrize("left", [1, 2, 5, 9, 12])
def test_resume_in_workers(numbers: DataConnector, left: int) -> None:
    def make(states: dict[int, Any] | None = None) -> DataLoader:
        watched = Watched(numbers.to_torch_dataset(8, shuffle=True), states)
        return DataLoader(watched, batch_size=None, num_workers=2, persistent_workers=True)

    plain = make()
    list(plain)
    epoch, following = list(plain), [x for x, _, _ in plain]
    states = {worker: state for _, worker, state in epoch[:left]}
    assert all(state["epoch"] == 1 and state["num_workers"] == 2 for state in states.values())
    if left == 12:
        states = {worker: {**state, "ended": True} if worker == 0 else state for worker, state in states.items()}
    if len(states) < 2:
        # The other worker's position before its first item.
        states[1] = {**states[0], "items": 0, "worker": 1}
    resumed = make(states)
    rest = list(resumed)
    for worker in range(2):
        given = [x for x, who, _ in epoch[:left] if who == worker]
        assert given + [x for x, who, _ in rest if who == worker] == [x for x, who, _ in epoch if who == worker]
    assert [x for x, _, _ in resumed] == following


# Gangs


@pytest.mark.parametrize("num_workers", [0, in_workers(2)])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_ranks_have_as_many_items(write: Write, batch_size: int | None, num_workers: int) -> None:
    # Groups of 7 and one of 1: shards of 21, 21 and 22 rows.
    connector = ShardedDataConnector.from_parquet(write("a.parquet", 7, x=list(range(64))))
    found: list[list[int]] = []
    items = []
    own = []
    for rank in range(3):
        set_current_position(GangPosition(rank, 3, seed=0))
        shard = connector.get_shard()
        own.append(shard.to_arrow(["x"])["x"].to_pylist())
        dataset = shard.to_torch_dataset(batch_size, shuffle=True)
        epochs = [list(loader(dataset, num_workers)) for _ in range(2)]
        assert set(xs(epochs[0])) == set(xs(epochs[1])) == set(own[rank])
        assert len(epochs[0]) == len(epochs[1]) == len(dataset)
        found.append(xs(epochs[0]))
        items.append(len(dataset))
        assert sorted(xs(shard.to_torch_dataset(batch_size, shuffle=True, pad=False))) == sorted(own[rank])
    sizes = {len(rows) for rows in own}
    assert sorted(itertools.chain(*own)) == list(range(64)) and len(sizes) > 1
    assert {len(rows) for rows in found} == {max(sizes)} and len(set(items)) == 1


@pytest.mark.parametrize("num_workers", [0, in_workers(2)])
def test_ranks_drop_as_many_rows(write: Write, num_workers: int) -> None:
    connector = ShardedDataConnector.from_parquet(write("a.parquet", 7, x=list(range(64))))
    counts = []
    for rank in range(3):
        set_current_position(GangPosition(rank, 3, seed=0))
        dataset = connector.get_shard().to_torch_dataset(11, shuffle=True, drop_last_batch=True)
        batches = list(loader(dataset, num_workers))
        assert {batch["x"].shape for batch in batches} == {(1, 11)}
        counts.append(len(batches))
    assert counts == [2, 2, 2]


@pytest.mark.parametrize("num_workers", [0, in_workers(2)])
def test_other_rows_are_dropped_in_every_epoch(numbers: DataConnector, num_workers: int) -> None:
    several = loader(numbers.to_torch_dataset(10, shuffle=True, drop_last_batch=True), num_workers)
    epochs = [xs(several) for _ in range(3)]
    assert [len(set(epoch)) for epoch in epochs] == [100] * 3
    assert len({frozenset(epoch) for epoch in epochs}) > 1
    plain = numbers.to_torch_dataset(10, drop_last_batch=True)
    assert xs(plain) == list(range(100))
    assert list(numbers.to_torch_dataset(200, drop_last_batch=True)) == []


def test_a_plain_connector_has_all_rows_on_every_rank(numbers: DataConnector) -> None:
    set_current_position(GangPosition(1, 2))
    assert xs(numbers.to_torch_dataset(8)) == list(range(103))


# Memory, and files that fail


# Arrow's threads may free a buffer after the read has ended: a pool that is gone by then crashes the interpreter.
_POOLS: list[pa.MemoryPool] = []


# Of 12 row groups: one in Arrow's memory, or the two of the buffer, and those that Arrow's threads free a moment late.
@pytest.mark.parametrize(("shuffle", "most_arrow", "most_numpy"), [(False, 3, 0.2), (True, 4, 2.6)])
def test_one_row_group_at_a_time_and_the_buffer(
    write: Write, shuffle: bool, most_arrow: float, most_numpy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 20_000
    path = write("a.parquet", rows, **{f"x{i}": np.arange(12 * rows, dtype=np.float64) for i in range(8)})
    group = 8 * 8 * rows
    monkeypatch.setattr(shuffling, "BUFFER_BYTES", 2 * group)
    dataset = DataConnector.from_parquet(path).to_torch_dataset(1_000, shuffle=shuffle)
    whole, counted = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    _POOLS.append(counted)
    pa.set_memory_pool(counted)
    tracemalloc.start()
    try:
        assert sum(len(batch["x0"]) for batch in dataset) == 12 * rows
        _, numpy_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(whole)
    assert 0.9 * group <= counted.max_memory() <= most_arrow * group
    assert numpy_peak <= most_numpy * group


@pytest.mark.parametrize("num_workers", [0, in_workers(1)])
def test_corrupt_row_group(write: Write, num_workers: int, brief_end: None) -> None:
    path = write("a.parquet", 1000, x=np.random.default_rng(0).random(3000))
    dataset = DataConnector.from_parquet(path).to_torch_dataset(500)
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data[start : start + 200] = b"\xff" * 200
    path.write_bytes(data)
    batches = iter(loader(dataset, num_workers))
    assert [next(batches)["x"].shape for _ in range(2)] == [(1, 500)] * 2
    with pytest.raises(DataError, match=r"a\.parquet, row group 1, is corrupt"):
        next(batches)


@pytest.mark.parametrize("num_workers", [0, in_workers(1)])
def test_vanished_and_changed_files(write: Write, num_workers: int, brief_end: None) -> None:
    write("d/0.parquet", 10, x=list(range(10)))
    path = write("d/1.parquet", 10, x=list(range(10)))
    dataset = DataConnector.from_parquet(path.parent).to_torch_dataset(10)
    write("d/1.parquet", 5, x=list(range(10)))
    batches = iter(loader(dataset, num_workers))
    next(batches)
    with pytest.raises(DataError, match=r"1\.parquet was changed .*row group 0"):
        next(batches)
    path.unlink()
    batches = iter(loader(dataset, num_workers))
    next(batches)
    with pytest.raises(DataError, match=r"1\.parquet is gone.*row group 0"):
        next(batches)


# Beside it


@pytest.mark.processes
def test_ray_does_not_read_in_workers(numbers: DataConnector, brief_end: None) -> None:
    connector = DataConnector(numbers.source, RayDataIngester)
    with pytest.raises(InvalidArgumentError, match="num_workers=0"):
        next(iter(loader(connector.to_torch_dataset(8), 1)))


@pytest.mark.ray
def test_ray_reads_the_same_items(numbers: DataConnector, local_ray: None) -> None:
    connector = DataConnector(numbers.source, RayDataIngester)
    assert xs(connector.to_torch_dataset(8, shuffle=True)) == xs(numbers.to_torch_dataset(8, shuffle=True))


def test_without_torch(numbers: DataConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shoal.data.torch_dataset", raising=False)
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.utils.data")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"shoal\[torch\]"):
        numbers.to_torch_dataset()


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int8", "int64", "fixed", "tensor", "nested"])
def test_lists_are_tensors(write: Write, kind: str, shuffle: bool, batch_size: int | None) -> None:
    dtype = kind if kind[-1].isdigit() else "float32"
    given = np.arange(60).reshape((10, 3, 2) if kind in ("tensor", "nested") else (10, 6)).astype(dtype)
    element = pa.from_numpy_dtype(given.dtype)
    if kind == "tensor":
        values: Any = pa.FixedShapeTensorArray.from_numpy_ndarray(given)
    elif kind == "nested":
        values = pa.array(given.tolist(), pa.list_(pa.list_(element, 2), 3))
    elif kind == "fixed":
        values = pa.FixedSizeListArray.from_arrays(pa.array(given.ravel()), 6)
    else:
        values = pa.array(list(given))  # as from pandas
    data = DataConnector.from_parquet(write("0.parquet", 3, i=list(range(10)), v=values))
    dataset = data.to_torch_dataset(batch_size=batch_size, shuffle=shuffle)
    items = list(DataLoader(dataset, batch_size=None if batch_size else 4))
    rows = torch.cat([item["i"] for item in items])
    assert sorted(rows.tolist()) == list(range(10))
    found = torch.cat([item["v"] for item in items])
    assert found.dtype == torch.from_numpy(given).dtype
    assert torch.equal(found, torch.from_numpy(given)[rows])


def test_null_elements_of_lists_are_nan_and_files_have_lists_of_one_length(write: Write) -> None:
    first = write("0.parquet", v=pa.array([[1.0, None], [None, 4.0]], pa.large_list(pa.float32())))
    (item,) = DataConnector.from_parquet(first).to_torch_dataset(batch_size=2)
    right = torch.from_numpy(np.array([[1, np.nan], [np.nan, 4]], np.float32))
    assert torch.equal(item["v"].nan_to_num(-1), right.nan_to_num(-1))
    second = write("1.parquet", v=pa.array([[1.0, 2.0, 3.0]], pa.large_list(pa.float32())))
    with pytest.raises(DataError, match=r"1\.parquet, row group 0: .* \(3 elements here, but 2 in .*0\.parquet"):
        DataConnector.from_parquet([first, second]).to_torch_dataset()


@pytest.mark.parametrize("kind", ["list", "fixed", "tensor", "nested"])
def test_lists_of_filtered_ranks_are_padded_and_resumed(write: Write, kind: str) -> None:
    given = np.arange(192).reshape((32, 3, 2) if kind in ("tensor", "nested") else (32, 6)).astype("float32")
    values = pa.FixedShapeTensorArray.from_numpy_ndarray(given) if kind == "tensor" else pa.array(given.tolist())
    if kind in ("fixed", "nested"):
        values = values.cast(pa.list_(pa.float32(), 6) if kind == "fixed" else pa.list_(pa.list_(pa.float32(), 2)))
    path = write("0.parquet", 7, i=list(range(32)), v=values)
    connector = ShardedDataConnector.from_parquet(path, filters=[("i", "not in", [0, 5, 6, 20])])
    seen: list[int] = []
    for rank, batch_size in itertools.product(range(3), [None, 4]):
        set_current_position(GangPosition(rank, 3, seed=1))
        dataset, resumed = (connector.get_shard().to_torch_dataset(batch_size, shuffle=True) for _ in range(2))
        items = iter(dataset)
        first = list(itertools.islice(items, 2))
        resumed.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
        epoch = [*first, *resumed]
        rows = torch.cat([torch.tensor(item["i"]).reshape(-1) for item in epoch])
        found = torch.cat([item["v"].reshape(-1, *given.shape[1:]) for item in epoch])
        assert torch.equal(found, torch.from_numpy(given)[rows])
        assert len(rows) == 10 and all(torch.equal(x["v"], y["v"]) for x, y in zip(items, epoch[2:], strict=True))
        seen += rows.tolist()
    assert set(seen) == set(range(32)) - {0, 5, 6, 20}


def test_lists_that_filters_leave_out_do_not_count(write: Write) -> None:
    path = write("0.parquet", 3, i=list(range(6)), v=[[1, 2], [1, 2, 3, 4], [3, 4], None, [5, 6], []])
    (item,) = DataConnector.from_parquet(path, filters=[("i", "in", [0, 2, 4])]).to_torch_dataset(3)
    assert item["v"].tolist() == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(DataError, match=r"row group 0: .* list of 4 elements at row 1, but lists of 2 in other rows"):
        list(DataConnector.from_parquet(path, filters=[("i", "in", [0, 1])]).to_torch_dataset(2))


@pytest.mark.parametrize(
    "values", [pa.array([[1, 2], None]), pa.array([[1, 2], [1, None]]), pa.array([[1.0], [], [1.0, 2.0]])]
)
def test_lists_that_are_no_tensor_are_refused(write: Write, values: pa.Array) -> None:
    data = DataConnector.from_parquet(write("0.parquet", v=values))
    with pytest.raises(DataError, match='column "v"'):
        list(data.to_torch_dataset(batch_size=2))
