"""Submitting, attaching, waiting and cancelling against a real store and a head that is a small HTTP server."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pandas as pd
import pytest
from sqlalchemy import inspect, select

from shoal import jobs
from shoal.data import DataConnector, staged_data
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.frames import stage_dataframe
from shoal.data.staged_data import MARKER, default_location
from shoal.errors import (
    DataError,
    InvalidArgumentError,
    JobCancelledError,
    JobError,
    JobFailedError,
    PoolDownError,
    PoolNotFoundError,
)
from shoal.jobs import JobHandle, JobSpec, Tracking, credentials, submission
from shoal.jobs.credentials import Secrets
from shoal.jobs.files import artifacts, storage
from shoal.jobs.files.logs import LogFollower, log_path
from shoal.jobs.files.retention import discard_leftovers
from shoal.jobs.handle import JobTimeoutError
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.reconcile import acts
from shoal.jobs.reconcile.acts import Supplies
from shoal.jobs.reconcile.look import Target
from shoal.jobs.reconcile.rounds import host_round
from shoal.jobs.results import JobResult
from shoal.jobs.timeouts import FAR_HEAD_PATIENCE_S, HEAD_PATIENCE_S
from shoal.os_processes import ProcessId, host_id
from shoal.pool.api import ComputePool
from shoal.pool.endpoint import Endpoint
from shoal.state import Store, databases
from shoal.state.home import subfolder
from shoal.state.schema import Job, JobState, Lock, Operation, Pool, PoolState
from shoal.training.reporting import Progress
from shoal.training.run_config import RunConfig
from tests.support.fake_ray_head import FakeHead
from tests.support.job_results import result_of
from tests.support.job_store import POOL

ENGINE = "airflow:dag/run"
RESULT = result_of(metrics={"eval-rmse": 1.0}, rows=3)


class Clock:
    """Time that passes only by sleeping; what is due at some time happens then."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.due: list[tuple[float, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float, until_end_of: ProcessId | None = None) -> None:
        self.now += seconds
        happening, self.due = (
            [what for at, what in self.due if at <= self.now],
            [(at, what) for at, what in self.due if at > self.now],
        )
        for what in happening:
            what()

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        self.due.append((self.now + seconds, what))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def submit(store: Store, head: FakeHead, clock: Clock) -> Callable[..., JobHandle]:
    def submit(spec: JobSpec, *, holder: str = ENGINE, at: Endpoint | None = None, **options: Any) -> JobHandle:
        return submission.submit(spec, holder=holder, endpoint_of=lambda _: at or head.endpoint, clock=clock, **options)

    return submit


@pytest.fixture
def held(store: Store, head: FakeHead, clock: Clock) -> Callable[..., JobHandle]:
    """The same job in the hand of one whose time the test controls."""

    def held(handle: JobHandle, *, at: Callable[[], Endpoint] = lambda: head.endpoint, **options: Any) -> JobHandle:
        supplies = Supplies(end_on_interrupt=options.pop("cancel_on_interrupt", False))
        target = Target(
            store,
            key(handle),
            POOL,
            find_endpoint=lambda _: at(),
            clock=clock,
            monotonic=options.pop("monotonic", clock),
            sleep=clock.sleep,
            **options,
        )
        return JobHandle(target, attempts.load(store, target.key), supplies)

    return held


def key(handle: JobHandle) -> Key:
    return Key(handle.job_id, handle.attempt)


ENDED = replace(ProcessId.mine(), start=1)
"""A driver whose process is no more, so that only the head can say what became of it."""


def run(store: Store, head: FakeHead, handle: JobHandle, lines: str = "", driver: ProcessId = ENDED) -> None:
    """What a driver does when it begins."""
    path = log_path(key(handle))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines)
    attempts.start(store, key(handle), driver.to_json(), 1000.0)
    head.jobs[key(handle).submission_id].status = "RUNNING"


def row(store: Store, handle: JobHandle) -> Job:
    return attempts.load(store, key(handle))


def elsewhere(store: Store) -> None:
    """The pool is bound to another host."""
    with store.transaction() as session:
        pool = session.get_one(Pool, POOL)
        pool.host, pool.host_id = "b", "another"


