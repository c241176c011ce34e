from __future__ import annotations

import math
import time

import pytest

from shoal.jobs.driver.attempt_metrics import MetricSeries
from shoal.jobs.driver.heartbeats import HeartbeatThread, why_end
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import End, Key
from shoal.state import Store
from shoal.state.schema import Job, JobState
from shoal.training.reporting import Progress
from shoal.training.run_config import RunConfig


def running(**fields: object) -> Job:
    known = {"state": JobState.RUNNING, "orphan_after": 900.0, "last_polled_at": 100.0, "started_at": 100.0}
    return Job(id="j", attempt=1, **(known | fields))


def why(job: Job | None, limits: RunConfig | None = None, **known: float):
    return why_end(
        job, limits or RunConfig(), **{"unpolled_for": 0.0, "running_for": 0.0, "used_node_hours": 0.0} | known
    )


class TestWhyEnd:
    def test_a_job_that_is_asked_about_goes_on(self):
        assert why(running(), unpolled_for=900.0) is None

    def test_an_orphan_ends_itself(self):
        reason = why(running(), unpolled_for=900.1)

        assert reason is not None
        assert reason.state is JobState.CANCELLED
        assert "no process has polled the job for orphan_after=900 s" in reason.error

    def test_a_detached_job_does_not(self):
        assert why(running(orphan_after=None), unpolled_for=1e9) is None

    def test_its_time_is_up(self):
        assert why(running(), RunConfig(timeout=60.0), running_for=60.0) is None
        reason = why(running(), RunConfig(timeout=60.0), running_for=61.0)

        assert reason is not None
        assert reason.state is JobState.FAILED
        assert "timeout=60 s" in reason.error

    def test_its_budget_is_used_up(self):
        assert why(running(), RunConfig(budget_node_hours=2.0), used_node_hours=1.9) is None
        reason = why(running(), RunConfig(budget_node_hours=2.0), used_node_hours=2.5)

        assert reason is not None
        assert (reason.state, reason.error_is_permanent) == (JobState.FAILED, True)
        assert "used 2.5 node-hours, but run_config.budget_node_hours=2" in reason.error

    def test_its_row_says_so(self):
        job = running(state=JobState.CANCELLED, error="on request")

        assert why(job) == End(JobState.CANCELLED, "on request")
        assert why(None) is not None


class TestHeartbeats:
    """With a real store, and a monotonic clock that the test moves."""

    KEY = Key("j", 1)

    @pytest.fixture(autouse=True)
    def job(self, store: Store) -> None:
        with store.transaction() as session:
            session.add(running(pool="p", holder="cli:me@here", spec={}, endpoint={}, created_at=0.0))

    def row(self, store: Store) -> Job:
        return attempts.load(store, self.KEY)

    def test_a_job_that_was_asked_about_survives_a_suspend_and_a_jump_of_the_clock(self, store):
        passed = [5000.0]
        thread = HeartbeatThread(
            store, self.KEY, MetricSeries(self.KEY), RunConfig(timeout=3600.0), monotonic=lambda: passed[0]
        )

        # To the wall clock the row is as old as its `last_polled_at` and `started_at` of 1970.
        assert thread.look()[1] is None
        passed[0] += 899.0
        assert thread.look()[1] is None
        attempts.touch(store, self.KEY, 99.0)  # asked by a process whose clock is behind
        passed[0] += 899.0
        assert thread.look()[1] is None
        passed[0] += 1000.0
        reason = thread.look()[1]
        assert reason is not None
        assert "no process has polled the job" in reason.error

    def test_a_timeout_counts_from_the_drivers_start(self, store):
        passed = [5000.0]
        thread = HeartbeatThread(
            store, self.KEY, MetricSeries(self.KEY), RunConfig(timeout=60.0), monotonic=lambda: passed[0]
        )

        passed[0] += 60.0
        assert thread.look()[1] is None
        passed[0] += 1.0
        reason = thread.look()[1]
        assert reason is not None
        assert "timeout=60 s" in reason.error

    def test_it_leaves_a_sign_of_life_every_five_seconds_and_writes_nothing_between(self, store, monkeypatch):
        passed = [5000.0]
        thread = HeartbeatThread(store, self.KEY, MetricSeries(self.KEY), RunConfig(), monotonic=lambda: passed[0])
        writes = []
        transaction = store.transaction
        monkeypatch.setattr(store, "transaction", lambda: (writes.append(passed[0]), transaction())[1])
        began = time.time()

        for passed[0] in (5000.0, 5002.0, 5004.0, 5006.0, 5008.0):
            thread.look()

        assert writes == [5000.0, 5006.0]
        with store.reading() as session:
            assert session.get_one(Job, ("j", 1)).heartbeat_at >= began

    def test_progress_is_written_with_the_sign_of_life(self, store):
        passed = [5000.0]
        thread = HeartbeatThread(store, self.KEY, MetricSeries(self.KEY), RunConfig(), monotonic=lambda: passed[0])
        seen = []

        for done, passed[0] in enumerate((5000.0, 5002.0, 5006.0), start=1):
            thread.keep(Progress(done, 9, "rounds", {"eval-rmse": math.nan}))
            thread.look()
            seen.append(self.row(store).progress["done"])

        assert seen == [1, 1, 3]
        assert math.isnan(self.row(store).progress["metrics"]["eval-rmse"])

    def test_an_ended_job_gets_no_sign_of_life(self, store):
        attempts.end(store, self.KEY, JobState.CANCELLED, 1.0, error="on request")

        _, reason = HeartbeatThread(store, self.KEY, MetricSeries(self.KEY), RunConfig()).look()

        assert reason == End(JobState.CANCELLED, "on request")
        assert self.row(store).heartbeat_at is None
