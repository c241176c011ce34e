"""A job belongs to the team of its submitter: other teams can neither cancel nor remove it, nor train under its id."""

from __future__ import annotations

from datetime import timedelta

import pytest

from shoal import jobs
from shoal.errors import TeamError
from shoal.jobs import submission
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.pool.spec import PoolSpec
from shoal.state.schema import Job, JobState, Pool
from tests.support.job_store import POOL

KEY = Key("theirs", 1)
DAY = 24 * 3600.0


@pytest.fixture
def theirs(store, spec, head):
    """A job of team fraud."""
    document = spec.model_copy(update={"fingerprint": "1"}).document()
    endpoint = {"api": head.endpoint.api, "gcs": ""}
    order = Order(KEY.job_id, POOL, "airflow:tests:dag/run", document, endpoint, None, team="fraud")
    attempts.ask(store, order, 0.0)
    with store.transaction() as session:  # it waits, so that its end needs no answer of the head
        session.get_one(Job, (KEY.job_id, KEY.attempt)).queued_at = 0.0
    return store


@pytest.mark.parametrize(
    ("asking", "actor", "may"),
    [
        ("ads", None, False),
        ("fraud", None, True),
        ("*", None, True),
        (None, None, True),
        ("ads", "airflow:tests:dag/run", True),  # the clean-up of the run
    ],
)
def test_another_team_cannot_cancel_a_job(theirs, monkeypatch, asking, actor, may):
    if asking is not None:
        monkeypatch.setenv("SHOAL_TEAM", asking)
    handle = jobs.attach(KEY.job_id, actor=actor)
    if may:
        assert handle.cancel()
    else:
        with pytest.raises(TeamError, match='job "theirs" belongs to team "fraud", and this process acts for team "a'):
            handle.cancel()
    assert attempts.state(theirs, KEY) is (JobState.CANCELLED if may else JobState.PENDING)


def test_a_user_with_the_same_name_in_another_team_cannot_cancel_it(theirs, monkeypatch):
    with theirs.transaction() as session:
        session.get_one(Job, (KEY.job_id, KEY.attempt)).holder = "cli:root@host"
    monkeypatch.setenv("SHOAL_TEAM", "ads")
    with pytest.raises(TeamError):
        jobs.attach(KEY.job_id, actor="cli:root@host").cancel()


def test_another_team_cannot_train_under_the_id_of_a_job(theirs, spec, head):
    attempts.end(theirs, KEY, JobState.FAILED, 1.0)
    named = spec.model_copy(update={"run_config": spec.run_config.model_copy(update={"job_id": KEY.job_id})})

    def submit(team):
        return submission.submit(named, holder="python:x", endpoint_of=lambda _: head.endpoint, team=team)

    with pytest.raises(TeamError, match='job "theirs" belongs to team "fraud"'):
        submit("ads")
    assert submit("fraud").attempt == 2
    assert attempts.load(theirs, Key("theirs", 2)).team == "fraud"


def test_the_pool_of_another_team_gets_no_job(store, spec, head):
    with store.transaction() as session:
        session.get_one(Pool, POOL).spec = PoolSpec.parse(f"local://{POOL}?only_team=fraud").model_dump()

    def submit(team):
        return submission.submit(spec, endpoint_of=lambda _: head.endpoint, team=team)

    for asking in ("ads", None):
        with pytest.raises(TeamError, match=f'pool "{POOL}" belongs to team "fraud"'):
            submit(asking)
    assert jobs.list_jobs() == []
    submit("fraud")
    submit("*")
    assert [job.team for job in jobs.list_jobs()] == [None, "fraud"]


@pytest.mark.parametrize(("asking", "removed"), [("ads", 0), ("fraud", 1), (None, 1), ("*", 1)])
def test_jobs_of_other_teams_are_not_pruned(theirs, monkeypatch, asking, removed):
    attempts.end(theirs, KEY, JobState.FAILED, 1.0)
    if asking is not None:
        monkeypatch.setenv("SHOAL_TEAM", asking)
    assert len(jobs.prune_jobs(older_than=timedelta(days=1), clock=lambda: 3 * DAY)) == removed
