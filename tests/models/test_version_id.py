"""Versions of one number that are not the same version: of a model that was registered again, of another database.

The registry is a real MLflow database.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest

from shoal.errors import ModelNotFoundError, RegistryError
from shoal.jobs import Register
from shoal.jobs.journal.attempts import Key
from shoal.kinds.prediction import engine
from shoal.models import contest, describe_model, gate, list_models, model_history, promote_model, prune_models
from shoal.models.contest import Outcome
from shoal.models.decision import Candidate, Evaluation
from shoal.models.ledger import Ledger, Withdrawal, is_of, predecessor
from shoal.models.registry import Registry as Access
from shoal.models.registry import VersionId
from shoal.state import Store
from shoal.state.schema import Promotion, PromotionState
from tests.support.job_results import result_of
from tests.support.job_store import own_mlflow, store  # noqa: F401
from tests.support.model_registry import DAY, Shelf

CONFIRMED, WITHDRAWN = PromotionState.CONFIRMED, PromotionState.WITHDRAWN
NOW = 1_000_000.0


class Registry:
    """One registered model in a database of its own; a lower loss is better."""

    def __init__(self, uri: str, folder: Path) -> None:
        mlflow.set_tracking_uri(uri)
        self.uri, self.model, self._folder = uri, "m", folder
        self.client = mlflow.MlflowClient(uri)
        self.jobs = 0

    def challenge(self, loss: float, client: mlflow.MlflowClient | None = None) -> Outcome:
        """Register and promote a version as a job does."""
        register = Register.parse({"model": self.model, "metric": "rmse", "holdout": {"paths": ["/holdout"]}})
        if (found := self.client.get_experiment_by_name("models")) is None:
            found = self.client.get_experiment(self.client.create_experiment("models", self._folder.as_uri()))
        uri = self.client.create_logged_model(found.experiment_id, "model").model_uri
        self.jobs += 1
        job, evaluation = f"job-{self.jobs}", Evaluation(loss, {"rmse": loss})
        challenger = gate.registered(register, uri, evaluation, "d" * 32, {"shoal.job_id": job, "shoal.attempt": "1"})
        return contest.Contest(
            client or self.client,
            Ledger.of(self.client, Store(), register),
            register,
            challenger,
            baseline=None,
            holdout_digest="d" * 32,
            key=Key(job, 1),
            score_champion=lambda version: Candidate(version, Evaluation(self.loss(version.number))),
        ).decided()

    def loss(self, version: str) -> float:
        return float(self.client.get_model_version(self.model, version).tags["holdout.rmse"])

    def champion(self) -> str | None:
        version = self.client.get_registered_model(self.model).aliases.get("champion")
        return None if version is None else str(version)

    def replace_database(self, file: Path) -> None:
        """Another database at the same address."""
        with closing(sqlite3.connect(file)) as new, closing(sqlite3.connect(self._file)) as present:
            new.backup(present)

    def copy_database(self, file: Path) -> Path:
        with closing(sqlite3.connect(self._file)) as present, closing(sqlite3.connect(file)) as copy:
            present.backup(copy)
        return file

    @property
    def _file(self) -> str:
        return self.uri.removeprefix("sqlite:///")


@pytest.fixture
def registry(own_mlflow: str, store: Store, tmp_path: Path) -> Registry:  # noqa: F811
    return Registry(own_mlflow, tmp_path)


def deleted(registry: Registry, empty: Path) -> None:
    registry.client.delete_registered_model("m")


def fresh(registry: Registry, empty: Path) -> None:
    registry.replace_database(empty)


def renamed(registry: Registry, empty: Path) -> None:
    registry.client.rename_registered_model("m", "renamed")


@pytest.mark.parametrize("lost", [deleted, fresh, renamed])
def test_a_model_that_is_registered_again_begins_anew(
    registry: Registry, lost: Callable[[Registry, Path], None], mlflow_database: Path, capfd: pytest.CaptureFixture
) -> None:
    for loss in (0.5, 0.1):
        assert registry.challenge(loss).decision.promote
    lost(registry, mlflow_database)

    # Versions 1, 2 and 3 again, which are worse than those before.
    for number, (loss, reason) in enumerate([(0.9, "first"), (0.8, "better"), (0.85, "champion_not_beaten")], start=1):
        outcome = registry.challenge(loss)
        assert (outcome.challenger.version.number, outcome.decision.reason) == (str(number), reason)
        assert registry.champion() == ("2" if reason == "champion_not_beaten" else str(number))
        assert outcome.decision.promoted == (registry.champion() == str(number))
        noted = "m version 2, which became champion in job job-2, does not exist any more in the MLflow registry"
        assert (noted in capfd.readouterr().out) == (number == 1)

    history = model_history("m", tracking_uri=registry.uri)
    assert [(each.version, each.exists, each.promoted, each.value) for each in history] == [
        ("3", True, None, 0.85),
        ("2", True, True, 0.8), ("2", False, True, 0.1),
        ("1", True, True, 0.9), ("1", False, True, 0.5),
    ]  # fmt: skip


def test_the_reports_and_the_earlier_versions_know_the_promotions_of_the_present_versions_only(
    registry: Registry,
) -> None:
    registry.challenge(0.1)
    registry.client.delete_registered_model("m")
    registry.challenge(float("nan"))  # version 1 again, which is not promoted
    last = registry.challenge(0.5)

    [model] = list_models(registry.uri)
    assert model.champion is not None and model.champion.version == "2"
    details = describe_model("m", registry.uri)
    assert [(each.version, each.promoted) for each in details.challengers] == [("2", True), ("1", None)]
    register = Register.parse({"model": "m", "metric": "rmse", "holdout": {"paths": ["/holdout"]}})
    ledger = Ledger.of(registry.client, Store(), register)
    [earlier] = contest._recent(registry.client, ledger, register, last.challenger.version.number)
    assert (earlier.version, earlier.promoted) == ("1", False)


def test_a_restored_backup_keeps_the_champion_that_it_has(registry: Registry, tmp_path: Path) -> None:
    registry.challenge(0.5)
    backup = registry.copy_database(tmp_path / "backup.db")
    registry.challenge(0.1)
    registry.replace_database(backup)

    outcome = registry.challenge(0.3)
    assert (outcome.challenger.version.number, outcome.decision.reason) == ("2", "better")
    assert outcome.champion is not None and outcome.champion.value == 0.5
    assert registry.champion() == "2"


def test_a_promotion_counts_only_if_the_alias_points_to_the_version_afterwards(registry: Registry) -> None:
    class Client(mlflow.MlflowClient):
        def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
            """Do nothing, as a person would undo it at once."""

    registry.challenge(0.5)
    outcome = registry.challenge(0.1, Client(registry.uri))
    assert (outcome.decision.reason, outcome.decision.promoted, registry.champion()) == ("alias_moved", False, "1")
    with Store().reading() as session:
        assert [each.state for each in session.query(Promotion).order_by(Promotion.id)] == [CONFIRMED, WITHDRAWN]


def test_a_version_that_was_promoted_and_then_demoted_by_a_person_is_not_called_promoted(registry: Registry) -> None:
    registry.challenge(0.5)
    mine = registry.challenge(0.1).challenger
    again = contest.Contest(
        registry.client,
        Ledger(Store(), registry.client._registry_uri, "m", "champion"),
        Register.parse({"model": "m", "metric": "rmse", "holdout": {"paths": ["/holdout"]}}),
        mine, None, "d" * 32, Key("job", 1), lambda version: Candidate(version, Evaluation(0.5)),
    )  # fmt: skip
    assert again.decided().decision.promoted
    registry.client.set_registered_model_alias("m", "champion", "1")
    decision = again.decided().decision
    assert (decision.reason, decision.promoted) == ("alias_moved", False)
    assert "a person has moved the alias champion to version 1 after the promotion" in decision.sentence


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "registered again"])
def test_the_withdrawal_of_a_version_of_a_former_model_changes_no_alias(registry: Registry, again: bool) -> None:
    registry.challenge(0.5)
    registry.client.delete_registered_model("m")
    if again:
        registry.challenge(0.9)
    with Store().reading() as session:
        row = session.query(Promotion).order_by(Promotion.id).first()
    ledger = Ledger(Store(), registry.client._registry_uri, "m", "champion")
    sentence = Withdrawal(Access(registry.client, ledger.registry), ledger, row).done()
    named = "another version 1, which was registered later, is champion" if again else "no version is champion"
    assert sentence == f"{named}: the promotion of version 1 was withdrawn"
    if again:
        assert registry.champion() == "1"
        assert "shoal.reason" not in registry.client.get_model_version("m", "1").tags


def test_a_version_before_that_is_another_one_by_now_does_not_get_the_alias_back(registry: Registry) -> None:
    registry.challenge(0.5)
    second = registry.challenge(0.1).challenger.version
    with Store().transaction() as session:  # as if version 1 had been registered at another time
        row = session.query(Promotion).filter_by(version="2").one()
        row.previous_identity = {"created_at": 1, "run_id": None}
    ledger = Ledger(Store(), registry.client._registry_uri, "m", "champion")
    with pytest.raises(RegistryError, match="version 1, which was champion before, does not exist any more"):
        Withdrawal(Access(registry.client, ledger.registry), ledger, row).done()
    assert registry.champion() == second.number


def test_the_result_of_a_training_promotes_no_version_of_another_training(registry: Registry) -> None:
    registry.challenge(0.5)
    registry.client.delete_registered_model("m")
    registry.challenge(0.9)
    of_the_first = result_of(job_id="job-1", model_name="m", model_version="1")
    with pytest.raises(ModelNotFoundError, match=r"version 1 .* that job job-1 has registered does not exist any more"):
        promote_model(training=of_the_first, tracking_uri=registry.uri)


def test_an_old_version_is_not_kept_for_the_promotion_of_a_former_model(
    own_mlflow: str,  # noqa: F811
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    shelf = Shelf(own_mlflow, tmp_path.as_uri())
    shelf.add("m", days=500)
    shelf.promote("m", "1", created_at=NOW)
    shelf.client.delete_registered_model("m")
    shelf.add("m", days=400)
    shelf.promote("m", shelf.add("m", days=300))  # an alias was removed since
    pruned = prune_models(older_than=timedelta(days=90), keep_last=0, tracking_uri=own_mlflow)
    assert [each.version for each in pruned.deleted] == ["1"]
    assert shelf.left("m") == ["2"]


def test_predictions_of_another_version_of_the_same_number_are_made_again(registry: Registry) -> None:
    registry.challenge(0.5)
    first = engine.identity("models:/m/1")
    assert engine.identity("models:/m/1") == first
    registry.client.delete_registered_model("m")
    registry.challenge(0.5)
    assert engine.identity("models:/m/1") != first


def row(
    id: int, version: str, previous: str | None, withdrawn_after: int | None = None, **columns: object
) -> Promotion:
    """A row about a promotion, whose versions were registered at the time that is their number, in seconds."""

    def identity(number: str | None) -> dict[str, object] | None:
        return None if number is None else {"created_at": 1000 * int(number), "run_id": "r"}

    return Promotion(**{
        "id": id, "version": version, "version_identity": identity(version), "previous": previous,
        "previous_identity": identity(previous), "state": CONFIRMED if withdrawn_after is None else WITHDRAWN,
        "withdrawn_after": withdrawn_after, "created_at": NOW, "confirmed_at": NOW, **columns,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(1, "1", None)], None),
        ([row(1, "1", None), row(2, "2", "1")], "1"),
        ([row(1, "1", None), row(2, "2", "1", 3), row(3, "3", "2")], "1"),
        ([row(1, "1", None, 3), row(2, "2", "1", 3), row(3, "3", "2")], None),
        ([row(1, "1", None, 2), row(2, "2", "1"), row(3, "3", "2")], "2"),
        # Withdrawn while it was champion, and then a person has given it the alias.
        ([row(1, "1", None), row(2, "2", "1", 2), row(3, "3", "2")], "2"),
        # No promotion of version 7 is recorded: a person has given it the alias.
        ([row(1, "1", None), row(2, "2", "7")], "7"),
        # Its promotion died before the alias was set, and then a person has set the alias.
        ([row(1, "2", None, 1, confirmed_at=None), row(2, "3", "2")], "2"),
        # Promoted, withdrawn, promoted again.
        ([row(1, "1", None), row(2, "2", "1", 2), row(3, "2", "1"), row(4, "4", "2")], "2"),
        ([row(1, "1", None), row(2, "2", "1", 2), row(3, "2", "1", 4), row(4, "4", "2")], "1"),
        # Another version 2, of a former model, was withdrawn.
        (
            [
                row(1, "2", None, 3, version_identity={"created_at": 1, "run_id": "r"}),
                row(2, "2", None),
                row(3, "3", "2"),
            ],
            "2",
        ),
        # The first rows are of an older shoal.
        (
            [row(1, "1", None, version_identity=None), row(2, "2", "1", 3, version_identity=None), row(3, "3", "2")],
            "1",
        ),
    ],
)
def test_the_version_before_is_one_that_was_not_given_up(rows: list[Promotion], expected: str | None) -> None:
    found = predecessor(rows[-1], reversed(rows))
    assert (None if found is None else found.number) == expected


def test_a_row_of_an_older_shoal_is_about_no_version_that_was_registered_later() -> None:
    def version(days: float) -> VersionId:
        stamp = int(1000 * (NOW + days * DAY))
        return VersionId.of(SimpleNamespace(version="2", creation_timestamp=stamp, run_id=""))  # type: ignore[arg-type]

    old = row(1, "2", None, version_identity=None)
    assert is_of(old, version(-1))
    assert not is_of(old, version(+1))
    assert not is_of(old, VersionId("2"))  # it does not exist
    assert not is_of(old, None)
