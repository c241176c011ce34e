"""The Ray Data ingester on a real local Ray: the same rows as the Arrow ingester, none dropped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from shoal.compat import snowflake
from shoal.data import ArrowIngester, DataConnector, RayDataIngester, ShardedDataConnector, ingest
from shoal.data.ingest import cpus_to_read
from shoal.errors import DataError

from .conftest import Write

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def test_without_ray_it_says_what_to_do(write: Write) -> None:
    # In a process of its own: another test here may have started Ray.
    path = write("a.parquet", x=[1])
    code = (
        "from shoal.data import *\n"
        f"c = DataConnector.from_parquet({str(path)!r}, ingestor_class=RayDataIngester)\n"
        "for call in (c.to_ray_dataset, lambda: list(c.ingester().iter_batches(c.plan(1, 0)[0]))):\n"
        "    try: call()\n"
        "    except Exception as exc: print(type(exc).__name__, exc)\n"
        "import ray; print(ray.is_initialized())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=True
    )
    lines = result.stdout.splitlines()
    assert len(lines) == 3 and all("InvalidArgumentError this process is not connected to Ray" in x for x in lines[:2])
    assert lines[2] == "False"


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("workers", [1, 3])  # of three workers, each gets a share of every row group
def test_same_tables_as_arrow(write: Write, tmp_path: Path, workers: int) -> None:
    for i in range(3):
        write(f"d/m={i}/a.parquet", 70, x=list(range(i * 200, i * 200 + 200)), y=[1.0] * 200)
    connector = DataConnector.from_parquet(tmp_path / "d", ingestor_class=RayDataIngester)
    seen: list[int] = []
    for shard in connector.plan(workers, seed=0):
        through_ray = list(connector.ingester().iter_batches(shard, ["x", "m"]))
        directly = list(ArrowIngester(connector.source).iter_batches(shard, ["x", "m"]))
        assert all(one.equals(other) for one, other in zip(through_ray, directly, strict=True))
        seen += [x for table in through_ray for x in table["x"].to_pylist()]
    assert sorted(seen) == list(range(600))


@pytest.mark.usefixtures("local_ray")
def test_tables_that_ray_cuts_into_blocks_are_put_together(write: Write) -> None:
    import ray.data

    path = write("a.parquet", 20_000, x=list(range(50_000)))
    connector = DataConnector.from_parquet(path, ingestor_class=RayDataIngester)
    context = ray.data.DataContext.get_current().copy()
    context.target_max_block_size = 10_000
    with ray.data.DataContext.current(context):
        tables = list(connector.ingester().iter_batches(connector.plan(1, 0)[0], ["x"]))
    assert [table.num_rows for table in tables] == [20_000, 20_000, 10_000]
    assert [x for table in tables for x in table["x"].to_pylist()] == list(range(50_000))


@pytest.mark.usefixtures("local_ray")
def test_workers_that_claim_half_the_cpus_leave_enough_to_read_with(write: Write) -> None:
    """Two workers on two CPUs, both reading at once: with whole CPUs claimed, the read tasks would wait for ever."""
    import ray

    path = write("a.parquet", 50, x=list(range(1000)))
    connector = ShardedDataConnector.from_parquet(path, ingestor_class=RayDataIngester)

    @ray.remote(num_cpus=1 - cpus_to_read(1, 1))
    class Worker:
        def read(self, connector: ShardedDataConnector, rank: int) -> list[int]:
            from shoal.data.planning import GangPosition, set_current_position

            set_current_position(GangPosition(rank, 2, seed=0))
            values: list[int] = connector.get_shard().to_arrow(["x"])["x"].to_pylist()
            return values

    workers = [Worker.remote() for _ in range(2)]
    parts = ray.get([worker.read.remote(connector, rank) for rank, worker in enumerate(workers)], timeout=90)
    assert [len(part) for part in parts] == [500, 500]
    assert sorted(x for part in parts for x in part) == list(range(1000))


@pytest.mark.usefixtures("local_ray")
def test_a_line_says_that_no_cpu_is_free_to_read(
    write: Write, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import ray

    monkeypatch.setattr(ingest, "WAIT_LINE_S", 0.1)
    connector = DataConnector.from_parquet(write("a.parquet", x=[1, 2]), ingestor_class=RayDataIngester)
    busy = ray.remote(num_cpus=2)(type("Busy", (), {"ready": lambda self: None})).remote()
    ray.get(busy.ready.remote())
    said: list[str] = []

    def note(path: str) -> None:
        report(path)
        said.append(capfd.readouterr().out)
        ray.kill(busy)

    report = ingest._say_if_no_cpu_is_free
    monkeypatch.setattr(ingest, "_say_if_no_cpu_is_free", note)
    [table] = connector.ingester().iter_batches(connector.plan(1, 0)[0])
    assert table["x"].to_pylist() == [1, 2] and "Ray Data waits for a CPU to read" in said[0]
    assert "2 of the cluster's 2 CPUs are reserved" in said[0]


@pytest.mark.usefixtures("local_ray")
def test_errors_name_the_file(write: Write) -> None:
    path = write("a.parquet", x=[1, 2])
    connector = DataConnector.from_parquet(path, ingestor_class=RayDataIngester)
    [shard] = connector.plan(1, 0)
    with pytest.raises(DataError, match=r'a\.parquet has no column "nope"'):
        list(connector.ingester().iter_batches(shard, ["nope"]))
    path.unlink()
    with pytest.raises(DataError, match=r"a\.parquet is gone"):
        list(connector.ingester().iter_batches(shard, ["x"]))


@pytest.mark.usefixtures("local_ray")
def test_to_and_from_ray_datasets(write: Write) -> None:
    path = write("a.parquet", 30, x=list(range(100)))
    part = DataConnector.from_parquet(path).random_split([0.5, 0.5])[0]
    dataset = part.to_ray_dataset()
    assert dataset.take_all() == part.to_arrow().to_pylist()

    def double(batch: pa.Table) -> pa.Table:
        import pyarrow.compute as pc

        return batch.append_column("z", pc.multiply(batch["x"], 2))

    staged = ShardedDataConnector.from_ray_dataset(dataset.map_batches(double, batch_format="pyarrow"))
    assert staged.ingestor_class is RayDataIngester and staged.num_rows() == 50
    assert sorted(staged.to_arrow().to_pylist(), key=lambda row: row["x"]) == [
        {"x": x, "z": 2 * x} for x in part.to_arrow()["x"].to_pylist()
    ]
    assert staged.discard_staging()


@pytest.mark.usefixtures("local_ray")
def test_snowflakes_constructors_take_its_arguments(write: Write) -> None:
    import ray.data

    path = write("a.parquet", x=[1, 2, 3])
    rows = ray.data.from_items([{"x": 1}, {"x": 2}, {"x": 3}])
    for connector in (
        snowflake.ShardedDataConnector.from_ray_dataset(rows, equal=True),
        snowflake.ShardedDataConnector.from_ray_dataset(rows, ArrowIngester, expand_dims=True),
        snowflake.ShardedDataConnector.from_sources(None, [str(path)], equal=True),
    ):
        assert sorted(connector.to_arrow()["x"].to_pylist()) == [1, 2, 3]
        assert next(iter(connector.to_torch_dataset(batch_size=2)))["x"].shape == (2, 1)
    assert snowflake.ShardedDataConnector.from_ray_dataset(rows, expand_dims=False).torch_defaults.expand_dims is False