class TestSubmit:
    def test_the_row_is_there_before_the_submission(self, store, head, submit, spec, monkeypatch):
        states = []
        answer = head.answer
        monkeypatch.setattr(
            head, "answer", lambda *args: (states.append([job.state for job in jobs.list_jobs()]), answer(*args))[1]
        )

        handle = submit(spec)

        assert states == [[JobState.PENDING]]
        assert row(store, handle).endpoint == {"api": head.endpoint.api, "gcs": head.endpoint.gcs}

    def test_its_command_names_the_job_and_nothing_secret(self, head, submit, spec, monkeypatch):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
        secret = spec.model_copy(update={"tracking": Tracking(uri="http://me:hunter22@host")})

        handle = submit(secret)

        [job] = head.jobs.values()
        assert 'shoal.jobs.driver "$@"\'' in job.entrypoint
        assert job.entrypoint.endswith(f"{handle.job_id} 1 xgboost")
        assert job.metadata == {
            "shoal_job": handle.job_id,
            "attempt": "1",
            "libraries": "ray xgboost mlflow",
        }
        stored = json.dumps(row(Store(), handle).spec)
        for secret_text in ("wJalrXUtnFEMI", "hunter22"):
            assert secret_text not in job.entrypoint + json.dumps(job.metadata) + stored
        taken = credentials.take(key(handle).submission_id)
        assert taken.environment["AWS_SECRET_ACCESS_KEY"] == "wJalrXUtnFEMI"
        assert taken.uris == {"/tracking/uri": "http://me:hunter22@host"}

    def test_what_a_new_attempt_would_need_is_not_needed_to_attach_or_to_collect(
        self, store, head, submit, spec, monkeypatch
    ):
        monkeypatch.setenv("MY_PIN", "hunter22")
        needing = spec.model_copy(update={"run_config": spec.run_config.model_copy(update={"secret_env": ("MY_PIN",)})})
        first = submit(needing)
        monkeypatch.delenv("MY_PIN")
        upgraded = replace(head.endpoint, versions={"python": platform.python_version(), "shoal": "99.0.0"})

        assert submit(needing, at=upgraded).attempt == 1
        assert credentials.take(key(first).submission_id).environment["MY_PIN"] == "hunter22"
        run(store, head, first)
        assert submit(needing, at=upgraded).attempt == 1
        attempts.end(store, key(first), JobState.SUCCEEDED, 1.0, result=RESULT.document())
        assert submit(needing, at=upgraded).wait(on_log=None) == RESULT

        with pytest.raises(InvalidArgumentError, match=r"runs shoal 99\.0\.0"):
            submit(needing, at=upgraded)
        with pytest.raises(InvalidArgumentError, match="secret_env names MY_PIN"):
            submit(needing)

    def test_an_engine_that_asks_again_finds_its_job(self, head, submit, spec):
        first, second = submit(spec), submit(spec)

        assert (first.job_id, first.attempt) == (second.job_id, second.attempt)
        assert len(head.jobs) == 1

    def test_an_engine_that_asks_again_from_another_mlflow_session_finds_its_job(self, submit, spec, monkeypatch):
        tracked = spec.model_copy(update={"tracking": Tracking()})
        first = submit(tracked)
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")

        assert submit(tracked).job_id == first.job_id

    def test_a_person_who_asks_again_gets_another(self, head, submit, spec):
        assert submit(spec, holder="cli:me@here").job_id != submit(spec, holder="cli:me@here").job_id

    def test_an_id_that_is_given_is_kept(self, submit, spec):
        named = spec.model_copy(update={"run_config": RunConfig(job_id="nightly")})

        assert submit(named, holder="cli:me@here").job_id == "nightly"
        assert submit(named, holder="cli:me@here").attempt == 1

    def test_killed_between_row_and_submission(self, store, head, submit, spec):
        first = submit(spec)
        head.jobs.clear()  # as if it had never arrived

        second = submit(spec)

        assert second.attempt == first.attempt
        assert list(head.jobs) == [key(first).submission_id]

    def test_a_result_that_nobody_collected_is_returned(self, store, head, submit, spec):
        first = submit(spec)
        attempts.end(store, key(first), JobState.SUCCEEDED, 1.0, result=RESULT.model_dump(mode="json"))

        assert submit(spec).wait() == RESULT
        assert head.submissions == 1
        assert submit(spec).attempt == 2

    def test_a_result_of_a_later_version_is_read(self, store, submit, spec):
        champion = {"version": "1", "value": 2.0}
        stored = RESULT.model_dump(mode="json") | {
            "champion": champion,
            "decision": {"reason": "better", "sentence": "It is."},
        }
        later = stored | {"new": 1, "champion": {**champion, "new": 1}, "decision": {**stored["decision"], "new": 1}}
        attempts.end(store, key(submit(spec)), JobState.SUCCEEDED, 1.0, result=later)

        assert submit(spec).wait(on_log=None) == JobResult.model_validate(stored)

    def test_a_result_that_cannot_be_read_is_not_collected(self, store, submit, spec):
        first = submit(spec)
        attempts.end(
            store, key(first), JobState.SUCCEEDED, 1.0, result=RESULT.model_dump(mode="json") | {"rows": "many"}
        )

        with pytest.raises(ValueError, match="rows"):
            submit(spec).wait(on_log=None)

        assert row(store, first).collected_at is None

    def test_a_result_is_returned_again_if_its_reader_is_killed_while_the_driver_cleans_up(
        self, store, submit, held, spec, clock
    ):
        first = submit(spec)
        attempts.start(store, key(first), ProcessId.mine().to_json(), 1.0)  # a driver that has not ended yet
        attempts.end(store, key(first), JobState.SUCCEEDED, 2.0, result=RESULT.model_dump(mode="json"))

        def killed() -> None:
            raise SystemExit

        clock.after(0.01, killed)
        with pytest.raises(SystemExit):
            held(first).wait(on_log=None)
        assert submit(spec).attempt == 1

    def test_a_driver_that_died_without_a_word_makes_room_for_the_next_attempt(self, store, head, submit, spec):
        first = submit(spec)
        run(store, head, first)
        job = head.jobs[key(first).submission_id]
        job.status, job.exit_code = "FAILED", -9

        second = submit(spec)

        assert second.attempt == 2
        assert row(store, first).state is JobState.FAILED
        assert "was killed" in str(row(store, first).error)

    def test_a_new_head_means_a_new_attempt(self, store, head, another_head, submit, spec):
        first = submit(spec)

        second = submit(spec, at=another_head.endpoint)

        assert second.attempt == 2
        assert "new head" in str(row(store, first).error)
        assert list(another_head.jobs) == [key(second).submission_id]

    def test_a_head_that_does_not_answer_fails_the_attempt(self, store, head, submit, spec):
        endpoint = head.endpoint
        head.close()

        with pytest.raises(JobError, match="does not answer"):
            submit(spec, at=endpoint)

        [job] = jobs.list_jobs()
        assert job.state is JobState.FAILED
        assert "could not be submitted" in str(job.error)

    def test_a_connection_is_found_by_its_name_and_handed_over_apart_from_the_spec(
        self, store, head, submit, spec, monkeypatch, tmp_path
    ):
        dataset = DatasetSpec(sql="SELECT 1", connection="ware-house")
        spec = spec.model_copy(update={"dataset": dataset})
        with pytest.raises(
            InvalidArgumentError,
            match='"ware-house" of a dataset is not known: set the environment variable SHOAL_CONNECTION_W',
        ):
            submit(spec, holder=ENGINE)
        assert not jobs.list_jobs()
        url = "postgresql+psycopg://me:hunter2-secret@db/x"
        handle = submit(spec, holder=ENGINE, connection_url={"ware-house": url}.get)
        assert submit(spec, holder=ENGINE, connection_url={"ware-house": f"{url}y"}.get).job_id == handle.job_id
        with store.reading() as session:
            assert "hunter2" not in json.dumps(session.get_one(Job, (handle.job_id, 1)).spec)
        secrets = credentials.take(Key(handle.job_id, 1).submission_id)
        assert secrets.environment["SHOAL_CONNECTION_WARE_HOUSE"] == url
        assert "SHOAL_CONNECTION_WARE_HOUSE" not in secrets.variables()
        assert "hunter2" not in secrets.redact("password hunter2-secret is wrong")
        monkeypatch.setenv("SHOAL_CONNECTION_WARE_HOUSE", "sqlite:///own.db")
        monkeypatch.chdir(tmp_path)
        found = credentials.connections(dataset.connections(), os.environ, {"ware-house": url}.get)
        assert found == {"SHOAL_CONNECTION_WARE_HOUSE": f"sqlite:///{tmp_path}/own.db"}

    def test_a_storage_and_a_catalog_are_handed_over_apart_from_the_spec(self, store, head, submit, spec):
        table = {"format": "iceberg", "catalog": "prod", "storage": "lake", "paths": ["db.flights"]}
        spec = spec.model_copy(update={"dataset": DatasetSpec.model_validate(table)})
        with pytest.raises(InvalidArgumentError, match=r'"lake" of a dataset is not known: .* SHOAL_STORAGE_LAKE'):
            submit(spec, holder=ENGINE)
        with pytest.raises(InvalidArgumentError, match=r"SHOAL_STORAGE_LAKE, .* has the unknown settings verify"):
            submit(spec, holder=ENGINE, connection_url={"lake": '{"verify": "no"}'}.get)
        assert not jobs.list_jobs()
        # A connection of another type may have the name of a catalog in pyiceberg's own configuration.
        found = {"lake": "aws://AKIA:cAnArY-word@/?region_name=eu-west-1", "prod": "postgresql://db/x"}
        assert list(credentials.connections(spec.dataset.connections(), {}, found.get)) == ["SHOAL_STORAGE_LAKE"]

        catalog = '{"credential": "me:cAnArY-half", "gcs.oauth2.token": "cAnArY-token"}'
        handle = submit(spec, holder=ENGINE, connection_url={**found, "prod": catalog}.get)

        with store.reading() as session:
            stored = json.dumps(session.get_one(Job, (handle.job_id, 1)).spec)
        assert "iceberg://lake@prod/db.flights" in stored and "cAnArY" not in stored
        secrets = credentials.take(Key(handle.job_id, 1).submission_id)
        assert json.loads(secrets.variables()["SHOAL_STORAGE_LAKE"])["region_name"] == "eu-west-1"
        assert secrets.variables(hidden=("SHOAL_STORAGE_",))["SHOAL_CATALOG_PROD"] == catalog
        assert "cAnArY" not in secrets.redact("cAnArY-word, cAnArY-half and cAnArY-token are wrong")

    def test_a_pool_that_is_not_there(self, store, submit, spec):
        elsewhere = spec.model_copy(update={"run_config": RunConfig(pool_name="nowhere")})

        with pytest.raises(PoolNotFoundError, match='"nowhere" does not exist or is not authorized'):
            submit(elsewhere)
        assert jobs.list_jobs() == []

    def test_data_staged_again_for_a_job_that_runs_are_removed(self, store, head, submit):
        frame = pd.DataFrame({"a": [1.0, 2.0], "y": [0.0, 1.0]})

        def ask() -> tuple[JobHandle, Path]:
            connector = DataConnector.from_dataframe(frame)
            spec = JobSpec(dataset=connector, input_cols=("a",), label_col="y")
            return submit(spec), Path(str(connector.staging))

        (first, staged_first), (second, staged_second) = ask(), ask()

        assert key(first) == key(second)
        assert staged_first.exists()
        assert not staged_second.exists()

    @pytest.mark.parametrize("gone", [True, False], ids=["gone", "not writable"])
    def test_staged_data_that_cannot_be_claimed_fail_the_attempt(self, store, head, submit, monkeypatch, gone):
        connector = DataConnector.from_dataframe(pd.DataFrame({"a": [1.0], "y": [0.0]}))
        config = RunConfig(job_id="nightly")
        spec = JobSpec(dataset=connector.to_spec(), input_cols=("a",), label_col="y", run_config=config)
        if gone:
            (Path(str(connector.staging)) / MARKER).unlink()
        else:
            (Path(str(connector.staging)) / "_shoal_used_by.nightly-1").mkdir()

        with pytest.raises(DataError, match="do not exist any more: stage them again" if gone else "Is a directory"):
            submit(spec)

        job = attempts.load(store, Key("nightly", 1))
        assert (job.state, head.submissions) == (JobState.FAILED, 0)
        assert "staged data" in str(job.error)

    def test_staged_data_outlive_the_jobs_of_their_connector(self, store, head, submit, held):
        connector = DataConnector.from_dataframe(pd.DataFrame({"a": [1.0, 2.0], "y": [0.0, 1.0]}))
        folder = Path(str(connector.staging))

        def ask(dataset: DatasetSpec, job_id: str) -> JobHandle:
            config = RunConfig(job_id=job_id)
            return held(submit(JobSpec(dataset=dataset, input_cols=("a",), label_col="y", run_config=config)))

        ask(connector.to_spec(), "first").cancel()
        assert connector.num_rows() == 2
        second, third = ask(connector.to_spec(), "second"), ask(connector.to_spec(), "third")
        del connector
        second.cancel()
        assert folder.exists()
        third.cancel()
        assert not folder.exists()


