"""`shoal models …` on a real MLflow database."""

import time

import mlflow
import pytest

from shoal.jobs.journal.attempts import Key
from tests.cli.conftest import document
from tests.support.job_store import own_mlflow
from tests.support.model_registry import DAY, Shelf

__all__ = ["own_mlflow"]


@pytest.fixture
def shelf(fresh_home, own_mlflow, tmp_path, monkeypatch):
    """The registry that the environment names."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own_mlflow)
    return Shelf(own_mlflow, (tmp_path / "artifacts").as_uri())


@pytest.fixture
def delays(shelf):
    """Three versions: a champion of an earlier shoal, one that was deleted, and a challenger that was refused."""
    recorded = {"holdout__rmse": 1.5, "holdout__mae": 1.25, "holdout__rmse__digest": "d" * 32}
    data = {"shoal__data_rows": 1000, "shoal__data_time_from": "2026-08-01"}
    shelf.add("delays", days=20, key=Key("first", 1))
    shelf.promote("delays", "1", job_id="first", value=2.5, confirmed_at=time.time() - 20 * DAY)
    shelf.client.delete_model_version("delays", "1")
    shelf.add("delays", days=12.5, key=Key("second", 1), alias="champion", **recorded, **data)
    shelf.promote("delays", "2", previous="1", confirmed_at=time.time() - 12.5 * DAY)
    said = "delays version 3 (rmse=1.75) does not beat champion version 2 (rmse=1.5)"
    refused = {"shoal__reason": "champion_not_beaten", "shoal__decision": said}
    shelf.add("delays", days=1, key=Key("third", 2), alias="shadow", **recorded | {"holdout__rmse": 1.75}, **refused)
    shelf.add("by_hand", key=None)
    return shelf


def test_no_models(shoal, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert shoal("models", "list").stdout.startswith("no models")
    assert document(shoal("models", "list", "--json").stdout) == {"models": []}
    assert shoal("models", "prune").stdout == "0 versions deleted, 0 kept\n"


def test_models_are_listed(shoal, delays):
    text = shoal("models", "list").stdout
    for word in ("delays", "rmse", "1.5", "12 d", "not promoted: champion not beaten"):
        assert word in text
    (listed,) = document(shoal("models", "list", "--json").stdout)["models"]
    assert (listed["name"], listed["alias"], listed["registered"]) == ("delays", "champion", 3)
    assert (listed["champion"]["version"], listed["champion"]["promoted"]) == ("2", True)
    assert (listed["challenger"]["version"], listed["challenger"]["promoted"]) == ("3", False)


def test_a_model_is_shown(shoal, delays):
    text = shoal("models", "show", "delays").stdout
    for word in (
        "version 2",
        "data rows",
        "1000",
        "2026-08-01",
        "shadow: version 3",
        "2 of 3 registered",
        "does not beat champion",
    ):
        assert word in text
    shown = document(shoal("models", "show", "delays", "--json").stdout)
    assert [each["version"] for each in shown["challengers"]] == ["3", "2"]
    assert shown["status"]["champion"]["data"] == {"rows": "1000", "time_from": "2026-08-01"}
    assert (shown["challengers"][0]["job_id"], shown["challengers"][0]["attempt"]) == ("third", 2)


def test_the_history_has_deleted_champions(shoal, delays):
    assert "instead of 1" in shoal("models", "history", "delays").stdout
    found = document(shoal("models", "history", "delays", "--json").stdout)["versions"]
    assert [(each["version"], each["value"], each["promoted"], each["exists"]) for each in found] == [
        ("3", 1.75, False, True), ("2", 1.5, True, True), ("1", 2.5, True, False),
    ]  # fmt: skip
    assert len(document(shoal("models", "history", "delays", "--limit", "1", "--json").stdout)["versions"]) == 1


def test_a_name_that_does_not_exist(shoal, delays):
    wrong = shoal("models", "show", "delay")
    assert wrong.exit_code == 3
    assert "the model 'delay' does not exist: did you mean \"delays\"?" in wrong.stderr
    assert shoal("models", "show", "a/b").exit_code == 3
    assert "shoal has registered no version" in shoal("models", "history", "by_hand").stderr


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "http://[::1", "sqlite:////nowhere/mlflow.db", "nonsense://x"])
def test_a_registry_that_cannot_be_reached(shoal, uri):
    result = shoal("models", "list", "--tracking-uri", uri)
    assert result.exit_code == 1
    assert "Error" not in result.stderr
    assert "tracking URI" in result.stderr


def test_old_versions_are_deleted(shoal, delays):
    for _ in range(2):
        delays.add("delays", days=100)
    would = document(shoal("models", "prune", "--older-than", "12w", "--keep-last", "1", "--dry-run", "--json").stdout)
    assert (would["dry_run"], [each["version"] for each in would["deleted"]], would["kept"]) == (True, ["4"], 3)
    assert "1 versions deleted, 3 kept" in shoal("models", "prune", "--older-than", "12w", "--keep-last", "1").stdout
    assert delays.left("delays") == ["2", "3", "5"]


@pytest.mark.parametrize("group", ["models", "jobs"])
def test_a_wrong_age_is_refused(shoal, group):
    for age in ("90", "3 months", "12h"):
        assert shoal(group, "prune", "--older-than", age).exit_code == 2


def test_jobs_that_ended_long_ago_are_removed(shoal, some_jobs):
    would = document(shoal("jobs", "prune", "--dry-run", "--json").stdout)
    assert sorted(each["job_id"] for each in would["removed"]) == ["bad", "good"]
    assert "2 attempts removed" in shoal("jobs", "prune").stdout
    left = document(shoal("jobs", "list", "--json").stdout)["jobs"]
    assert [job["job_id"] for job in left] == ["waiting"]


def test_many_models_take_few_requests(shoal, shelf, monkeypatch):
    source = shelf.client.create_logged_model("1", "model").model_uri
    names = [f"model-{number}" for number in range(4)]
    for name in names:
        shelf.add(name, source=source, alias="champion", holdout__rmse=1.5, holdout__rmse__digest="d")
        for _ in range(2):
            shelf.add(name, source=source)
    shelf.promote(names[0], "1")
    shelf.add(names[0], key=None)  # a person's version is the newest
    requests = []
    for name in ("search_model_versions", "search_registered_models", "get_model_version", "get_registered_model"):
        called = getattr(mlflow.MlflowClient, name)

        def count(self, *given, _called=called, _name=name, **options):
            requests.append(_name)
            return _called(self, *given, **options)

        monkeypatch.setattr(mlflow.MlflowClient, name, count)

    listed = document(shoal("models", "list", "--json").stdout)["models"]

    assert [(model["champion"]["version"], model["challenger"]["version"]) for model in listed] == [("1", "3")] * 4
    assert [model["registered"] for model in listed] == [4, *[3] * 3]
    # One of all models, one of each champion, one of the newest version of the first model.
    assert len(requests) == 6
