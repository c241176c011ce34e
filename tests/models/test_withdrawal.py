"""Withdrawn promotions: the champion before is champion again, unless another version has the alias by now."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import mlflow
import pytest

from shoal import history
from shoal.errors import InvalidArgumentError, JobNotFoundError, RegistryError, TeamError
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.models import ledger, withdraw_promotion
from shoal.models.ledger import Ledger, Withdrawal
from shoal.models.registry import Registry as Access
from shoal.pool.holder import acting_for
from shoal.state import Store
from shoal.state.schema import JobState, Promotion, PromotionState
from tests.models.test_contest import PAUSE, Client, Killed, Registry, killed, logged, registry  # noqa: F401
from tests.support.job_results import result_of
from tests.support.job_store import mlflow_uri, own_mlflow  # noqa: F401

CONFIRMED, WITHDRAWN = PromotionState.CONFIRMED, PromotionState.WITHDRAWN


@pytest.fixture(autouse=True)
def short_lock(monkeypatch):
    """A lock that is lost at once to the next process that wants it."""
    monkeypatch.setattr(ledger, "PROMOTION_LOCK_TTL_S", 0.0)


def withdraw(registry: Registry, version: str, client: Client | None = None) -> str:  # noqa: F811
    access = Access(client or registry.client(), registry.client()._registry_uri)
    with registry.store.reading() as session:
        promotion = session.query(Promotion).filter_by(model=registry.model, version=version).one()
    return Withdrawal(access, Ledger(Store(), access.uri, registry.model, "champion"), promotion).done()


def test_the_champion_before_is_champion_again(registry):  # noqa: F811
    registry.challenge(0.5)
    for _ in range(2):  # the second time, nothing changes
        assert withdraw(registry, "2") == "version 1 is champion: the promotion of version 2 was withdrawn"
        assert registry.champion() == 0.9
        assert registry.recorded() == [("1", CONFIRMED), ("2", WITHDRAWN)]
    tags = registry.client().get_model_version(registry.model, "2").tags
    assert (tags["shoal.reason"], tags["shoal.decision"][:21]) == ("withdrawn", "version 1 is champion")
    assert [entry.detail for entry in history.read(kind="promoted")][:-1] == [
        "version 1 is champion: the promotion of version 2 was withdrawn, job job",
        "version 2 became champion instead of 1, rmse=0.5, job job",
    ]
    assert registry.challenge(0.7).decision.promote  # which is worse than the withdrawn one


def test_no_version_is_champion_if_there_was_none_before(registry):  # noqa: F811
    assert withdraw(registry, "1") == "no version is champion: the promotion of version 1 was withdrawn"
    assert dict(registry.client().get_registered_model(registry.model).aliases) == {}


@pytest.mark.parametrize("by_a_person", [True, False])
def test_a_later_champion_stays_and_its_withdrawal_skips_the_version_that_was_withdrawn(registry, by_a_person):  # noqa: F811
    registry.challenge(0.5)
    later = registry.challenge(2.0 if by_a_person else 0.2).challenger.version.number
    if by_a_person:
        registry.move(later)
    for _ in range(2):  # the second time, nothing changes
        assert withdraw(registry, "2") == f"version {later} is champion: the promotion of version 2 was withdrawn"
        assert registry.champion() == (2.0 if by_a_person else 0.2)
        assert registry.recorded()[1] == ("2", WITHDRAWN)
    assert registry.client().get_model_version(registry.model, "2").tags["shoal.reason"] == "withdrawn"
    if not by_a_person:
        assert withdraw(registry, later) == f"version 1 is champion: the promotion of version {later} was withdrawn"
        assert registry.champion() == 0.9


@pytest.mark.parametrize(("point", "left"), [("before_setting", CONFIRMED), ("after_setting", WITHDRAWN)])
def test_a_withdrawal_that_died_is_completed_or_dropped_by_the_next_promotion(registry, point, left):  # noqa: F811
    registry.challenge(0.5)
    client = registry.client()
    setattr(client, point, killed)
    with pytest.raises(Killed):
        withdraw(registry, "2", client)
    registry.challenge(0.7)
    assert registry.recorded()[1] == ("2", left)
    assert registry.champion() == (0.5 if left is CONFIRMED else 0.7)


@pytest.mark.parametrize(
    "point",
    [
        "before_setting",
        "after_setting",
    ],
    ids=["before the alias is set", "after it"],
)
def test_a_withdrawal_paused_beyond_its_lock_demotes_no_later_champion(registry, point):  # noqa: F811
    registry.challenge(0.5)
    client, reached, go_on = registry.client(), threading.Event(), threading.Event()
    setattr(client, point, lambda: (reached.set(), go_on.wait(PAUSE)))
    with ThreadPoolExecutor(1) as threads:
        withdrawing = threads.submit(withdraw, registry, "2", client)
        assert reached.wait(PAUSE)
        assert registry.challenge(0.2).decision.promote
        go_on.set()
        assert withdrawing.result(PAUSE) == "version 3 is champion: the promotion of version 2 was withdrawn"
    assert registry.champion() == 0.2


@pytest.mark.parametrize("why", ["does not exist any more", "was withdrawn itself"])
def test_a_champion_whose_predecessor_was_deleted_or_withdrawn_through_another_store_stays(registry, why):  # noqa: F811
    registry.challenge(0.5)
    if why == "was withdrawn itself":
        registry.client().set_model_version_tag(registry.model, "1", "shoal.reason", "withdrawn")
    else:
        registry.client().delete_model_version(registry.model, "1")
    with pytest.raises(RegistryError, match=f"version 1, which was champion before, {why}"):
        withdraw(registry, "2")
    assert registry.champion() == 0.5
    assert registry.recorded()[1] == ("2", CONFIRMED)


def test_a_job_whose_promotion_is_withdrawn_gives_its_result_to_no_later_submission(registry, own_mlflow):  # noqa: F811
    store, key = registry.store, Key("job", 1)
    attempts.ask(store, Order("job", "pool", "me", {"fingerprint": "1"}, {}, None, team="fraud"), 0.0)
    attempts.start(store, key, {}, 0.0)
    registry.challenge(0.5)
    attempts.end(store, key, JobState.SUCCEEDED, 1.0, result=result_of(model_version="2").document())
    uri = mlflow.get_tracking_uri()

    with acting_for("ads"), pytest.raises(TeamError, match='job "job" belongs to team "fraud", and this process acts'):
        withdraw_promotion("job", tracking_uri=uri)
    with pytest.raises(JobNotFoundError):
        withdraw_promotion("no\0job")
    with pytest.raises(RegistryError, match=r"was promoted in the MLflow registry sqlite:.*name this registry"):
        withdraw_promotion("job", tracking_uri=own_mlflow)
    with acting_for("ads"):  # the run of the job
        assert withdraw_promotion("job", tracking_uri=uri, holder="me").startswith("version 1 is champion")
    assert history.read(kind="promoted")[0].actor == "me"

    again = attempts.ask(store, Order("job", "pool", "me", {"fingerprint": "1"}, {}, None), 2.0)
    assert again.attempt == 2
    with pytest.raises(InvalidArgumentError, match=r'job "job" \(attempt 2\) has promoted no model'):
        withdraw_promotion("job", tracking_uri=uri)
