"""Rows of jobs that another writer of the store has planted or changed: what each does not lead to."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from shoal import jobs
from shoal.errors import JobError, StoreError
from shoal.jobs import credentials
from shoal.jobs.files.logs import log_path
from shoal.jobs.files.retention import prune_jobs
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.reconcile import acts
from shoal.jobs.reconcile.acts import Supplies
from shoal.jobs.reconcile.look import Target
from shoal.jobs.reconcile.rounds import settle_jobs
from shoal.jobs.results import JobResult
from shoal.state import Store
from shoal.state.home import home
from shoal.state.schema import Base, Job, JobMetrics, JobState, Promotion, PromotionState, StudyLog, Usage
from tests.support.job_store import POOL, add_pool

OWNER = "airflow:fraud/dag/run"


def planted(store: Store, job_id: str, attempt: int = 1, *, holder: str = OWNER, **columns: Any) -> Key:
    """Add the row of an attempt, as anyone can who may write to the store."""
    plain = {
        "pool": POOL, "state": JobState.RUNNING, "spec": {"fingerprint": "q"}, "endpoint": {"api": "a", "gcs": "g"},
        "submitter": {"boot": "b", "pid": 1, "start": 1, "host": "h", "python": "python", "folder": None},
        "created_at": 0.0, "last_polled_at": 0.0,
    }  # fmt: skip
    with store.transaction() as session:
        session.add(Job(id=job_id, attempt=attempt, holder=holder, **plain | columns))
    return Key(job_id, attempt)


def test_an_id_that_leads_to_another_folder_removes_nothing_and_the_other_jobs_are_settled(store, spec):
    outside = home() / "outside"
    folder = home().parent / f"{home().name}-work-1"
    for path in (outside, folder):
        path.mkdir()
        (path / "driver.log").write_text("keep")
    document = spec.completed(POOL, {}).document() | {"fingerprint": "q"}
    ids = [f"../../{folder.name.removesuffix('-1')}", "../outside", "..", "/etc"]
    for job_id in ids:
        planted(store, job_id, pool="gone", spec=document)
    for job_id in ids:
        planted(store, job_id, 2, state=JobState.FAILED, ended_at=1.0, spec=document)
    planted(store, "honest", pool="gone", spec=document)

    did = [str(each) for each in settle_jobs(store)]
    prune_jobs()

    assert any("job honest, attempt 1: failed" in each for each in did)
    assert sum("which no submission has made" in each for each in did) == len(ids)
    assert [(path / "driver.log").read_text() for path in (outside, folder)] == ["keep", "keep"]
    with pytest.raises(JobError, match="which no submission has made"):
        log_path(Key(ids[0], 1))
    for path in (outside, folder):
        (path / "driver.log").unlink()
        path.rmdir()


@pytest.mark.parametrize("attempt", [0, -1])
def test_the_number_of_an_attempt_is_checked(attempt):
    with pytest.raises(JobError, match="which no submission has made"):
        _ = Key("job", attempt).submission_id


def results(path: Path, ran: Path) -> tuple[str, str]:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(ran),)

    path.write_bytes(cloudpickle.dumps(Harmful()))
    return str(path), hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"holder": "airflow:ads/dag/run"}),
        ({"team": "fraud"}, {"team": "ads"}),
        ({"team": "fraud", "spec": {"fingerprint": "q", "run_config": {"job_id": "mine"}}}, {"team": "ads"}),
        ({"holder": "python:ann@host/1"}, {"holder": "python:bob@host/2"}),
    ],
)
def test_a_second_attempt_of_another_is_not_unpickled(store, tmp_path, first, second):
    path, digest = results(tmp_path / "results.pkl", tmp_path / "ran")
    planted(store, "mine", **{"state": JobState.FAILED} | first)
    document = JobResult(
        job_id="mine", attempt=2, model_path=path, model_uri=path, results_path=path, seconds=1.0, mlflow_run_id=None
    ).document()
    planted(store, "mine", 2, **{"state": JobState.SUCCEEDED, "result": document, "results_digest": digest} | second)

    with pytest.raises(JobError, match="is no retry of the first attempt"):
        jobs.load_results(JobResult.model_validate(document))

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        ({"holder": "python:ann@host/1"}, {"holder": "cli:ann@other"}),
        ({"spec": {"fingerprint": "q", "run_config": {"job_id": "mine"}}}, {"holder": "airflow:fraud/dag/next"}),
        ({"holder": "prefect:run/block"}, {"holder": "prefect:run"}),
    ],
)
def test_a_retry_is_read(store, first, second):
    planted(store, "mine", **{"state": JobState.FAILED} | first)
    key = planted(store, "mine", 2, **{"results_digest": "d"} | second)

    assert attempts.digest_of_results(store, key) == "d"


def test_a_job_that_was_moved_to_another_pool_is_not_sent(store, spec, head):
    add_pool(store, "ours")
    document = spec.completed("theirs", {}).document() | {"fingerprint": "q"}
    key = planted(store, "theirs", pool="ours", spec=document, state=JobState.PENDING, submitter={
        **attempts.ProcessId.mine().to_json(), "python": "python", "folder": None,
    })  # fmt: skip
    target = Target(store, key, "ours", find_endpoint=lambda _: head.endpoint)

    with pytest.raises(JobError, match=r'submitted to pool "theirs".*names pool "ours"'):
        acts.send(target, Supplies())

    assert head.jobs == {}
    assert attempts.load(store, key).state is JobState.FAILED


def of_a_job(table: type[Base], job_id: str = "job") -> Base:
    """A row of a table that belongs to the first attempt of a job."""
    rows: dict[type[Base], Base] = {
        JobMetrics: JobMetrics(job_id=job_id, attempt=1, seq=0, generation=0, points="[]"),
        StudyLog: StudyLog(job_id=job_id, study=1, number=0, entry="{}"),
        Usage: Usage(pool=POOL, holder=OWNER, job_id=job_id, attempt=1, nodes=1, begun_at=0.0),
        Promotion: Promotion(
            registry_uri="r", model="m", alias="champion", version="1", metric="auc", holdout_digest="d", job_id=job_id,
            attempt=1, state=PromotionState.CONFIRMED, created_at=0.0,
        ),
    }  # fmt: skip
    return rows[table]


@pytest.mark.parametrize("table", [JobMetrics, StudyLog, Usage, Promotion])
def test_the_database_refuses_rows_of_jobs_that_do_not_exist(either_store, store, table):
    with pytest.raises(StoreError, match=r"(?i)foreign key"), store.transaction() as session:
        session.add(of_a_job(table))

    planted(store, "job")
    with store.transaction() as session:
        session.add(of_a_job(table))


def test_what_outlives_a_deleted_job(either_store, store):
    key = attempts.ask(store, Order("job", POOL, OWNER, {"fingerprint": "q"}, {"api": "a", "gcs": "g"}, 900.0), 0.0)
    attempts.end(store, Key(key.id, 1), JobState.FAILED, 1.0)
    with store.transaction() as session:
        for table in (JobMetrics, StudyLog, Usage, Promotion):
            session.add(of_a_job(table))
    with store.transaction() as session:
        for promotion in session.query(Promotion):
            promotion.state = PromotionState.WITHDRAWN

    assert [each.job_id for each in prune_jobs()] == ["job"]

    with store.reading() as session:
        left = [session.query(table).count() for table in (Job, JobMetrics, StudyLog, Usage, Promotion)]
        promotion = session.query(Promotion).one()
        assert session.query(Usage).one().job_id is None
    assert left == [0, 0, 0, 1, 1]
    assert (promotion.job_id, promotion.attempt) == ("job", None)
    assert credentials.left() == set()
