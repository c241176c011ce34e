"""Promotions by several processes at once: a paused holder of the lock, a crash between record and alias, a person.

The registry is a real MLflow database. The clients stop where a test wants a process to be paused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest

from shoal import history
from shoal.data.dataset_spec import DatasetSpec
from shoal.jobs import Register
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.models import contest, gate
from shoal.models.contest import Outcome
from shoal.models.decision import Candidate, Evaluation
from shoal.models.ledger import Ledger
from shoal.models.registry import VersionId
from shoal.state import Store
from shoal.state.schema import Promotion, PromotionState
from tests.support.waiting import wait_until

PAUSE = 240.0  # only ends a test that hangs


class Nothing(mlflow.pyfunc.PythonModel):
    def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
        return model_input


class Client(mlflow.MlflowClient):
    """A client whose requests about aliases a test can hold up."""

    before_setting: Callable[[], object] = staticmethod(lambda: None)
    after_setting: Callable[[], object] = staticmethod(lambda: None)

    def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
        self.before_setting()
        super().set_registered_model_alias(name, alias, version)
        self.after_setting()


@pytest.fixture(scope="module")
def logged(mlflow_uri: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that every version is made of: what it is worth, the test says."""
    mlflow.set_tracking_uri(mlflow_uri)
    artifacts = tmp_path_factory.mktemp("artifacts").as_uri()
    experiment = mlflow.MlflowClient(mlflow_uri).create_experiment("gate", artifact_location=artifacts)
    with mlflow.start_run(experiment_id=experiment):
        return mlflow.pyfunc.log_model(name="nothing", python_model=Nothing(), pip_requirements=[]).model_uri


class Registry:
    """One registered model and its challengers; a lower loss is better."""

    def __init__(self, uri: str, logged: str, model: str) -> None:
        self.store = Store()
        self.model = model
        self.losses: dict[str, float] = {}
        self._uri = uri
        self._logged = logged

    def client(self) -> Client:
        return Client(self._uri)

    def challenge(self, loss: float, client: Client | None = None) -> Outcome:
        register = Register(model=self.model, metric="rmse", holdout=DatasetSpec(paths=("/holdout",)))
        client = client or self.client()
        return contest.Contest(
            client,
            Ledger.of(client, Store(), register),
            register,
            gate.registered(register, self._logged, Evaluation(loss, {"rmse": loss}), "d" * 32, {}),
            baseline=None,
            holdout_digest="d" * 32,
            key=Key("job", 1),
            score_champion=lambda version: Candidate(version, Evaluation(self.loss(version.number))),
        ).decided()

    def loss(self, version: str) -> float:
        return float(self.client().get_model_version(self.model, version).tags["holdout.rmse"])

    def champion(self) -> float:
        return self.loss(str(self.client().get_model_version_by_alias(self.model, "champion").version))

    def move(self, version: str) -> None:
        """What a person does in MLflow's pages."""
        self.client().set_registered_model_alias(self.model, "champion", version)

    def recorded(self) -> list[tuple[str, PromotionState]]:
        with self.store.reading() as session:
            rows = session.query(Promotion).filter_by(model=self.model).order_by(Promotion.id)
            return [(row.version, row.state) for row in rows]