def test_values_that_json_does_not_know_are_stored_and_given_back(either_store, store, head, submit, held, spec):
    """A NaN in params could not be submitted on PostgreSQL, and one in a metric left the finished job in RUNNING."""
    handle = submit(spec.model_copy(update={"params": {"missing": float("nan"), "scale": float("inf")}}))
    run(store, head, handle)
    params = JobSpec.parse(row(store, handle).spec).params
    assert repr(params) == "{'missing': nan, 'scale': inf}"

    result = RESULT.model_copy(update={"metrics": {"eval-auc": float("nan"), "eval-loss": float("-inf")}})
    attempts.end(store, key(handle), JobState.SUCCEEDED, 1000.0, result=result.model_dump(mode="json"))

    assert repr(held(handle).wait(on_log=None).metrics) == "{'eval-auc': nan, 'eval-loss': -inf}"
    assert [repr(job.result.metrics) for job in jobs.list_jobs() if job.result] == [
        "{'eval-auc': nan, 'eval-loss': -inf}"
    ]


def test_an_error_with_characters_that_no_database_takes_is_stored(either_store, store, head, submit, held, spec):
    handle = submit(spec)
    run(store, head, handle)
    attempts.end(store, key(handle), JobState.FAILED, 1000.0, error="ValueError: \0 in b'\udcff'")

    with pytest.raises(JobFailedError, match=r"ValueError: \\x00 in b'\\udcff'$"):
        held(handle).wait(on_log=None)


