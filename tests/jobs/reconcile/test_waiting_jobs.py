"""Jobs that wait in the queue of a pool: a real store, and a head that is a small HTTP server."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from sqlalchemy import select, update

from shoal import history, jobs
from shoal.data import DataConnector
from shoal.errors import JobCancelledError, JobFailedError, PoolDownError, PoolNotFoundError, StoreError
from shoal.jobs import FlowTask, JobHandle, JobSpec, cleanup, credentials, submission
from shoal.jobs.handle import JobTimeoutError
from shoal.jobs.journal import attempts, job_queue
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.journal.job_queue import Admission, Line
from shoal.jobs.reconcile import rounds
from shoal.jobs.reconcile.look import HeadBusyError, HeadGoneError, JobClient, Target
from shoal.jobs.reconcile.rounds import Waiter, host_round
from shoal.jobs.scheduling import DRIVER_BYTES
from shoal.os_processes import ProcessId
from shoal.pool.api import ComputePool
from shoal.pool.endpoint import Endpoint
from shoal.pool.timeouts import LEASE_TTL
from shoal.state import Store
from shoal.state.schema import Job, JobState, Node, NodeState, Pool, PoolState
from shoal.training.demand import GangClaim, XGBScalingConfig
from shoal.training.run_config import RunConfig
from tests.support.fake_ray_head import FakeHead
from tests.support.job_results import result_of
from tests.support.job_store import POOL, add_node, add_pool
from tests.support.statements import statements

RESULT = result_of(metrics={}, rows=3)


class Queue:
    """A pool with room for one job, and time that passes only by sleeping."""

    def __init__(self, store: Store, head: FakeHead, spec: JobSpec) -> None:
        self.store, self.head, self.spec = store, head, spec
        self.now = 1000.0
        self.due: list[tuple[float, Callable[[], object]]] = []
        self.endpoint: Callable[[], Endpoint] = lambda: head.endpoint
        add_node(store, cpus=1)

    def sleep(self, seconds: float, until_end_of: ProcessId | None = None) -> None:
        self.now += seconds
        happening = [what for at, what in self.due if at <= self.now]
        self.due = [(at, what) for at, what in self.due if at > self.now]
        for what in happening:
            what()

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        self.due.append((self.now + seconds, what))

    def submit(
        self,
        name: str,
        *,
        holder: str = "airflow:dag/run",
        ancestors: dict[str, bool] | None = None,
        dataset: Any = None,
        **config: Any,
    ) -> JobHandle:
        """Ask for a job of one CPU."""
        spec = self.spec.model_copy(
            update={
                "run_config": RunConfig(job_id=name, **config),
                "scaling_config": XGBScalingConfig(num_workers=1, num_cpu_per_worker=1),
                **({"dataset": dataset} if dataset else {}),
            }
        )
        task = FlowTask("root", holder, "try-1", name, ancestors) if ancestors else None
        submission.submit(spec, holder=holder, task=task, endpoint_of=lambda _: self.endpoint(), clock=lambda: self.now)
        return self.handle(name)

    def handle(self, name: str, **options: Any) -> JobHandle:
        """Attach to a job, as another process does."""
        target = Target(
            self.store, Key(name, 1), POOL, find_endpoint=lambda _: self.endpoint(), clock=lambda: self.now,
            monotonic=lambda: self.now, sleep=self.sleep,
        )  # fmt: skip
        return JobHandle(target, self.row(name), **options)

    def row(self, name: str) -> Job:
        return attempts.load(self.store, Key(name, 1))

    def end(self, name: str) -> None:
        """A driver ends, and has not said that it began."""
        attempts.end(self.store, Key(name, 1), JobState.SUCCEEDED, self.now, result=RESULT.model_dump(mode="json"))

    @property
    def sent(self) -> list[str]:
        return [job.removesuffix("-1") for job in self.head.jobs]


@pytest.fixture
def queue(store: Store, head: FakeHead, spec: JobSpec) -> Queue:
    return Queue(store, head, spec)


def positions() -> dict[str, int]:
    return {job.job_id: job.position for job in jobs.list_jobs() if job.position}


def test_a_job_waits_for_room_and_its_waiter_starts_it(queue):
    queue.submit("first")
    second = queue.submit("second")
    assert queue.sent == ["first"]
    assert (second.status().state, second.status().position) == (JobState.PENDING, 1)
    assert positions() == {"second": 1}
    lines: list[str] = []
    queue.after(30.0, lambda: queue.end("first"))
    queue.after(60.0, lambda: queue.end("second"))

    assert second.wait(on_log=lines.append) == RESULT
    assert queue.sent == ["first", "second"]
    assert lines == [f"waiting for room on pool {POOL}: position 1 of 1 in the queue, 1 job runs"]
    assert positions() == {}


def test_no_place_is_shown_of_a_job_that_was_admitted_a_moment_ago(queue, monkeypatch):
    """By another process, after this one has read the row."""
    queue.submit("first")
    second = queue.submit("second")
    looks = iter([job_queue.look(queue.store, POOL)])
    monkeypatch.setattr(job_queue, "look", lambda *_: next(looks, Line({}, [], has_nodes=True)))
    lines: list[str] = []

    with pytest.raises(JobTimeoutError):
        second.wait(timeout=5.0, on_log=lines.append)
    assert lines == [f"waiting for room on pool {POOL}: position 1 of 1 in the queue, 1 job runs"]


def test_waiters_of_one_process_that_share_looks_read_the_queue_once(queue):
    handles = [queue.submit(f"job-{number}") for number in range(5)]
    waiters = [Waiter(handle.target, shares_looks=True) for handle in handles[1:]]
    with statements() as seen:
        for waiter in waiters:
            waiter.round()
    assert sum("jobs.gang" in each and "jobs.priority" in each and "jobs.spec" not in each for each in seen) == 1
    assert [waiter.place.position for waiter in waiters] == [1, 2, 3, 4]


def test_higher_priority_then_the_holder_with_less_then_age(queue):
    queue.submit("a", holder="airflow:a/r")
    queue.submit("b", holder="airflow:a/r")
    queue.submit("c", holder="airflow:a/r")
    queue.submit("d", holder="airflow:b/r")
    queue.submit("e", holder="airflow:a/r", priority=1)

    assert positions() == {"e": 1, "d": 2, "b": 3, "c": 4}
    assert {job.job_id: job.priority for job in jobs.list_jobs()} == {"a": 0, "b": 0, "c": 0, "d": 0, "e": 1}


def test_a_job_asked_for_again_keeps_its_place_whatever_its_priority(queue):
    queue.submit("first")
    queue.submit("second")
    queue.submit("third")

    assert queue.submit("second", priority=-5).attempt == 1
    assert positions() == {"second": 1, "third": 2}


def test_a_waiter_starts_a_job_that_nobody_else_starts(queue):
    """Its submitter was killed, or has not called `wait` yet."""
    queue.submit("first")
    queue.submit("left-alone", orphan_after=None)
    third = queue.submit("third")
    queue.after(5.0, lambda: queue.end("first"))
    queue.after(20.0, lambda: queue.end("left-alone"))
    queue.after(40.0, lambda: queue.end("third"))

    assert third.wait(on_log=None) == RESULT
    assert queue.sent == ["first", "left-alone", "third"]


def test_a_job_runs_with_the_python_of_the_process_that_asked_for_it(queue, monkeypatch):
    queue.submit("first")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/env/of/submitter/python")
        second = queue.submit("second")
    queue.end("first")

    second.status()

    entrypoint = queue.head.jobs["second-1"].entrypoint
    # The driver starts its workers itself, so it is told the library that they share with it.
    assert shlex.split(entrypoint)[3:] == ["/env/of/submitter/python", "second", "1", "xgboost"]


def test_ctrl_c_while_it_starts_another_ones_job_fails_neither(queue, monkeypatch):
    queue.submit("first")
    queue.submit("left-alone")
    third = queue.submit("third")
    queue.end("first")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(JobClient, "submit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            third.wait(on_log=None)
    assert [queue.row(name).state for name in ("left-alone", "third")] == [JobState.PENDING] * 2

    with pytest.raises(JobTimeoutError):  # it has its room, and is sent like any that was never sent
        queue.handle("left-alone").wait(timeout=30.0, on_log=None)
    assert queue.sent == ["first", "left-alone"]


def test_cancelling_a_waiting_job_asks_the_head_nothing_and_leaves_nothing(queue, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    connector = DataConnector.from_dataframe(pd.DataFrame({"a": [1.0], "b": [1.0], "y": [0.0]}))
    queue.submit("first")
    waiting, folder = queue.submit("second", dataset=connector.to_spec()), Path(str(connector.staging))
    del connector
    queue.submit("third")
    assert credentials.left() == {"first-1", "second-1", "third-1"}
    assert folder.exists()
    monkeypatch.setattr(queue.head, "answer", lambda *_: pytest.fail("it was asked"))

    assert waiting.cancel()

    assert waiting.left is None
    assert credentials.left() == {"first-1", "third-1"}
    assert not folder.exists()
    assert positions() == {"third": 1}
    with pytest.raises(JobCancelledError):
        waiting.wait(on_log=None)


def test_a_run_that_is_cleaned_up_leaves_the_queue(queue, monkeypatch):
    monkeypatch.setattr("shoal.jobs.cleanup.sweep", list)
    queue.submit("first", holder="airflow:other/run")
    queue.submit("second")

    assert jobs.clean_up(POOL, "airflow:dag/run").cancelled == ("second",)
    with history.acting_as("anna"):
        jobs.cancel("first")

    assert [(line.subject, line.actor, line.pool, line.detail) for line in history.read(kind="cancelled")] == [
        ("first", "anna", POOL, "attempt 1: cancelled on request"),
        ("second", "airflow:dag/run", POOL, "attempt 1: the run of the job was cleaned up"),
    ]


def test_the_end_of_a_holder_ends_the_jobs_that_were_requested_inside_it(queue, monkeypatch):
    monkeypatch.setattr("shoal.jobs.cleanup.sweep", list)
    queue.submit("first", holder="test:other")
    run, block, child = "prefect:run", "prefect:run/1", "prefect:child"
    queue.submit("beside", holder=run, ancestors={run: True})
    queue.submit("inside", holder=run, ancestors={block: True, run: True})
    queue.submit("called", holder=child, ancestors={block: True, child: True, run: True})
    queue.submit("deployed", holder="prefect:deployed", ancestors={"prefect:deployed": True, run: False})

    assert jobs.clean_up(POOL, block).cancelled == ("called", "inside")
    assert not queue.row("called").error_is_permanent  # it was not cancelled by a user, so its task may be retried
    queue.submit("called", holder=child, ancestors={child: True, run: True})
    assert jobs.clean_up(POOL, child).cancelled == ("called",)
    assert jobs.clean_up(POOL, run).cancelled == ("beside",)
    assert jobs.clean_up(POOL, run, is_cancelled=True).cancelled == ("deployed",)


def test_a_job_that_another_block_attaches_to_ends_with_this_block(queue, monkeypatch):
    monkeypatch.setattr("shoal.jobs.cleanup.sweep", list)
    queue.submit("first", holder="test:other")
    for block in ("prefect:run/1", "prefect:run/2"):
        queue.submit("second", holder="prefect:run", ancestors={block: True})

    assert jobs.clean_up(POOL, "prefect:run/1").cancelled == ()
    assert jobs.clean_up(POOL, "prefect:run/2").cancelled == ("second",)


def test_a_long_queue_hides_no_running_job_and_no_run(queue, monkeypatch):
    monkeypatch.setattr("shoal.jobs.cleanup.sweep", list)
    monkeypatch.setattr("shoal.jobs.reconcile.rounds._AT_ONCE", 1)
    queue.submit("first")
    attempts.start(queue.store, Key("first", 1), ProcessId.mine().to_json(), queue.now)
    for name, holder in (("second", "airflow:other/run"), ("third", "airflow:dag/run")):
        queue.now += 1.0
        queue.submit(name, holder=holder)
    checked: list[str] = []
    monkeypatch.setattr(rounds, "host_round", lambda target: checked.append(target.key.job_id))

    assert rounds.settle_jobs() == []
    assert checked == ["first", "second"]  # the running one, and of the others the one polled longest ago
    assert cleanup.clean_up_everywhere("airflow:other/run", reason="over") == [f"{POOL}: cancelled job second: over"]


def ages(queue: Queue, name: str, seconds: float) -> None:
    """Let a job have waited so long, with nobody asking."""
    with queue.store.transaction() as session:
        job = session.get_one(Job, (name, 1))
        assert job.queued_at is not None
        job.queued_at, job.queued_clock = job.queued_at - seconds, None
        job.last_polled_at, job.last_polled_clock = job.last_polled_at - seconds, None


def test_a_job_waits_no_longer_than_its_timeout(queue):
    queue.submit("first")
    second = queue.submit("second", timeout=100.0)
    ages(queue, "second", 99.0)
    assert second.status().state is JobState.PENDING
    ages(queue, "second", 2.0)

    with pytest.raises(JobFailedError, match=r'waited for room on pool "retrain" for longer than its run_config.time'):
        second.wait(on_log=None)
    assert queue.sent == ["first"]


@pytest.mark.parametrize(("asked_ago", "state"), [(99.0, JobState.PENDING), (101.0, JobState.CANCELLED)])
def test_a_sweep_ends_a_waiting_job_that_nobody_asked_about(queue, asked_ago, state):
    queue.submit("first")
    second = queue.submit("second", orphan_after=100.0)
    ages(queue, "second", asked_ago)

    assert host_round(second.target) is (state is JobState.CANCELLED)
    assert queue.row("second").state is state


def test_asking_keeps_a_waiting_job(queue, monkeypatch):
    monkeypatch.setattr("shoal.state.stamps.monotonic", lambda: queue.now)
    queue.submit("first")
    second = queue.submit("second", orphan_after=9.0)

    with pytest.raises(JobTimeoutError, match="is still pending"):
        second.wait(timeout=30.0, on_log=None)
    assert not host_round(second.target)


@pytest.mark.parametrize(
    ("holder", "ancestors", "held_by"),
    [("airflow:dag/run", None, "airflow:dag/run"), ("prefect:child", {"prefect:run/1": True}, "prefect:run/2")],
)
def test_whoever_waits_for_a_waiting_job_renews_its_runs_lease(queue, monkeypatch, holder, ancestors, held_by):
    monkeypatch.setattr("shoal.pool.reconciling.ensure_running", lambda: None)
    queue.submit("first")
    second = queue.submit("second", holder=holder, ancestors=ancestors)
    pool = ComputePool(POOL, holder=held_by, store=queue.store, clock=lambda: queue.now)
    pool.lease(1, is_async=True)
    renewed: list[float] = []
    monkeypatch.setattr(ComputePool, "renew", lambda _: renewed.append(queue.now))
    queue.now += LEASE_TTL / 3 - 60.0

    with pytest.raises(JobTimeoutError):
        second.wait(timeout=120.0, on_log=None)

    assert min(renewed) - 1000.0 > LEASE_TTL / 3


def test_a_waiting_job_starts_on_the_head_that_there_is_then(queue, another_head):
    queue.submit("first")
    second = queue.submit("second")
    queue.endpoint = lambda: another_head.endpoint
    queue.end("first")

    assert second.status().position is None
    assert list(another_head.jobs) == ["second-1"]
    assert queue.row("second").endpoint["api"] == another_head.endpoint.api


def test_a_waiting_job_outlasts_a_head_that_is_replaced_and_a_locked_store(queue, monkeypatch):
    queue.submit("first")
    second = queue.submit("second")
    queue.end("first")

    def down() -> Endpoint:
        raise PoolDownError("the head is not ready")

    up, queue.endpoint = queue.endpoint, down
    with pytest.raises(JobTimeoutError):
        second.wait(timeout=50.0, on_log=None)  # HEAD_PATIENCE_S is for jobs that run
    queue.endpoint = up
    with monkeypatch.context() as patched:
        patched.setattr(job_queue, "admit", lambda *_: (_ for _ in ()).throw(StoreError("database is locked")))
        with pytest.raises(JobTimeoutError):
            second.wait(timeout=5.0, on_log=None)

    assert second.status().state is JobState.PENDING
    assert queue.sent == ["first", "second"]


@pytest.mark.parametrize("error", [HeadBusyError, HeadGoneError, PoolDownError])
def test_a_head_that_does_not_answer_a_submission_fails_no_waiting_job(queue, monkeypatch, caplog, error):
    queue.submit("first")
    second = queue.submit("second")
    queue.submit("third")
    queue.end("first")

    def refuse(*_: object, **__: object) -> None:
        raise error("the head does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(JobClient, "submit", refuse)
        with pytest.raises(JobTimeoutError):
            second.wait(timeout=5.0, on_log=None)
    assert positions() == {"second": 1, "third": 2}
    assert "job second, attempt 1 waits again: the head does not answer" in caplog.text

    assert second.status().position is None
    assert queue.sent == ["first", "second"]


@pytest.mark.parametrize("how", ["down", "deleted"])
def test_a_waiting_job_fails_with_its_pool(queue, how):
    queue.submit("first")
    second = queue.submit("second")

    def gone() -> Endpoint:
        raise PoolDownError("down") if how == "down" else PoolNotFoundError(POOL, [])

    queue.endpoint = gone
    with queue.store.transaction() as session:
        session.execute(update(Node).values(state=NodeState.ENDING))
        session.execute(update(Pool).values(state=PoolState.STOPPING))

    with pytest.raises(JobFailedError, match='pool "retrain" went down while the job was waiting'):
        second.wait(on_log=None)


def test_the_memory_that_the_head_of_a_cluster_reports_limits_the_drivers(queue):
    """Nodes of other pools are on this host."""
    with queue.store.transaction() as session:
        session.execute(update(Node).values(cpus=9, endpoint={"memory_bytes": str(4 * 2 * DRIVER_BYTES)}))

    for name in ("first", "second", "third"):
        queue.submit(name)

    assert queue.sent == ["first", "second"]


def _claim(url: str, names: list[str], gate: Any, seen: Any) -> None:
    """Admit own attempts until all have run; note how many there were at once, as soon as one is admitted."""
    store = Store(url)
    gate.wait()
    left = set(names)
    while left:
        for name in sorted(left):
            key = Key(name, 1)
            if job_queue.admit(store, key, 1.0, {}) is Admission.WAITS:
                continue
            with store.reading() as session:
                admitted = Job.admitted_at.is_not(None), Job.state == JobState.PENDING
                seen.put(len(session.scalars(select(Job.id).where(*admitted)).all()))
            attempts.end(store, key, JobState.SUCCEEDED, 2.0)
            left.remove(name)
    seen.close()
    seen.join_thread()
    os._exit(0)  # the exit handlers of a library that an earlier test has imported may fail in a fork


@pytest.mark.processes
def test_processes_that_claim_at_once_never_exceed_the_room_and_lose_none(either_store):
    """Four processes with four jobs each, room for two; each counts after it was given room."""
    store = Store()
    add_pool(store)
    add_node(store, cpus=2)
    keys = [Key(f"job-{number}", 1) for number in range(16)]
    for key in keys:
        order = Order(key.job_id, POOL, "airflow:d/r", {"fingerprint": "q"}, {}, None, 0, GangClaim(1, 1).to_json())
        attempts.ask(store, order, 0.0)
    context = multiprocessing.get_context("fork")
    gate, seen = context.Barrier(4), context.Queue()
    names = [key.job_id for key in keys]
    claimers = [context.Process(target=_claim, args=(store.url, names[n::4], gate, seen)) for n in range(4)]
    for process in claimers:
        process.start()
    counts = [seen.get(timeout=120) for _ in keys]
    for process in claimers:
        process.join(60)

    assert [process.exitcode for process in claimers] == [0] * 4
    assert max(counts) <= 2
    assert {attempts.load(store, key).state for key in keys} == {JobState.SUCCEEDED}
