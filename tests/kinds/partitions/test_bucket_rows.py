"""Rows that are divided into buckets on disk, and partitions that do not fit into memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from shoal.data import DataConnector
from shoal.errors import CapacityError
from shoal.kinds.partitions import bucket_rows
from shoal.kinds.partitions.bucket_rows import BatchInfo, BucketReader, chunks_of, read_index, write_chunk
from shoal.kinds.partitions.keys import bucket_of, key_text
from shoal.kinds.partitions.partition_messages import Bucket, Work
from shoal.kinds.partitions.partition_process import _Partitions

BUCKETS = 4


@pytest.fixture
def connector(tmp_path: Path) -> DataConnector:
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"store": random.integers(0, 30, 5_000), "x": random.random(5_000)})
    frame["name"] = pd.Categorical(random.choice(["a", "b"], 5_000))
    frame.to_parquet(tmp_path / "rows.parquet", row_group_size=1_500)
    return DataConnector.from_parquet(tmp_path / "rows.parquet")


@pytest.fixture
def divided(connector: DataConnector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[BatchInfo]]:
    """The places of the rows of each bucket. Each chunk is written in many parts."""
    monkeypatch.setattr(bucket_rows, "SPILL_BYTES", 10_000)
    (chunk,) = chunks_of(connector.source.row_groups())
    assert read_index(str(tmp_path), chunk) is None
    write_chunk(connector.source, chunk, ["store", "x", "name"], ["store"], BUCKETS, str(tmp_path))
    places: dict[int, list[BatchInfo]] = {}
    for bucket, place in read_index(str(tmp_path), chunk) or ():
        places.setdefault(bucket, []).append(place)
    assert len(places[0]) > 5
    return places


@pytest.mark.parametrize("budget", [10**9, 40_000])
def test_partitions_have_their_rows_in_order_whether_the_bucket_fits_into_memory_or_not(
    connector: DataConnector, divided: dict[int, list[BatchInfo]], tmp_path: Path, budget: int
) -> None:
    frame = connector.to_pandas()
    schema = connector.schema()
    reader = BucketReader(str(tmp_path), {name: schema.field(name).type for name in schema.names})
    work = Work(print, connector.source, ("store", "x", "name"), ("store",), str(tmp_path), 0, 1)
    seen = 0
    for bucket, places in divided.items():
        partitions = _Partitions(work, reader, Bucket(places, frozenset(), {}, budget))
        assert [partitions.rows[text] for text, _ in partitions.order] == sorted(partitions.rows.values(), reverse=True)
        for text, key in partitions.order:
            assert bucket_of(key_text(key), BUCKETS) == bucket
            found = partitions.table(text, key).to_pandas()
            expected = frame[frame["store"] == key].reset_index(drop=True)
            assert (found["x"] == expected["x"]).all()
            assert (found["name"].astype(str) == expected["name"].astype(str)).all()
            seen += len(found)
    assert seen == 5_000


def test_a_partition_that_does_not_fit_is_refused_with_figures_before_it_is_read(
    connector: DataConnector, divided: dict[int, list[BatchInfo]], tmp_path: Path
) -> None:
    schema = connector.schema()
    reader = BucketReader(str(tmp_path), {name: schema.field(name).type for name in schema.names})
    work = Work(print, connector.source, ("store", "x"), ("store",), str(tmp_path), 0, 1)
    partitions = _Partitions(work, reader, Bucket(divided[0], frozenset(), {}, 100))
    text, key = partitions.order[0]
    rows = partitions.rows[text]
    with pytest.raises(CapacityError, match=rf"the partition {key} has {rows} rows of 2\d bytes, which need 0 MiB"):
        partitions.table(text, key)
