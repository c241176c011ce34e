"""What a job leaves: nothing is replaced that it has not made, and no pickle is read that was changed."""

from __future__ import annotations

import os
from pathlib import Path

import cloudpickle
import pytest

from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs import JobResult, load_results
from shoal.jobs.driver.attempt_context import AttemptContext, Stopwatch
from shoal.jobs.driver.attempt_metrics import MetricSeries
from shoal.jobs.files import artifacts
from shoal.jobs.files.logs import log_path
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.state import Store
from shoal.state.schema import Job, JobState
from shoal.training.locations import MARKER
from shoal.training.pytorch.request import FunctionResult
from tests.support.job_results import result_of

KEY = Key("job", 1)
ORDER = Order("job", "retrain", "airflow:d/r", {"fingerprint": "q"}, {"api": "a", "gcs": "g"}, None)
ANSWER = FunctionResult((1, 2), {}, "/model", 2, 0, 1.0, ())


class Opened:
    """Makes a file when it is read from a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def place(store: Store, key: Key = KEY) -> AttemptContext:
    return AttemptContext(
        store, key, None, {}, {}, print, MetricSeries(key), print, Stopwatch(Job(created_at=0.0), 0.0)
    )


def finished(store: Store, location: Path, *, digest: bool = True) -> JobResult:
    """A function's job that has succeeded."""
    attempts.ask(store, ORDER, 1.0)
    attempts.start(store, KEY, {}, 2.0)
    folder = artifacts.folder(KEY, str(location))
    path, sha256 = artifacts.save_results(folder, place(store).claim(), ANSWER)
    result = result_of(results_path=path)
    said = {"result": result.model_dump(mode="json"), "results_digest": sha256 if digest else None}
    assert attempts.end(store, KEY, JobState.SUCCEEDED, 3.0, **said)
    return result


def test_changed_results_are_not_unpickled(store: Store, tmp_path: Path) -> None:
    result = finished(store, tmp_path)
    assert load_results(result) == ANSWER
    assert result.results_path is not None
    Path(result.results_path).write_bytes(cloudpickle.dumps(Opened(tmp_path / "opened")))
    with pytest.raises(JobError, match="was changed after job job wrote it, and is not read"):
        load_results(result)
    assert not (tmp_path / "opened").exists()


def test_results_of_a_job_that_the_store_does_not_know_are_not_read(store: Store, tmp_path: Path) -> None:
    result = finished(store, tmp_path).model_copy(update={"attempt": 7})
    with pytest.raises(JobError, match="attempt 7 of job"):
        load_results(result)


def test_an_attempts_folder_of_something_else_is_refused_before_training(store: Store, tmp_path: Path) -> None:
    attempts.ask(store, ORDER, 1.0)
    folder = tmp_path / "job" / "1"
    folder.mkdir(parents=True)
    (folder / "model.ubj").write_text("of another store")
    with pytest.raises(InvalidArgumentError, match="is not empty, and job"):
        artifacts.check(str(folder), place(store).claim(), str(tmp_path))
    assert (folder / "model.ubj").read_text() == "of another store"
    with pytest.raises(InvalidArgumentError, match="cannot be written to"):
        artifacts.check("/etc/passwd/job/1", place(store).claim(), "/etc/passwd")


def test_an_attempts_log_lies_beside_its_files(store: Store) -> None:
    attempts.ask(store, ORDER, 1.0)
    log = log_path(KEY)
    log.parent.mkdir(parents=True)
    log.write_text("begun")
    claim, folder = place(store).claim(), artifacts.folder(KEY, None)
    artifacts.check(folder, claim, None)
    artifacts.save_results(folder, claim, ANSWER)
    artifacts.check(folder, claim, None)
    assert sorted(path.name for path in log.parent.iterdir()) == [MARKER, "driver.log", "results.pkl"]


def test_only_the_newest_attempt_that_runs_is_current(store: Store) -> None:
    attempts.ask(store, ORDER, 1.0)
    assert not place(store).is_current()  # pending
    attempts.start(store, KEY, {}, 2.0)
    assert place(store).is_current()
    attempts.end(store, KEY, JobState.FAILED, 3.0, error="lost")
    assert not place(store).is_current()
    attempts.ask(store, ORDER, 4.0)
    second = Key("job", 2)
    attempts.start(store, second, {}, 5.0)
    assert place(store, second).is_current()
    assert not place(store).is_current()
    first, other = place(store).claim(), place(store, second).claim()
    assert (first.owner, first.attempt, other.attempt) == (other.owner, 1, 2)


def test_files_are_missing_only_where_this_process_can_know_it(store: Store, tmp_path: Path) -> None:
    def exist(path: str, **fields: str) -> bool:
        return artifacts.exist(result_of(model_path=path, **fields), None)

    written = tmp_path / "job" / "1" / "model.ubj"
    assert not exist(str(written))
    assert exist("/on-the-nodes-only/job/1/model.ubj")
    assert exist("unknown-protocol://bucket/job/1/model.ubj")
    assert not exist("shoal-store://jobs/job/1/model.ubj")
    assert exist(str(written), skipped="no new rows")
    assert not exist(str(tmp_path), results_path=str(tmp_path / "job" / "1" / "results.pkl"))
    assert not exist("models:/m/1", output_path=str(tmp_path / "predictions"))
    written.parent.mkdir(parents=True)
    written.touch()
    assert exist(str(written))
    assert exist("models:/m/1", output_path=str(tmp_path))
