"""Old versions of models and old jobs are deleted; champions, everything young and whatever runs stay.

The registry is a real MLflow database.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from shoal.errors import InvalidArgumentError
from shoal.jobs import prune_jobs, retain
from shoal.jobs.files import artifacts
from shoal.jobs.files.logs import log_path
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import At, JobStep, RetentionStep, store_lock
from shoal.models import prune_models
from shoal.os_processes import host_id, hostname
from shoal.state import Store, store
from shoal.state.home import home
from shoal.state.schema import Job, JobState, Lock, Pool, PoolState, PromotionState
from tests.support.model_registry import DAY, Shelf, add_promotion

PAUSE = 240.0  # only ends a test that hangs
NOW = 1_800_000_000.0


@pytest.fixture
def shelf(fresh_home: Path, own_mlflow: str, tmp_path: Path) -> Shelf:
    return Shelf(own_mlflow, (tmp_path / "artifacts").as_uri())


def add_job(key: Key, state: JobState = JobState.SUCCEEDED, *, days: float = 0, **columns: Any) -> Key:
    """A row of an attempt that ended some days before `NOW`."""
    ended = NOW - days * DAY
    with Store().transaction() as session:
        session.add(
            Job(
                **{
                    "id": key.job_id,
                    "attempt": key.attempt,
                    "pool": "retrain",
                    "holder": "cli:me@here",
                    "spec": {"run_config": {}},
                    "state": state,
                    "endpoint": {},
                    "last_polled_at": ended,
                    "created_at": ended - 60,
                    "ended_at": None if state in (JobState.PENDING, JobState.RUNNING) else ended,
                    **columns,
                }
            )
        )
    return key


def add_files(key: Key) -> Path:
    """The files of a training: log, model and marker."""
    folder = Path(artifacts.folder(key, None))
    folder.mkdir(parents=True)
    log_path(key).write_text("round 1\n")
    artifacts.claim_of(Store(), key).mark(str(folder))
    (folder / "model.ubj").write_bytes(b"model")
    return folder


def a_pool(name: str, host: str, identity: str = "another host") -> Pool:
    shared = {"spec": {}, "state": PoolState.DOWN, "min_nodes": 1, "max_nodes": 1, "epoch": 1, "next_node": 0}
    return Pool(name=name, host=host, host_id=identity, created_at=0.0, touched_at=0.0, **shared)


def jobs() -> set[Key]:
    with Store().reading() as session:
        return {Key(job_id, attempt) for job_id, attempt in session.execute(select(Job.id, Job.attempt))}


class Killed(BaseException):
    """The process is gone at this point."""


@contextmanager
def killed_at(step: RetentionStep, at: At) -> Iterator[None]:
    """Raise `Killed` at one point of one step while the block runs."""

    def passing(*point: object) -> None:
        if point == (step, at):
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "passing", passing)
        try:
            yield
        except Killed:
            return
    raise AssertionError(f"{at} {step} was not reached")


class TestVersions:
    def prune(self, shelf: Shelf, **options: Any) -> list[tuple[str, str]]:
        pruned = prune_models(**{"tracking_uri": shelf.uri, "keep_last": 2, **options})
        assert pruned.failed == ()
        return [(each.model, each.version) for each in pruned.deleted]

    @pytest.mark.parametrize(("asking", "may"), [("ads", False), ("fraud", True), (None, True), ("*", True)])
    def test_versions_of_other_teams_are_not_deleted(self, shelf, monkeypatch, asking, may):
        theirs = shelf.add("m", days=100, key=add_job(Key("theirs", 1), team="fraud"))
        nobodys = shelf.add("m", days=100, key=Key("pruned", 1))
        if asking is not None:
            monkeypatch.setenv("SHOAL_TEAM", asking)
        expected = [("m", theirs)] * may + [("m", nobodys)]
        assert self.prune(shelf, keep_last=0, dry_run=True) == expected
        assert self.prune(shelf, keep_last=0) == expected

    def test_only_versions_that_nothing_needs_are_deleted(self, shelf):
        running = add_job(Key("running", 2), JobState.RUNNING)
        old = shelf.add("m", days=100)
        kept = {
            "champion": shelf.add("m", days=100, alias="champion"),
            "another alias": shelf.add("m", days=100, alias="canary"),
            "promoted last, and a person has removed the alias": shelf.add("m", days=100),
            "about to be promoted": shelf.add("m", days=100),
            "a person's": shelf.add("m", days=100, key=None),
            "of a running job": shelf.add("m", days=100, key=running),
            "young": shelf.add("m", days=89),
        }
        promoted_once = shelf.add("m", days=100)
        copied = shelf.add("m", days=100)
        kept |= {"a person's copy": shelf.add("m", days=100, source=f"models:/m/{copied}")}
        kept |= {"newest": shelf.add("m", days=100), "second newest": shelf.add("m", days=100)}
        shelf.promote("m", promoted_once)
        shelf.promote("m", kept["promoted last, and a person has removed the alias"])
        shelf.promote("m", kept["about to be promoted"], state=PromotionState.INTENDED, confirmed_at=None)
        only_one = shelf.add("another", days=1000)
        sources = {version: shelf.source("m", version) for version in (old, copied, kept["champion"])}

        before = shelf.left("m")
        would = self.prune(shelf, dry_run=True)
        assert shelf.left("m") == before
        assert self.prune(shelf) == would == [("m", old), ("m", promoted_once), ("m", copied)]

        assert shelf.left("m") == sorted(kept.values(), key=int)
        assert shelf.left("another") == [only_one]
        assert {version: shelf.has_files(source) for version, source in sources.items()} == {
            old: False, copied: True, kept["champion"]: True,
        }  # fmt: skip
        assert self.prune(shelf) == []
        with Store().reading() as session:
            assert list(session.scalars(select(Lock))) == []

    @pytest.mark.parametrize("at", list(At))
    @pytest.mark.parametrize(
        "step", [RetentionStep.CHECK, RetentionStep.DELETE_LOGGED_MODEL, RetentionStep.DELETE_VERSION]
    )
    def test_a_call_after_a_killed_one_completes_it(self, shelf, step, at):
        if at is At.WRITTEN and step is not RetentionStep.CHECK:
            pytest.skip("an action has no such point")
        versions = [shelf.add("m", days=100) for _ in range(3)]
        sources = [shelf.source("m", version) for version in versions]
        with killed_at(step, at):
            self.prune(shelf)

        # What a killed process leaves is a lock that expires.
        with Store().transaction() as session:
            name = shelf.ledger("m").lock_name
            session.merge(Lock(name=name, holder="killed", expires_at=0.0))
        self.prune(shelf)

        assert shelf.left("m") == versions[1:]
        assert [shelf.has_files(source) for source in sources] == [False, True, True]

    def test_a_version_that_becomes_champion_meanwhile_is_not_deleted(self, shelf, monkeypatch):
        first, second, *_ = [shelf.add("m", days=100) for _ in range(4)]
        shelf.promote("m", first)
        shelf.promote("m", "4")  # so the lock of the alias is known
        asked, passing = threading.Event(), store.passing

        def note(step: object, at: object) -> None:
            if threading.current_thread() is not threading.main_thread() and step is JobStep.LOCK:
                asked.set()
            passing(step, at)

        monkeypatch.setattr(store, "passing", note)
        ledger = shelf.ledger("m")
        with ThreadPoolExecutor(1) as threads:
            with store_lock(Store(), ledger.lock_name, PAUSE):
                pruned = threads.submit(self.prune, shelf)
                assert asked.wait(PAUSE)  # it has chosen both versions, and waits for the lock
                shelf.client.set_registered_model_alias("m", "champion", first)
            assert pruned.result(PAUSE) == [("m", second)]
        assert shelf.left("m") == [first, "3", "4"]

    def test_another_model_from_the_same_files_keeps_them(self, shelf):
        old = shelf.add("m", days=100)
        shelf.add("serving", key=None, source=shelf.source("m", old))
        source = shelf.source("m", old)

        assert self.prune(shelf, keep_last=0) == [("m", old)]
        assert shelf.has_files(source)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"older_than": timedelta(hours=1)}, "older_than=.*of one day or more"),
            ({"older_than": 90}, "older_than=90 is not legal"),
            ({"keep_last": -1}, "keep_last=-1 is not legal"),
        ],
    )
    def test_illegal_options_are_refused(self, fresh_home, options, said):
        with pytest.raises(InvalidArgumentError, match=said):
            prune_models(**options)


class TestJobs:
    def prune(self, **options: Any) -> set[Key]:
        return {Key(each.job_id, each.attempt) for each in prune_jobs(clock=lambda: NOW, **options)}

    def test_only_jobs_that_ended_long_ago_are_removed(self, either_store):
        chosen = {"run_config": {"job_id": "mine"}}
        old = [
            add_job(Key("old", 1), JobState.FAILED, days=40),
            add_job(Key("old", 2), days=31),
            add_job(Key("mine", 2), JobState.CANCELLED, days=50, spec=chosen),
        ]
        kept = [
            add_job(Key("young", 1), JobState.FAILED, days=40),
            add_job(Key("young", 2), days=29),
            add_job(Key("runs", 1), JobState.FAILED, days=40),
            add_job(Key("runs", 2), JobState.RUNNING, days=40),
            add_job(Key("waits", 1), JobState.PENDING, days=40),
            add_job(Key("promoted", 1), days=40),
            add_job(Key("mine", 1), JobState.FAILED, days=60, spec=chosen),
            add_job(Key("mine", 3), days=40, spec=chosen),
            add_job(Key("elsewhere", 1), days=40, pool="theirs"),
        ]
        with Store().transaction() as session:
            session.add(a_pool("theirs", "another-host"))
            session.add(a_pool("retrain", hostname(), host_id()))
        add_promotion("sqlite:///mlflow.db", "m", "1", job_id="promoted")
        folders = {key: add_files(key) for key in (*old, *kept)}
        foreign = folders[old[0]] / ".shoal-job"
        foreign.write_text('{"job_id": "old", "owner": "another store", "attempt": 1}')
        credentials = home() / "credentials" / "old-2.json"
        credentials.parent.mkdir(exist_ok=True)
        credentials.write_text("{}")

        assert self.prune(dry_run=True) == {*old}
        assert all(folder.exists() for folder in folders.values())
        assert self.prune() == {*old}

        assert jobs() == {*kept}
        assert [key for key, folder in folders.items() if not folder.exists()] == old[1:]
        assert not credentials.exists()
        assert self.prune() == set()

    @pytest.mark.parametrize(
        ("step", "at"),
        [
            (RetentionStep.REMOVE_FILES, At.BEFORE),
            (RetentionStep.REMOVE_FILES, At.AFTER),
            (RetentionStep.REMOVE_ROWS, At.WRITTEN),
            (RetentionStep.REMOVE_ROWS, At.AFTER),
        ],
    )
    def test_a_call_after_a_killed_one_completes_it(self, fresh_home, step, at):
        keys = [add_job(Key("old", attempt), days=40) for attempt in (1, 2)]
        folders = [add_files(key) for key in keys]
        with killed_at(step, at):
            self.prune()

        self.prune()

        assert jobs() == set()
        assert [folder.exists() for folder in folders] == [False, False]
        assert not folders[0].parent.exists()

    def test_a_retry_meanwhile_keeps_the_rows(self, fresh_home, monkeypatch):
        old = add_job(Key("old", 1), days=40)

        def retried(step: object, at: object) -> None:
            if (step, at) == (RetentionStep.REMOVE_FILES, At.AFTER):
                add_job(Key("old", 2), JobState.PENDING)

        monkeypatch.setattr(store, "passing", retried)
        assert self.prune() == set()
        assert jobs() == {old, Key("old", 2)}


def test_both_at_once_say_what_they_did(shelf):
    for _ in range(3):
        shelf.add("m", days=100)
    key = add_job(Key("old", 1), ended_at=time.time() - 40 * DAY)
    said = ["would delete 1 ended attempts of 1 jobs", "model m: would delete 2 old versions"]
    assert retain(keep_last=1, tracking_uri=shelf.uri, dry_run=True) == said
    assert retain(keep_last=1, tracking_uri=shelf.uri) == [each.replace("would delete", "deleted") for each in said]
    assert (shelf.left("m"), key in jobs()) == (["3"], False)