class Paused:
    """A challenger in a thread of its own that is stopped at a point, and goes on when told to."""

    def __init__(self, registry: Registry, loss: float, threads: ThreadPoolExecutor, *, after: bool = False) -> None:
        self._reached, self._go_on = threading.Event(), threading.Event()
        client = registry.client()
        if after:
            client.after_setting = self._stop
        else:
            client.before_setting = self._stop
        self._outcome: Future[Outcome] = threads.submit(registry.challenge, loss, client)
        wait_until(lambda: self._reached.is_set() or self._outcome.done(), "the pause", PAUSE)
        assert self._reached.is_set(), self._outcome.result()

    def _stop(self) -> None:
        first = not self._reached.is_set()
        self._reached.set()
        if first:
            assert self._go_on.wait(PAUSE)

    def go_on(self) -> Outcome:
        self._go_on.set()
        return self._outcome.result(PAUSE)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def registry(
    either_store: object, mlflow_uri: str, logged: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Registry:
    """A champion with a loss of 0.9, and a lock that whoever holds it loses at once to the next."""
    monkeypatch.setattr(contest, "PROMOTION_LOCK_TTL_S", 0.0)
    mlflow.set_tracking_uri(mlflow_uri)
    registry = Registry(mlflow_uri, logged, request.node.name)
    assert registry.challenge(0.9).decision.promote
    return registry


@pytest.mark.parametrize("after", [False, True], ids=["before the alias is set", "after it"])
def test_a_challenger_paused_beyond_its_lock_demotes_no_better_champion(registry, threads, after):
    paused = Paused(registry, 0.5, threads, after=after)
    assert registry.challenge(0.2).decision.promote

    outcome = paused.go_on()

    assert registry.champion() == 0.2
    assert not outcome.decision.promote
    assert outcome.champion is not None
    assert outcome.champion.value == 0.2


def test_a_better_challenger_paused_beyond_its_lock_is_champion_in_the_end(registry, threads):
    paused = Paused(registry, 0.2, threads)
    assert registry.challenge(0.5).decision.promote

    outcome = paused.go_on()

    assert registry.champion() == 0.2
    assert outcome.decision.promote
    assert registry.recorded()[-1] == (outcome.challenger.version.number, PromotionState.CONFIRMED)


def test_a_challenger_that_lost_the_lock_before_its_intent_sets_no_alias(registry, threads, monkeypatch):
    settle, reached, go_on = Ledger.settle, threading.Event(), threading.Event()

    def paused(*arguments: Any) -> bool:
        settled = settle(*arguments)
        if threading.current_thread() is not threading.main_thread() and not reached.is_set():
            reached.set()
            assert go_on.wait(PAUSE)
        return settled

    monkeypatch.setattr(Ledger, "settle", paused)
    client = registry.client()
    was_set: list[float] = []
    client.before_setting = lambda: was_set.append(registry.champion())
    outcome = threads.submit(registry.challenge, 0.5, client)
    assert reached.wait(PAUSE)
    assert registry.challenge(0.2).decision.promote
    go_on.set()

    assert not outcome.result(PAUSE).decision.promote
    assert was_set == []
    assert registry.champion() == 0.2


def test_an_alias_that_a_person_moved_is_not_put_back(registry, threads):
    mine = registry.challenge(2.0).challenger.version.number
    paused = Paused(registry, 0.5, threads, after=True)
    assert registry.challenge(0.2).decision.promote
    registry.move(mine)

    outcome = paused.go_on()

    assert registry.champion() == 2.0
    assert outcome.decision.reason == "alias_moved"
    assert f"to version {mine} during the promotion" in outcome.decision.sentence


class Killed(BaseException):
    """The process is gone at this point."""


def killed() -> None:
    raise Killed


def test_a_promotion_that_died_before_its_confirmation_is_confirmed_by_the_next(registry):
    client = registry.client()
    client.after_setting = killed
    with pytest.raises(Killed):
        registry.challenge(0.5, client)
    assert registry.recorded()[-1][1] is PromotionState.INTENDED

    assert not registry.challenge(0.7).decision.promote

    assert [state for _, state in registry.recorded()] == [PromotionState.CONFIRMED] * 2
    assert registry.champion() == 0.5
    newest, first = history.read(kind="promoted")
    assert (newest.subject, newest.actor, newest.outcome) == (registry.model, "job:job", "done")
    assert newest.detail == "version 2 became champion instead of 1, rmse=0.5, job job"
    assert first.detail == "version 1 became champion, rmse=0.9, job job"


def test_a_promotion_that_died_before_the_alias_was_set_is_withdrawn_by_the_next(registry):
    client = registry.client()
    client.before_setting = killed
    with pytest.raises(Killed):
        registry.challenge(0.5, client)

    assert registry.challenge(0.7).decision.promote

    assert [state for _, state in registry.recorded()] == [
        PromotionState.CONFIRMED, PromotionState.WITHDRAWN, PromotionState.CONFIRMED,
    ]  # fmt: skip
    assert registry.champion() == 0.7


def test_a_promotion_says_what_it_was_decided_on(registry):
    attempts.ask(registry.store, Order("job", "pool", "me", {"fingerprint": "1"}, {}, None), 0.0)
    second = registry.challenge(0.5)

    with registry.store.reading() as session:
        row = session.query(Promotion).filter_by(model=registry.model, version=second.challenger.version.number).one()
    assert (row.previous, row.metric, row.value, row.holdout_digest) == ("1", "rmse", 0.5, "d" * 32)
    assert (row.job_id, row.attempt, row.alias) == ("job", 1, "champion")
    assert row.registry_uri == registry.client()._registry_uri
    assert row.confirmed_at is not None


def test_the_earlier_versions_are_of_the_same_model_with_the_metrics_that_are_numbers():
    # The search of some databases ignores case. The tag of version 2 was changed by a person.
    tags = {
        ("m", "4"): "1.5",
        ("m", "3"): "1.0",
        ("M", "9"): "0.1",
        ("M", "1"): "0.2",
        ("m", "2"): "one",
        ("m", "1"): "2",
    }
    found = [
        SimpleNamespace(name=name, version=version, creation_timestamp=1000, run_id="r", tags={"holdout.rmse": value})
        for (name, version), value in tags.items()
    ]
    client = SimpleNamespace(search_model_versions=lambda *_, **__: found)
    ledger = SimpleNamespace(history=lambda: [Promotion(version="1", version_identity=VersionId.of(found[-1]).columns)])
    register = Register(model="m", metric="rmse", holdout=DatasetSpec(paths=("/holdout",)))

    recent = contest._recent(client, ledger, register, "4")

    assert [(each.version, each.value, each.promoted) for each in recent] == [
        ("3", 1.0, False), ("2", None, False), ("1", 2.0, True),
    ]  # fmt: skip
