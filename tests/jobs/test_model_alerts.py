"""Alerts about models that were not promoted and jobs that wait, from the store's rows alone."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from shoal.errors import InvalidArgumentError
from shoal.jobs import WaitingJob, stale_models, waiting_jobs
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.state import Store
from shoal.state.schema import Job, PromotionState
from tests.support.job_store import POOL
from tests.support.model_registry import DAY, add_promotion


def ask(store: Store, job_id: str, model: str | None, days_ago: float, pool: str = POOL) -> None:
    register = model and {"model": model, "alias": "champion", "metric": "rmse"}
    spec = {"fingerprint": job_id, "register": register}
    attempts.ask(store, Order(job_id, pool, "airflow:dag/run", spec, {}, None), time.time() - days_ago * DAY)


def promote(model: str, version: str, days_ago: float, **columns: object) -> None:
    at = time.time() - days_ago * DAY
    add_promotion("sqlite:///mlflow.db", model, version, created_at=at, confirmed_at=at, **columns)


@pytest.fixture
def trained(store: Store) -> Store:
    """Models that were promoted long ago, lately, never, and that were trained only lately."""
    ask(store, "old-1", "old", 90)
    promote("old", "1", 90)
    promote("old", "2", 60)
    promote("old", "3", 1, state=PromotionState.WITHDRAWN)
    promote("fresh", "1", 90)
    promote("fresh", "2", 1)
    promote("fresh", "2", 50, alias="staging")
    ask(store, "never-1", "never", 45)
    ask(store, "never-2", "never", 1)
    ask(store, "new-1", "new", 1)
    ask(store, "unregistered", None, 90)
    return store


def test_models_whose_last_promotion_is_older_than_the_bound(trained):
    stale = stale_models(timedelta(days=40))
    assert [(each.model, each.alias, round(each.days), each.version) for each in stale] == [
        ("fresh", "staging", 50, "2"),
        ("never", "champion", 45, None),
        ("old", "champion", 60, "2"),
    ]
    assert [str(each) for each in stale] == [
        "fresh: no promotion to staging for 50.0 days, since version 2",
        "never: no promotion to champion since the first training 45.0 days ago",
        "old: no promotion to champion for 60.0 days, since version 2",
    ]


def test_a_named_model_that_was_never_trained_is_stale(trained):
    stale = stale_models(timedelta(days=40), models=["old", "new", "mispelled"])
    assert [each.model for each in stale] == ["mispelled", "old"]
    assert str(stale[0]) == "mispelled: there was no training and no promotion to champion"


def test_jobs_that_wait_longer_than_the_bound(store):
    for name, days_ago, pool in (("long", 1, POOL), ("short", 0.01, POOL), ("other", 0.5, "scoring")):
        ask(store, name, "m", days_ago, pool)
    ask(store, "runs", "m", 2)
    with store.transaction() as session:
        for job in session.query(Job):
            job.queued_at = job.created_at
    attempts.start(store, Key("runs", 1), {}, time.time())

    assert [job.job_id for job in waiting_jobs(timedelta(hours=6))] == ["long", "other"]
    [waits] = waiting_jobs(timedelta(hours=6), POOL)
    assert str(waits) == (
        f"job long of airflow:dag/run has waited for 24.0 hours, and is number 1 in the queue of pool {POOL}"
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: stale_models(40), "older_than=40 must be a positive timedelta"),
        (lambda: stale_models(timedelta(days=40), models="old"), 'must be a list of names: \\["old"\\]'),
        (lambda: waiting_jobs(timedelta(0)), "longer_than=.* must be a positive timedelta"),
    ],
)
def test_a_wrong_bound_is_refused(call, said):
    with pytest.raises(InvalidArgumentError, match=said):
        call()


@pytest.mark.parametrize(
    ("hours", "said"), [(48, "2.0 days"), (24, "24.0 hours"), (0.058, "3.5 minutes"), (0.0025, "9 seconds")]
)
def test_a_wait_is_given_in_the_unit_that_suits_it(hours, said):
    assert f"has waited for {said}, and" in str(WaitingJob("id", "pool", "holder", 1, hours))
