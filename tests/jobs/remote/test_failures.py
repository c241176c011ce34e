"""The table of failures on pools of others, line by line: three trainings at once, and what their user gets.

Each test runs XGBoost from files on an S3 server, LightGBM from a frame, and a PyTorch function.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import select

from shoal.state.schema import Job, JobState, Lease
from tests.support.network_hosts import cut_between
from tests.support.remote_cluster import RemoteCluster, Trainings, alive, missing, remote_cluster
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]

A_MINUTE = 60.0
"""Seconds of an outage: more than the 45 s after which a head that gives no answer may be gone."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RemoteCluster]:
    if why := missing():
        pytest.skip(why)
    with remote_cluster() as there:
        yield there


@pytest.fixture(scope="module")
def undisturbed(cluster: RemoteCluster) -> dict[str, Any]:
    """The values of trainings to which nothing happens: digests of the models, and results of the function."""
    trainings = cluster.begin("undisturbed")
    trainings.hurry()
    return values(trainings)


def values(trainings: Trainings, attempt: int = 1) -> dict[str, Any]:
    """Check that all trainings have succeeded in this attempt and nothing is left, and return their values."""
    found = trainings.outcomes()
    assert {name: one["attempt"] for name, one in found.items()} == dict.fromkeys(trainings.names, attempt), found
    assert all(len(one["errors"]) == attempt - 1 for one in found.values()), found
    rows = trainings.jobs()
    assert [row.state for row in rows if row.attempt == attempt] == [JobState.SUCCEEDED] * 3
    expect_nothing_left(trainings, rows)
    return {name: one["value"] for name, one in found.items()}


def expect_nothing_left(trainings: Trainings, rows: list[Job]) -> None:
    cluster = trainings.cluster
    drivers = [row.driver["pid"] for row in rows if row.driver]
    wait_until(
        lambda: not any(alive(pid) for pid in drivers) and not any(map(trainings.alive, trainings.names)),
        "the end of drivers and workers",
        60,
    )
    wait_until(lambda: cluster.orchestrator.host.processes() == [], "the end of the orchestrator's processes", 60)
    with cluster.store.reading() as session:
        assert list(session.scalars(select(Lease))) == []
    assert all(row.sealed_credentials is None for row in rows)
    assert cluster.objects.glob("bucket/jobs/staging/*/**") == []
    for user in (cluster.owner, cluster.orchestrator):
        assert list(user.home.glob(".shoal/credentials/*")) == []


def test_a_killed_worker_of_each_training_is_replaced(cluster, undisturbed):
    trainings = cluster.begin("worker", run_config={"max_restarts": 1})
    trainings.do_rounds(15)
    for name in trainings.names:
        os.kill(trainings.alive(name)[0], signal.SIGKILL)
    trainings.hurry()

    assert values(trainings) == undisturbed


def test_a_killed_node_ends_no_training_if_its_owner_replaces_it(cluster, undisturbed):
    trainings = cluster.begin("node", run_config={"max_restarts": 1})
    trainings.do_rounds(15)
    cluster.worker.kill()
    wait_until(lambda: cluster.alive() == 1, "the end of the node", 120)
    cluster.join(cluster.worker)
    trainings.hurry()

    assert values(trainings) == undisturbed


def test_a_killed_head_fails_the_jobs_and_the_next_attempt_runs_on_the_new_one(cluster, undisturbed):
    trainings = cluster.begin("head", tries=2)
    trainings.do_rounds(5)
    cluster.head.kill()
    wait_until(lambda: not any(trainings.alive(name) for name in trainings.names), "the end of all workers", 60)
    cluster.worker.kill()
    cluster.start()
    trainings.hurry()

    assert values(trainings, attempt=2) == undisturbed
    for row in trainings.jobs()[:3]:
        assert row.state is JobState.FAILED
        assert re.search("does not know the job any more|has not answered for 45 s|got a new head", row.error)


def test_a_killed_orchestrator_finds_its_jobs_again(cluster, undisturbed):
    trainings = cluster.begin("orchestrator")
    trainings.do_rounds(5)
    trainings.kill_orchestrator()
    trainings.do_rounds(5)
    trainings.orchestrate()
    trainings.hurry()

    assert values(trainings) == undisturbed


def test_jobs_of_an_orchestrator_that_never_comes_back_end_themselves(cluster):
    trainings = cluster.begin("orphans", run_config={"orphan_after": 15})
    trainings.do_rounds(5)
    trainings.kill_orchestrator()
    wait_until(lambda: all(row.state is JobState.CANCELLED for row in trainings.jobs()), "the end of the jobs", 60)

    rows = trainings.jobs()
    assert all("no process has polled the job for orphan_after=15 s" in row.error for row in rows)
    expect_nothing_left(trainings, rows)
    trainings.hurry()  # nobody does; it closes the pipes


def test_a_store_that_is_away_for_a_minute_costs_nothing(cluster, undisturbed):
    """One training ends meanwhile: its result waits for the store."""
    trainings = cluster.begin("store")
    trainings.do_rounds(5)
    cluster.database.stop()
    trainings.hurry("lightgbm")
    trainings.do_rounds(5, ["xgboost", "pytorch"])
    trainings.run_for(A_MINUTE)
    cluster.database.start()
    trainings.hurry()

    assert values(trainings) == undisturbed
    assert "this process waits for the store" in trainings.said()


def test_an_orchestrator_whose_link_is_down_for_a_minute_waits_on(cluster, undisturbed):
    trainings = cluster.begin("link")
    trainings.do_rounds(5)
    cluster.orchestrator.host.cut()
    trainings.hurry("lightgbm")
    trainings.do_rounds(5, ["xgboost", "pytorch"])
    trainings.run_for(A_MINUTE)
    cluster.orchestrator.host.join()
    trainings.hurry()

    assert values(trainings) == undisturbed


def test_a_head_that_the_orchestrator_cannot_reach_for_a_minute_loses_no_job(cluster, undisturbed):
    """Both reach the store, in which the drivers' heartbeats arrive."""
    trainings = cluster.begin("between")
    trainings.do_rounds(5)
    with cut_between(cluster.orchestrator.host, cluster.owner.host):
        trainings.hurry("lightgbm")
        trainings.do_rounds(5, ["xgboost", "pytorch"])
        trainings.run_for(A_MINUTE)
    trainings.hurry()

    assert values(trainings) == undisturbed


def test_a_node_whose_link_is_down_is_lost_and_its_replacement_goes_on(cluster, undisturbed):
    trainings = cluster.begin("node-link", run_config={"max_restarts": 1})
    trainings.do_rounds(15)
    cluster.worker.user.host.cut()
    wait_until(lambda: cluster.alive() == 1, "the end of the node", 120)
    cluster.worker.user.host.join()
    cluster.worker.kill()
    cluster.join(cluster.worker)
    trainings.hurry()

    assert values(trainings) == undisturbed
