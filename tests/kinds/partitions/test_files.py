"""The files of a job with partitions, in a local folder and at a URI: results, manifest, and folders of attempts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from shoal import RunConfig
from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs import remote_files
from shoal.jobs.files import storage
from shoal.kinds.partitions import result_files
from shoal.kinds.partitions.engine import WorkFolder
from shoal.kinds.partitions.partition_messages import ModelBytes, Outcome, Status
from shoal.kinds.partitions.partition_results import PartitionFailedError, PartitionResults
from shoal.kinds.partitions.result_files import (
    KEEP_EVERY_S,
    ResultWriter,
    complete_files,
    kept_outcomes,
    manifest_of,
    remove_tree,
)
from shoal.kinds.partitions.spec import PartitionsJobSpec
from shoal.pool.spec import PoolSpec
from shoal.training.locations import Claim


@pytest.fixture(params=["local", "uri"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "jobs")
        return
    yield f"memory://{tmp_path.name}/jobs"
    fsspec.filesystem("memory").store.clear()


def attempt(root: str, number: int, job: str = "job") -> tuple[str, WorkFolder]:
    claim, folder = Claim(job, "me", number), f"{root}/{job}/{number}"
    claim.mark(folder, shared=root)
    return folder, WorkFolder(folder, claim)


def outcome(key: int, value: bytes = b"", status: Status = "succeeded") -> Outcome:
    content = ModelBytes("pickle", value) if status == "succeeded" else None
    return Outcome(key, status, 1, 10 * key, 0.5, {"loss": 0.1}, "" if content else "why", "log", content)


def test_results_are_read_as_they_were_written(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cloudpickle

    monkeypatch.setattr(result_files, "ROW_GROUP_BYTES", 100)  # several row groups in a file
    _, work = attempt(root, 1)
    work.prepare("key", [])
    for bucket, keys in ((1, [5, 1]), (0, [3, 2, 4])):
        writer = ResultWriter(work.results, bucket, pa.int64())
        writer.expect(len(keys))
        for key in keys:
            writer.add(outcome(key, cloudpickle.dumps("x" * 50 + str(key)), "failed" if key == 2 else "succeeded"))
        writer.close()

    tables = complete_files(work.results, pa.int64())
    assert {bucket: table.num_rows for bucket, table in tables.items()} == {0: 3, 1: 2}
    assert complete_files(work.results, pa.string()) == {}
    storage.write(work.manifest, manifest_of(tables.values()))
    results = PartitionResults(work.manifest)
    assert results.keys == [1, 2, 3, 4, 5]
    assert dict(results.values()) == {key: "x" * 50 + str(key) for key in (1, 3, 4, 5)}
    assert (results[3].rows, results[3].metrics, results[3].log) == (30, {"loss": 0.1}, "log")
    assert (results[2].error, [each.key for each in results.failed]) == ("why", [2])
    with pytest.raises(PartitionFailedError, match="partition 2 has no value: why"):
        results[2].content()
    with pytest.raises(JobError, match="was changed after the job wrote it"):
        PartitionResults(work.manifest, "0" * 64)
    so_far = PartitionResults.so_far(work.path)
    assert (so_far.keys, so_far[2].error, so_far[3].log) == ([1, 2, 3, 4, 5], "why", "log")
    with pytest.raises(JobError, match="are not read, because the job has not succeeded"):
        so_far[3].content()


def test_a_file_that_lacks_partitions_is_not_complete(root: str) -> None:
    _, work = attempt(root, 1)
    work.prepare("key", [])
    writer = ResultWriter(work.results, 0, pa.int64())
    writer.expect(2)
    writer.add(outcome(1))
    writer.close()
    storage.write(f"{work.results}/bucket-00001.parquet", b"half")
    assert complete_files(work.results, pa.int64()) == {}


def test_kept_outcomes_that_are_gone_or_damaged_are_called_again(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(result_files, "monotonic", lambda: now)
    _, work = attempt(root, 1)
    work.prepare("key", [])
    writer = ResultWriter(work.results, 0, pa.int64())
    writer.add(outcome(1))
    now += KEEP_EVERY_S
    writer.keep()
    [name] = kept_outcomes(work.results, pa.int64())[0].column("file").to_pylist()
    storage.write(f"{work.results}/kept-00000-damaged.parquet", b"half")
    names = ["kept-00000-damaged.parquet", name, "kept-00000-gone.parquet"]
    assert ResultWriter(work.results, 0, pa.int64(), names).ended == {"int:1"}

    storage.write(f"{work.results}/bucket-00000.parquet", b"half")
    result_files.discard_leftovers(work.results)
    assert list(kept_outcomes(work.results, pa.int64())) == [0], "only a complete file replaces kept outcomes"


def test_outcomes_of_an_unfinished_bucket_are_kept_every_few_seconds_and_continued(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(result_files, "monotonic", lambda: now)
    first, work = attempt(root, 1)
    work.prepare("key", [])

    def kept() -> dict[int, pa.Table]:
        return kept_outcomes(work.results, pa.int64())

    writer = ResultWriter(work.results, 0, pa.int64())
    writer.expect(4)
    writer.add(outcome(1, b"one"))
    now += KEEP_EVERY_S - 0.1
    writer.keep()
    assert kept() == {}, "no file is written earlier"
    now += 0.1
    writer.keep()  # while the function of the next partition runs
    writer.add(outcome(2, status="failed"))
    assert kept()[0].column("key").to_pylist() == [1]
    now += KEEP_EVERY_S
    writer.add(outcome(3, b"three"))  # and the worker is killed
    storage.write(f"{work.results}/kept-00000-half.parquet", b"half")
    other = ResultWriter(work.results, 0, pa.int64())  # of a worker that was thought to be lost
    other.add(outcome(3, b"three"))
    now += KEEP_EVERY_S
    other.keep()
    assert sorted(kept()[0].column("key").to_pylist()) == [1, 2, 3]
    assert complete_files(work.results, pa.int64()) == {}

    _, again = attempt(root, 2)
    again.prepare("key", [first])
    names = kept_outcomes(again.results, pa.int64())[0].column("file").unique().to_pylist()
    writer = ResultWriter(again.results, 0, pa.int64(), names)
    assert writer.ended == {"int:1", "int:3"}  # the failed one is repeated
    writer.expect(4)
    writer.add(outcome(2, b"two"))
    writer.add(outcome(4, b"four"))
    writer.close()
    storage.write(f"{again.results}/kept-00000-half.parquet", b"half")
    again.discard_rows()
    assert kept_outcomes(again.results, pa.int64()) == {}
    tables = complete_files(again.results, pa.int64())
    storage.write(again.manifest, manifest_of(tables.values()))
    results = PartitionResults(again.manifest)
    assert [(each.key, each.status, each.attempts) for each in results] == [
        (1, "succeeded", 1), (2, "succeeded", 1), (3, "succeeded", 1), (4, "succeeded", 1)
    ]  # fmt: skip
    assert [results[key].content() for key in (1, 2, 3, 4)] == [b"one", b"two", b"three", b"four"]


def test_an_attempt_takes_over_the_folder_of_a_killed_one_with_the_same_plan(root: str) -> None:
    first, work = attempt(root, 1)
    work.prepare("key", [])
    storage.write(f"{work.rows}/rows-00000.arrow", b"rows")
    writer = ResultWriter(work.results, 0, pa.int64())
    writer.expect(1)
    writer.add(outcome(1))
    writer.close()

    other, foreign = attempt(root, 1, "other")
    foreign.prepare("key", [first])  # the folder of another job is not taken
    assert complete_files(foreign.results) == {}
    second, again = attempt(root, 2)
    again.prepare("another key", [first, other])
    assert complete_files(again.results) == {}
    assert len(complete_files(work.results)) == 1
    _, third = attempt(root, 3)
    third.prepare("key", [second, first])
    assert len(complete_files(third.results)) == 1
    assert complete_files(work.results) == {}
    assert storage.read(f"{third.rows}/rows-00000.arrow") == b"rows"
    third.prepare("key", [])  # the same attempt, again
    assert len(complete_files(third.results)) == 1

    storage.write(third.manifest, b"named by the store")
    _, fourth = attempt(root, 4)
    fourth.prepare("key", [third.path.rpartition("/")[0]])  # failed after all results were stored
    assert [len(complete_files(each.results)) for each in (third, fourth)] == [1, 1]
    assert storage.read(third.manifest) == b"named by the store"

    assert (third.new_claims() is None) == ("://" in root)
    third.discard_rows()
    with pytest.raises(OSError, match="rows"):
        storage.read(f"{third.rows}/rows-00000.arrow")
    assert len(complete_files(third.results)) == 1


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    (tmp_path / "rows").symlink_to(tmp_path / "other")
    remove_tree(str(tmp_path / "rows"))
    assert (tmp_path / "other" / "file").exists()


def test_nodes_that_share_no_folder_need_a_location_with_a_uri(fresh_home: Path) -> None:
    pool = PoolSpec.parse("ray://theirs?address=http://10.0.0.1:8265")
    spec = PartitionsJobSpec(
        function="models:train", by="store", dataset={"paths": ["s3://bucket/rows"]}, tracking=None
    )
    with pytest.raises(InvalidArgumentError, match=r"set run_config\.artifact_location to a URI in an object store"):
        remote_files.check(remote_files.located(spec, pool), pool)
    config = RunConfig(artifact_location="s3://bucket/jobs")
    remote_files.check(remote_files.located(spec.model_copy(update={"run_config": config}), pool), pool)