@pytest.mark.parametrize("holder", [f"airflow:{'d' * 250}/{'r' * 261}", "service:odd\0name\udc80"])
def test_a_holder_of_any_length_and_any_characters_owns_what_it_asked_for(
    either_store, store, head, submit, held, spec, monkeypatch, holder
):
    """A DAG id and a run id may have 250 characters each; the columns had 255, which only PostgreSQL enforces."""
    monkeypatch.setattr("shoal.pool.reconciling.ensure_running", lambda: None)
    pool = ComputePool(POOL, holder=holder, store=store)
    pool.lease(2, is_async=True)
    pool.lease(1, is_async=True)
    assert [(lease.holder, lease.size) for lease in pool.describe().leases] == [(pool.holder, 1)]
    assert pool.renew()
    handle = submit(spec, holder=holder)
    assert submit(spec, holder=holder).job_id == handle.job_id
    assert len(log_path(key(handle)).name) < 255
    with store.transaction() as session:
        session.add(Lock(name="any", holder=holder, expires_at=0))
        operations = session.scalars(select(Operation.id).where(Operation.holder == holder)).all()
        assert session.scalars(select(Lock.name).where(Lock.holder == holder)).all() == ["any"]
    assert len(operations) == 2

    assert [job.holder for job in jobs.list_jobs()] == [pool.holder]
    assert held(handle).cancel()
    assert jobs.clean_up(POOL, holder).released


