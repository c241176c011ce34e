"""Jobs whose submitter died before it sent them, and jobs whose driver runs on another host than whoever looks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from shoal import jobs, reconciler
from shoal.jobs import submission
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.os_processes import ProcessId
from shoal.pool import reconciling
from shoal.pool.backends.local.backend import token_path
from shoal.pool.journal import rows
from shoal.reconciler import LostJobs, SilentJobs
from shoal.state import Store, stamps
from shoal.state.schema import Job, JobState, Node, NodeState, Pool, PoolState
from tests.support.fake_ray_head import TOKEN, FakeHead
from tests.support.job_store import POOL
from tests.support.waiting import wait_until

ELSEWHERE = {"boot": "another boot", "pid": 4_000_000, "start": 1, "host": "0" * 16}


@pytest.fixture
def dead() -> dict[str, Any]:
    """A process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = ProcessId.of(process.pid)
        assert found is not None
        process.communicate(b"\n")
    return found.to_json()


@pytest.fixture
def headed(store: Store, head: FakeHead, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store's pool has a head, the fake one, and nothing but jobs keeps it up."""
    monkeypatch.setattr("shoal.pool.reconciling.ensure_running", lambda: None)
    began = stamps.monotonic()
    monkeypatch.setattr("shoal.state.stamps.monotonic", lambda: began)  # however slow the machine
    token_path(POOL).write_text(TOKEN)
    endpoint = {"api": head.endpoint.api, "gcs": head.endpoint.gcs, "ray_node_id": "0"}
    with store.transaction() as session:
        session.add(
            Node(
                id="0123456789", pool=POOL, name=f"{POOL}-0", is_head=True, state=NodeState.READY, epoch=1, cpus=1,
                gpus=0, endpoint=endpoint, busy=False, start_deadline=0.0, created_at=0.0,
            )
        )  # fmt: skip
    return store


def pending(store: Store, head: FakeHead, spec: Any, *, submitter: Any, asked_ago: float, got: str = "a row") -> Key:
    """A detached job that was asked for some time ago by a process that then got no further than this."""
    detached = spec.model_copy(update={"run_config": spec.run_config.model_copy(update={"orphan_after": None})})
    handle = submission.submit(detached, endpoint_of=lambda _: head.endpoint)
    if got != "a driver":
        head.jobs.clear()
    with store.transaction() as session:
        job = session.get_one(Job, (handle.job_id, handle.attempt))
        job.submitter = submitter | {"python": sys.executable, "folder": None}
        if got in ("a row", "a place in the queue"):
            job.admitted_at = None
        if got == "a row":
            job.queued_at = None
        job.last_polled_clock = stamps.stamp(job.last_polled_at) | {"at": stamps.monotonic() - asked_ago}
    return Key(handle.job_id, handle.attempt)


def state(store: Store, key: Key) -> JobState:
    return attempts.load(store, key).state


def pool_state(store: Store) -> PoolState:
    with store.reading() as session:
        return session.get_one(Pool, POOL).state


def test_a_job_that_was_never_sent_fails_and_keeps_no_pool_up(headed, head, spec, dead):
    key = pending(headed, head, spec, submitter=dead, asked_ago=21.0)

    did = jobs.sweep()

    why = f"the submitter (pid {dead['pid']}) died before it sent the job to the pool's head: submit the job again"
    assert did[0] == f"job {key.job_id}, attempt 1: failed, {why}"
    assert f"{POOL}: the pool goes down because its last lease ended and it has no base demand" in did
    assert attempts.load(headed, key).error == why
    assert pool_state(headed) is PoolState.DOWN


def test_a_job_that_was_sent_outlives_its_submitter(headed, head, spec, dead):
    key = pending(headed, head, spec, submitter=dead, asked_ago=900.0, got="a driver")

    assert jobs.sweep() == []
    assert state(headed, key) is JobState.PENDING
    assert pool_state(headed) is PoolState.UP


def test_a_job_that_got_room_and_was_never_sent_is_sent_by_a_sweep(headed, head, spec, dead):
    key = pending(headed, head, spec, submitter=dead, asked_ago=21.0, got="room")

    assert jobs.sweep() == []
    assert list(head.jobs) == [key.submission_id]


def test_a_job_that_got_room_is_left_to_its_submitter_while_that_lives(headed, head, spec):
    pending(headed, head, spec, submitter=ProcessId.mine().to_json(), asked_ago=900.0, got="room")

    assert jobs.sweep() == []
    assert not head.jobs


@pytest.mark.parametrize(("seconds", "sent"), [(200.0, False), (301.0, True)])
def test_a_job_that_got_room_long_ago_is_sent_though_its_submitter_lives(headed, head, spec, seconds, sent):
    key = pending(headed, head, spec, submitter=ProcessId.mine().to_json(), asked_ago=0.0, got="room")
    with headed.transaction() as session:
        session.get_one(Job, (key.job_id, key.attempt)).admitted_at -= seconds

    assert jobs.sweep() == []
    assert list(head.jobs) == ([key.submission_id] if sent else [])


@pytest.mark.parametrize(
    ("whose", "asked_ago", "after"),
    [
        ("a dead process", 19.0, JobState.PENDING),
        ("a dead process", 21.0, JobState.FAILED),
        ("this process", 900.0, JobState.PENDING),
        ("another host's process", 299.0, JobState.PENDING),
        ("another host's process", 301.0, JobState.FAILED),
    ],
)
def test_who_has_to_be_gone_for_how_long(headed, head, spec, dead, whose, asked_ago, after):
    submitters = {
        "a dead process": dead,
        "this process": ProcessId.mine().to_json(),
        "another host's process": ELSEWHERE,
    }
    key = pending(headed, head, spec, submitter=submitters[whose], asked_ago=asked_ago)

    jobs.sweep()

    assert state(headed, key) is after


def test_the_submitter_is_known_from_the_first_row_on(headed, head, spec):
    handle = submission.submit(spec, endpoint_of=lambda _: head.endpoint)

    job = attempts.load(headed, Key(handle.job_id, 1))

    assert job.submitter == ProcessId.mine().to_json() | {"python": sys.executable, "folder": os.getcwd()}
    assert job.submitter["host"]


@pytest.mark.processes
def test_the_reconciler_has_it_settled_without_anybody_asking(headed, head, spec, dead, monkeypatch):
    monkeypatch.setattr(reconciler, "JOB_SILENT_AFTER", 0.0)
    key = pending(headed, head, spec, submitter=dead, asked_ago=60.0)

    running = threading.Thread(target=reconciling.run, args=(LostJobs().look,), daemon=True)
    running.start()

    wait_until(lambda: state(headed, key) is JobState.FAILED, "the job to be settled", 120)
    wait_until(lambda: pool_state(headed) is PoolState.DOWN, "the pool's end", 60)
    running.join(30)
    assert not running.is_alive()


@pytest.mark.processes
def test_the_reconciler_has_a_waiting_job_started_whose_submitter_died(headed, head, spec, dead, monkeypatch):
    monkeypatch.setattr(reconciler, "WAITING_JOB_SILENT_AFTER", 0.0)
    key = pending(headed, head, spec, submitter=dead, asked_ago=60.0, got="a place in the queue")

    running = threading.Thread(target=reconciling.run, args=(LostJobs().look,), daemon=True)
    running.start()

    wait_until(lambda: key.submission_id in head.jobs, "the job to be started", 120)
    assert attempts.end(headed, key, JobState.CANCELLED, 1.0)
    wait_until(lambda: pool_state(headed) is PoolState.DOWN, "the pool's end", 60)
    running.join(30)
    assert not running.is_alive()


def test_a_driver_on_another_host_is_not_judged_by_a_pid_of_this_one(headed, head, spec):
    key = pending(headed, head, spec, submitter=ProcessId.mine().to_json(), asked_ago=0.0, got="a driver")
    attempts.start(headed, key, ELSEWHERE, 1.0)
    head.jobs[key.submission_id].status = "RUNNING"

    assert jobs.sweep() == []
    assert pool_state(headed) is PoolState.UP


def test_a_dead_driver_of_this_host_keeps_no_pool_up(headed, head, spec, dead):
    key = pending(headed, head, spec, submitter=ProcessId.mine().to_json(), asked_ago=0.0, got="a driver")
    attempts.start(headed, key, dead, 1.0)
    with headed.reading() as session:
        assert rows.load(session, POOL, lock=False).works is False


class TestSilentJobs:
    def job(self, **fields: Any) -> Job:
        return Job(**({"id": "j", "attempt": 1, "state": JobState.RUNNING, "last_polled_at": 1.0} | fields))

    def silent(self, *looks: Job) -> list[bool]:
        """Whether the job was found silent, at looks 20 s apart."""
        passed = [0.0]
        jobs_ = SilentJobs(lambda: passed[0])
        found = []
        for job in looks:
            found.append(jobs_.among([job]) != [])
            passed[0] += 20.0
        return found

    def test_an_old_heartbeat_of_another_hosts_driver_is_noticed_after_a_while(self):
        job = self.job(driver=ELSEWHERE, heartbeat_at=5.0)
        assert self.silent(job, job, job) == [False, False, True]

    def test_a_heartbeat_that_goes_on_is_not(self):
        looks = [self.job(driver=ELSEWHERE, heartbeat_at=beat) for beat in (5.0, 3.0, 9.0, 2.0)]  # a clock that jumps
        assert self.silent(*looks) == [False] * 4

    def test_a_driver_that_lives_here_answers_for_itself(self):
        assert self.silent(*[self.job(driver=ProcessId.mine().to_json(), heartbeat_at=5.0)] * 3) == [False] * 3

    def test_a_dead_one_does_not(self, dead):
        assert self.silent(*[self.job(driver=dead)] * 3) == [False, False, True]

    def test_a_pending_job_whose_submitter_died_is_noticed_unless_somebody_asks(self, dead):
        forgotten = self.job(state=JobState.PENDING, submitter=dead)
        assert self.silent(forgotten, forgotten, forgotten) == [False, False, True]
        asked = [self.job(state=JobState.PENDING, submitter=dead, last_polled_at=at) for at in (1.0, 21.0, 41.0)]
        assert self.silent(*asked) == [False] * 3

    @pytest.mark.parametrize("polled_at", [(1.0, 1.0, 1.0, 1.0), (1.0, 21.0, 41.0, 61.0)], ids=["never", "elsewhere"])
    def test_a_waiting_job_is_noticed_though_its_submitter_lives_and_polls(self, polled_at):
        waiting = {"state": JobState.PENDING, "submitter": ProcessId.mine().to_json(), "queued_at": 1.0}
        looks = [self.job(**waiting, last_polled_at=at) for at in polled_at]
        assert self.silent(*looks) == [False, False, False, True]

    def test_a_job_whose_driver_never_began_is_noticed_though_its_submitter_lives(self):
        sent = self.job(state=JobState.PENDING, submitter=ProcessId.mine().to_json(), queued_at=1.0, admitted_at=2.0)
        assert self.silent(sent, sent, sent) == [False, False, True]

    def test_a_pending_job_of_a_living_submitter_is_left_alone(self):
        alive = self.job(state=JobState.PENDING, submitter=ProcessId.mine().to_json())
        assert self.silent(alive, alive, alive) == [False] * 3