class TestTwoSenders:
    """Both saw the same pending attempt, and both submit it."""

    @pytest.fixture(autouse=True)
    def secret(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")

    def second_sends(self, first: JobHandle, endpoint: Callable[[], Endpoint]) -> bool:
        target = replace(first.target, find_endpoint=lambda _: endpoint())
        return acts.send(target, Supplies(Secrets({"AWS_SECRET_ACCESS_KEY": "of the second"})))

    def test_the_one_that_fails_attaches_to_the_job_that_runs(self, store, head, submit, spec):
        first = submit(spec)
        credentials.take(key(first).submission_id)

        def starts_meanwhile() -> Endpoint:
            run(store, head, first)
            raise PoolDownError("the head is not ready")

        assert not self.second_sends(first, starts_meanwhile)

        assert (row(store, first).state, row(store, first).error) == (JobState.RUNNING, None)
        assert credentials.take(key(first).submission_id) == Secrets()

    def test_the_one_that_comes_late_leaves_no_credentials(self, store, head, submit, spec):
        first = submit(spec)
        credentials.take(key(first).submission_id)
        run(store, head, first)

        assert not self.second_sends(first, lambda: head.endpoint)

        assert credentials.take(key(first).submission_id) == Secrets()

    def test_the_first_ones_credentials_stay_until_its_driver_takes_them(self, store, head, submit, spec):
        first = submit(spec)

        assert not self.second_sends(first, lambda: head.endpoint)

        taken = credentials.take(key(first).submission_id)
        assert taken.environment["AWS_SECRET_ACCESS_KEY"] == "wJalrXUtnFEMI"

    def test_the_one_that_fails_while_nobody_else_was_through_fails_the_attempt(self, store, head, submit, spec):
        first = submit(spec)

        def down() -> Endpoint:
            raise PoolDownError("it is down")

        with pytest.raises(PoolDownError, match="it is down"):
            self.second_sends(first, down)

        assert row(store, first).state is JobState.FAILED
        assert credentials.take(key(first).submission_id) == Secrets()


class TestWait:
    def test_the_log_and_the_result(self, store, head, submit, held, spec, clock):
        handle = held(submit(spec))
        lines: list[str] = []

        def say(text: str) -> None:
            with log_path(key(handle)).open("a") as file:
                file.write(text)

        clock.after(2.0, lambda: run(store, head, handle, "begun\nround"))
        clock.after(4.0, lambda: say(" 1\n"))
        clock.after(6.0, lambda: say("round 2\nlast words"))
        clock.after(
            6.0,
            lambda: attempts.end(
                store, key(handle), JobState.SUCCEEDED, clock(), result=RESULT.model_dump(mode="json")
            ),
        )

        assert handle.wait(on_log=lines.append) == RESULT
        assert lines == ["begun", "round 1", "round 2", "last words"]
        assert row(store, handle).collected_at is not None
        assert list(handle.logs()) == lines

    def test_progress_in_the_row_is_passed_on_once_for_each_change(self, store, head, submit, held, spec, clock):
        handle = held(submit(spec))

        def record(done: int) -> None:
            with store.transaction() as session:
                job = session.get_one(Job, (handle.job_id, handle.attempt))
                job.progress = Progress(done, 3, "rounds", {"eval-auc": math.nan}).document()

        def end() -> None:
            document = RESULT.model_dump(mode="json")
            last = Progress(3, 3, "rounds").document()
            attempts.end(store, key(handle), JobState.SUCCEEDED, clock(), result=document, progress=last)

        clock.after(2.0, lambda: run(store, head, handle))
        clock.after(4.0, lambda: record(1))
        clock.after(10.0, end)
        shown: list[str] = []

        assert handle.status().progress is None
        assert handle.wait(on_log=None, on_progress=lambda progress: shown.append(str(progress))) == RESULT
        assert shown == ["round 1 of 3, eval-auc: nan", "round 3 of 3"]
        assert handle.status().progress == Progress(3, 3, "rounds")

    def test_waiting_keeps_a_job_alive(self, store, head, submit, held, spec, clock):
        handle = held(submit(spec))
        run(store, head, handle)

        with pytest.raises(JobTimeoutError, match=r"is still running after 60 s\. The job goes on"):
            handle.wait(timeout=60.0, on_log=None)

        assert row(store, handle).last_polled_at >= 1030.0
        assert row(store, handle).state is JobState.RUNNING

    def test_a_driver_that_lives_here_costs_its_head_no_question(self, store, head, submit, held, spec, monkeypatch):
        handle = held(submit(spec))
        run(store, head, handle, driver=ProcessId.mine())
        asked = []
        monkeypatch.setattr(head, "answer", lambda *request: asked.append(request) or (500, ""))

        with pytest.raises(JobTimeoutError):
            handle.wait(timeout=60.0)

        assert asked == []

    def test_without_a_reader_the_log_is_not_fetched(self, store, head, submit, held, spec, monkeypatch):
        handle = held(submit(spec))
        run(store, head, handle)
        monkeypatch.setattr(LogFollower, "lines", lambda *_, **__: pytest.fail("it was fetched"))

        with pytest.raises(JobTimeoutError):
            handle.wait(timeout=5.0, on_log=None)

    def test_a_failure_ends_with_its_cause(self, store, head, submit, held, spec):
        handle = held(submit(spec))
        run(store, head, handle)
        attempts.end(store, key(handle), JobState.FAILED, 1.0, error='column "x" is missing')

        with pytest.raises(JobFailedError, match=r'failed: column "x" is missing$'):
            handle.wait(on_log=None)

    def test_the_log_of_a_driver_that_never_ran_comes_over_http(self, store, head, submit, held, spec):
        handle = held(submit(spec))
        job = head.jobs[key(handle).submission_id]
        job.status, job.exit_code, job.logs = "FAILED", 1, "Running entrypoint\nModuleNotFoundError: shoal\n"
        lines: list[str] = []

        with pytest.raises(JobFailedError, match=r"ModuleNotFoundError: shoal$"):
            handle.wait(on_log=lines.append)
        assert lines == ["Running entrypoint", "ModuleNotFoundError: shoal"]

    @pytest.mark.parametrize(("is_direct", "patience"), [(True, HEAD_PATIENCE_S), (False, FAR_HEAD_PATIENCE_S)])
    def test_a_head_that_vanishes_is_noticed(self, store, head, submit, held, spec, clock, is_direct, patience):
        """A server between that has no answer of the head does not know whether the head is gone or paused."""
        endpoint = replace(head.endpoint, is_direct=is_direct)
        handle = held(submit(spec), at=lambda: endpoint)
        run(store, head, handle)
        clock.after(5.0, head.close)

        with pytest.raises(JobFailedError, match=f"has not answered for {patience:.0f} s"):
            handle.wait(on_log=None)

    def test_a_killed_driver_is_noticed_after_the_clock_was_set_back(self, store, head, submit, held, spec, clock):
        set_back = [0.0]
        handle = held(submit(spec), monotonic=lambda: clock.now + set_back[0])
        run(store, head, handle)
        job = head.jobs[key(handle).submission_id]

        def happen() -> None:
            job.status, job.exit_code = "FAILED", -9
            clock.now, set_back[0] = clock.now - 900.0, 900.0

        clock.after(5.0, happen)

        with pytest.raises(JobFailedError):
            handle.wait(on_log=None)
        assert clock.now < 200.0  # it was 105 then

    def test_a_head_that_was_silent_before_and_after_a_suspend_is_given_time(
        self, store, head, submit, held, spec, clock
    ):
        """The wall clock goes on meanwhile, the monotonic one does not."""
        awake = [0.0]
        endpoint = head.endpoint
        handle = held(submit(spec), at=lambda: endpoint, monotonic=lambda: awake[0])
        run(store, head, handle)
        head.close()

        for _ in range(2):
            assert handle.status().state is JobState.RUNNING
            clock.now += 3600.0
        awake[0] += HEAD_PATIENCE_S
        assert handle.status().state is JobState.FAILED

    def test_a_driver_whose_heartbeats_arrive_runs_although_its_head_does_not_answer(
        self, store, head, submit, held, spec, clock
    ):
        endpoint = head.endpoint
        handle = held(submit(spec), at=lambda: endpoint)
        run(store, head, handle)
        head.close()

        def beat() -> None:
            with store.transaction() as session:
                session.get_one(Job, (handle.job_id, 1)).heartbeat_at = clock.now

        for seconds in range(0, 101, 20):
            clock.after(seconds, beat)

        with pytest.raises(JobFailedError, match="has not answered for 45 s"):
            handle.wait(on_log=None)
        assert clock.now > 1000.0 + 100.0 + HEAD_PATIENCE_S

    def test_a_wait_outlives_a_store_that_is_away(self, store, head, submit, held, spec, clock, monkeypatch, caplog):
        handle = held(submit(spec))
        run(store, head, handle)
        away, url = [], store.url

        def leave() -> None:
            away.append(clock.now)
            monkeypatch.setattr(store, "_engine", databases.engine("postgresql+psycopg://nobody@127.0.0.1:9/nothing"))

        def come_back() -> None:
            monkeypatch.setattr(store, "_engine", databases.engine(url))
            attempts.end(store, key(handle), JobState.SUCCEEDED, 1.0, result=RESULT.document())

        clock.after(10.0, leave)
        clock.after(70.0, come_back)

        assert handle.wait(on_log=None) == RESULT
        assert away and caplog.text.count("waits for the store") == 1

    def test_a_pool_that_goes_down_is_noticed(self, store, head, submit, held, spec, clock):
        def down() -> Endpoint:
            raise PoolDownError("down")

        handle = held(submit(spec), at=down)
        run(store, head, handle)
        with store.transaction() as session:
            session.get_one(Pool, POOL).state = PoolState.STOPPING

        with pytest.raises(JobFailedError, match="went down while the job was running"):
            handle.wait(on_log=None)

    def test_a_sweep_sets_the_row_of_a_lost_job_right_and_asks_for_nothing(self, store, head, submit, spec):
        handle = submit(spec)
        run(store, head, handle)
        with store.transaction() as session:
            row = session.get_one(Job, (handle.job_id, 1))
            row.last_polled_at = asked = row.last_polled_at - 60.0
            session.get_one(Pool, POOL).state = PoolState.DOWN

        assert jobs.sweep() == [
            f'job {handle.job_id}, attempt 1: failed, pool "retrain" went down while the job was running'
        ]
        assert jobs.sweep() == []
        with store.transaction() as session:
            assert session.get_one(Job, (handle.job_id, 1)).last_polled_at == asked

    def test_a_job_that_started_while_it_was_judged_is_not_failed(self, store, head, submit, held, spec):
        first = submit(spec)

        def starts_meanwhile() -> Endpoint:
            run(store, head, first)
            raise PoolNotFoundError(POOL, [])

        assert not host_round(held(first, at=starts_meanwhile).target)

        assert row(store, first).state is JobState.RUNNING

    def test_a_pool_between_two_heads_is_waited_for(self, store, head, submit, held, spec, clock):
        endpoints = [head.endpoint]

        def endpoint() -> Endpoint:
            if not endpoints:
                raise PoolDownError("the head is not ready")
            return endpoints[0]

        handle = held(submit(spec), at=endpoint)
        run(store, head, handle)
        for start in (1.0, 60.0):
            clock.after(start, endpoints.clear)
            clock.after(start + 30.0, lambda: endpoints.append(head.endpoint))

        with pytest.raises(JobTimeoutError):
            handle.wait(timeout=120.0, on_log=None)

    def test_a_pool_on_another_host_is_no_verdict(self, store, submit, spec):
        handle = jobs.attach(submit(spec).job_id)
        elsewhere(store)

        assert handle.status().state is JobState.PENDING
        assert not host_round(handle.target)
        assert row(store, handle).state is JobState.PENDING

    def test_a_job_on_another_host_is_waited_for_by_its_row(self, store, submit, spec, clock):
        job = row(store, submit(spec))
        handle = JobHandle(Target(store, Key(job.id, 1), POOL, clock=clock, sleep=clock.sleep), job)
        elsewhere(store)
        clock.after(
            30.0, lambda: attempts.start(store, key(handle), {"boot": "b", "pid": 1, "start": 1, "host": "b"}, clock())
        )
        clock.after(
            90.0, lambda: attempts.end(store, key(handle), JobState.SUCCEEDED, clock(), result=RESULT.model_dump())
        )

        assert handle.wait(on_log=None) == RESULT
        assert row(store, handle).last_polled_at > 1060.0  # its driver knows that it is still wanted

    @pytest.mark.parametrize(
        ("owner", "state"), [(True, JobState.CANCELLED), (False, JobState.RUNNING)], ids=["its own", "another's"]
    )
    def test_ctrl_c(self, store, head, submit, held, spec, clock, owner, state):
        handle = held(submit(spec), cancel_on_interrupt=owner)
        run(store, head, handle)

        def interrupt() -> None:
            raise KeyboardInterrupt

        clock.after(2.0, interrupt)

        with pytest.raises(KeyboardInterrupt):
            handle.wait(on_log=None)
        assert row(store, handle).state is state
        assert bool(head.stops) is owner

    def test_an_attached_job_that_was_never_submitted_is_submitted_in_the_end(
        self, store, head, submit, held, spec, clock
    ):
        handle = held(submit(spec))
        head.jobs.clear()

        with pytest.raises(JobTimeoutError):
            handle.wait(timeout=10.0, on_log=None)
        assert not head.jobs
        with pytest.raises(JobTimeoutError):
            handle.wait(timeout=30.0, on_log=None)
        assert list(head.jobs) == [key(handle).submission_id]

    def test_a_working_folder_is_swept_only_after_its_attempt(self, store, submit, spec):
        handle = submit(spec)
        mine, unknown = (subfolder("work", name) for name in (key(handle).submission_id, "of-another-store-1"))

        assert discard_leftovers(store) == []
        attempts.end(store, key(handle), JobState.FAILED, 1.0, error="lost")

        assert f"job {handle.job_id}, attempt 1: removed its working folder" in discard_leftovers(store)
        assert (mine.exists(), unknown.exists()) == (False, True)

    def test_a_half_written_model_is_swept_only_after_its_attempt(self, store, submit, spec):
        handle = submit(spec)
        folders = [subfolder("jobs", job_id, "1") for job_id in (handle.job_id, "of-another-store")]
        mine, unknown = (folder / f"model.ubj.{uuid4().hex}" for folder in folders)
        for file in (mine, unknown, folders[0] / "training.json"):
            file.touch()

        assert discard_leftovers(store) == []
        attempts.end(store, key(handle), JobState.FAILED, 1.0, error="lost")

        assert f"job {handle.job_id}, attempt 1: removed a half-written file" in discard_leftovers(store)
        assert (mine.exists(), unknown.exists(), (folders[0] / "training.json").exists()) == (False, True, True)

    def test_staged_data_of_an_old_job_are_swept(self, store, submit, spec):
        """A thousand newer jobs have ended since it was killed."""
        connector = DataConnector.from_dataframe(pd.DataFrame({"a": [1.0], "y": [0.0]}))
        old, folder = submit(JobSpec(dataset=connector, input_cols=("a",), label_col="y")), Path(str(connector.staging))
        attempts.end(store, key(old), JobState.FAILED, 1.0, error="lost")
        del connector
        plain = attempts.load(store, key(submit(spec)))
        fields = {column.key: getattr(plain, column.key) for column in inspect(Job).column_attrs}
        newer = {**fields, "state": JobState.SUCCEEDED, "created_at": plain.created_at + 1.0}
        with store.transaction() as session:
            session.add_all(Job(**{**newer, "id": f"newer-{number}"}) for number in range(1_000))

        done = discard_leftovers(store)

        assert f"job {old.job_id}, attempt 1: removed its staged data" in done
        assert not folder.exists()

    def test_staged_data_of_a_process_that_was_killed_are_swept(self, store, submit, monkeypatch):
        frame = pd.DataFrame({"a": [1.0], "y": [0.0]})
        with monkeypatch.context() as killed:
            killed.setattr(ProcessId, "mine", lambda: ProcessId("an earlier boot", 1, 1, host_id()))
            used, unused, of_another_store = (stage_dataframe(frame, None) for _ in range(3))
        staged_data.claim(of_another_store, "job-of-another-store-1")
        dataset = DatasetSpec(paths=(used,), staging=used)
        running = submit(JobSpec(dataset=dataset, input_cols=("a",), label_col="y"))

        assert discard_leftovers(store) == [f"removed staged data {unused}, which no process and no job uses any more"]
        attempts.end(store, key(running), JobState.FAILED, 1.0, error="lost")
        assert f"job {running.job_id}, attempt 1: removed its staged data" in discard_leftovers(store)
        assert [path.name for path in Path(default_location()).iterdir()] == [Path(of_another_store).name]

    def test_staged_data_that_are_half_removed_or_unreadable_end_no_sweep(
        self, store, submit, held, caplog, monkeypatch
    ):
        connectors = [DataConnector.from_dataframe(pd.DataFrame({"a": [1.0], "y": [float(n)]})) for n in range(2)]
        half, whole = (Path(str(connector.staging)) for connector in connectors)
        for connector in connectors:
            job = submit(JobSpec(dataset=connector, input_cols=("a",), label_col="y"))
            attempts.end(store, key(job), JobState.FAILED, 1.0, error="lost")
        del connector, connectors
        (half / MARKER).unlink()  # as a process leaves it that is killed while it removes the folder
        (half.parent / ".DS_Store").touch()
        (roots := half.parent / "staged-by-root").mkdir()
        claims = staged_data.claims

        def readable_claims(location):
            if location == str(roots):
                raise PermissionError(13, "Permission denied")
            return claims(location)

        monkeypatch.setattr("shoal.jobs.files.retention.claims", readable_claims)

        done = jobs.sweep()

        assert [sentence for sentence in done if sentence.endswith("attempt 1: removed its staged data")]
        assert (half.exists(), whole.exists()) == (True, False)
        assert f"{half} was not staged by shoal and is not removed" in caplog.text
        assert f"the staged data in {roots} cannot be read, so they are not removed" in caplog.text
        assert roots.exists()


class TestCancel:
    @pytest.mark.parametrize("by_user", [True, False])
    def test_a_job_that_runs(self, store, head, submit, held, spec, by_user):
        handle = submit(spec)
        handle = held(handle, actor=None if by_user else row(store, handle).holder)
        run(store, head, handle)

        assert handle.cancel("no longer needed")

        assert head.stops == [key(handle).submission_id]
        with pytest.raises(JobCancelledError, match="no longer needed") as caught:
            handle.wait(on_log=None)
        assert caught.value.permanent is by_user  # and not if the run of the job cancels it
        assert not handle.cancel()

    def test_what_it_left_is_removed(self, store, head, submit, held, monkeypatch):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s" * 10)
        connector = DataConnector.from_dataframe(pd.DataFrame({"a": [1.0], "y": [0.0]}))
        handle = held(submit(JobSpec(dataset=connector, input_cols=("a",), label_col="y")))
        folder = Path(str(connector.staging))
        del connector

        handle.cancel()

        assert not folder.exists()
        assert credentials.take(key(handle).submission_id).environment == {}

    def test_a_pool_that_is_gone(self, store, submit, held, spec):
        def gone() -> Endpoint:
            raise PoolNotFoundError(POOL, [])

        handle = held(submit(spec), at=gone)

        assert handle.cancel()
        assert row(store, handle).state is JobState.CANCELLED

    def test_a_head_that_does_not_answer_is_not_waited_for_forever(self, store, head, submit, held, spec):
        endpoint = head.endpoint
        handle = held(submit(spec), at=lambda: endpoint)
        run(store, head, handle)
        head.close()

        assert handle.cancel()  # its thread of heartbeats sees the row

    def test_a_head_that_refuses_the_token(self, store, head, submit, held, spec, tmp_path):
        (tmp_path / "another").write_text("another token")
        wrong = Endpoint(head.endpoint.api, head.endpoint.gcs, tmp_path / "another")
        handle = held(submit(spec), at=lambda: wrong)
        run(store, head, handle)

        assert handle.cancel()

        assert row(store, handle).state is JobState.CANCELLED
        assert handle.left is not None
        assert re.fullmatch(r"the driver of job \S+ ends by itself within seconds; .* refused the token.*", handle.left)

    def test_staged_data_that_cannot_be_removed(self, submit, held, caplog):
        connector = DataConnector.from_dataframe(pd.DataFrame({"a": [1.0], "y": [0.0]}))
        handle = held(submit(JobSpec(dataset=connector, input_cols=("a",), label_col="y")))
        (Path(str(connector.staging)) / MARKER).unlink()

        assert handle.cancel()

        assert "was not staged by shoal and is not removed" in caplog.text
        with pytest.raises(JobCancelledError):
            handle.wait(on_log=None)

    def test_a_working_folder_that_cannot_be_removed_keeps_no_staged_data(self, submit, held, monkeypatch, caplog):
        connector = DataConnector.from_dataframe(pd.DataFrame({"a": [1.0], "y": [0.0]}))
        handle = held(submit(JobSpec(dataset=connector, input_cols=("a",), label_col="y")))
        folder = Path(str(connector.staging))
        del connector

        def refuse(submission_id: str) -> None:
            raise PermissionError("not yours")

        monkeypatch.setattr(storage, "discard", refuse)
        assert handle.cancel()

        assert not folder.exists()
        assert "could not be removed: not yours" in caplog.text

    @pytest.mark.parametrize("mine", [True, False], ids=["its own folder", "a folder of others"])
    def test_half_written_files_are_removed_where_the_attempt_has_marked_the_folder(
        self, store, submit, held, spec, tmp_path, mine
    ):
        spec = spec.model_copy(update={"run_config": RunConfig(artifact_location=str(tmp_path))})
        handle = held(submit(spec))
        folder = tmp_path / handle.job_id / "1"
        folder.mkdir(parents=True)
        if mine:
            artifacts.claim_of(store, key(handle)).mark(str(folder))
        half = folder / f"data.{'0' * 32}"
        half.write_text("half")

        assert handle.cancel()

        assert half.exists() is not mine


def test_attaching_finds_the_newest_attempt(store, submit, spec):
    first = submit(spec)
    attempts.end(store, key(first), JobState.FAILED, 1.0, error="x")
    second = submit(spec)

    assert jobs.attach(first.job_id).attempt == second.attempt == 2
    assert jobs.attach(first.job_id, attempt=1).attempt == 1
    with pytest.raises(JobError, match="does not exist"):
        jobs.attach("nobody")


def test_a_dict_is_no_spec() -> None:
    with pytest.raises(InvalidArgumentError, match="not by an object of type dict: make a spec"):
        submission.submit({"framework": "xgboost"})  # type: ignore[arg-type]
