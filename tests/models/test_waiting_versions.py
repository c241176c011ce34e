"""Versions that wait until a person says yes: what plain MLflow has before, and after the promotion is asked for."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow
import pytest
from typer.testing import CliRunner, Result

from shoal import history
from shoal.cli import app
from shoal.data import DataConnector
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.sql import stage_select
from shoal.errors import (
    DataError,
    InvalidArgumentError,
    JobError,
    ModelNotFoundError,
    RegistryError,
    ShoalError,
    TeamError,
)
from shoal.jobs import FunctionRegister, JobResult, ModelLine, PromotionResult
from shoal.jobs.journal import attempts
from shoal.models import contest, list_models, loading, model_history, promote_model
from shoal.models.contest import Outcome
from shoal.models.gate import WaitingVersion
from shoal.models.ledger import Ledger
from shoal.pool.holder import acting_for
from shoal.state.schema import ActionKind, Job, JobState
from tests.support.gate import KEY, Gate, frame
from tests.support.job_results import result_of
from tests.support.job_store import POOL

TAGS = {"shoal.job_id": "job", "shoal.attempt": "1"}


def wait(gate: Gate, model: str, **options: Any) -> Outcome:
    return gate.enter(model, promote=False, tags=TAGS, **options)


def promote(gate: Gate, version: str | int = "", **options: Any) -> PromotionResult:
    return promote_model(gate.name, version, tracking_uri=gate.run.uri, on_log=lambda _: None, **options)


def tags(gate: Gate, version: str) -> dict[str, str]:
    return dict(gate.run.client.get_model_version(gate.name, version).tags)


def told(gate: Gate, version: str) -> tuple[str, str]:
    found = tags(gate, version)
    return found["shoal.reason"], found["shoal.decision"]


def promotions(gate: Gate) -> list[history.Entry]:
    return history.read(kind=ActionKind.PROMOTED, store=gate.store)


def test_a_waiting_version_leaves_the_alias_and_says_so_everywhere(gate: Gate, capsys: Any) -> None:
    gate.enter("fair", tags=TAGS)

    outcome = wait(gate, "good")

    assert gate.champion() == "1"
    compared = r"replaces champion version 1 \(rmse="
    said = rf"version 2 \(rmse=\S+\) waits for a decision, and the alias champion has not moved\. .*: .* {compared}"
    assert re.search(said, outcome.decision.sentence)
    printed = capsys.readouterr().out
    assert outcome.decision.sentence in printed and f"shoal models promote {gate.name} 2\n" in printed
    assert told(gate, "2") == ("waiting", outcome.decision.sentence)
    report = mlflow.artifacts.load_dict(f"runs:/{gate.run.run_id}/shoal/promotion.json")
    assert report["decision"]["promoted"] is None and report["champion"]["version"] == "1"
    result = result_of(**outcome.result(), metrics=outcome.metrics)
    assert (result.model_name, result.model_version, result.promoted) == (gate.name, "2", None)
    line = ModelLine.of({"register": gate.register(promote=False).model_dump()}, result)
    assert (line.outcome, line.version, line.value) == ("waiting", "2", outcome.challenger.value)
    entry, _ = model_history(gate.name, tracking_uri=gate.run.uri)
    assert (entry.promoted, entry.reason) == (None, "waiting")


def test_a_yes_promotes_the_better_version_once(gate: Gate) -> None:
    gate.enter("fair", tags=TAGS)
    waiting = wait(gate, "good")
    said: list[str] = []

    first = promote_model(gate.name, 2, tracking_uri=gate.run.uri, holder="cli:me@here", on_log=said.append)

    assert gate.champion() == "2"
    assert (first.promoted, first.decision.reason, first.champion and first.champion.version) == (True, "better", "1")
    assert first.metrics == waiting.metrics and first.job_id == "job" and first.mlflow_run_id is not None
    assert said == [mlflow.artifacts.load_text(f"runs:/{first.mlflow_run_id}/shoal/promotion.md").rstrip("\n")]
    assert told(gate, "2") == ("better", first.decision.sentence)
    [newest, _] = model_history(gate.name, tracking_uri=gate.run.uri)
    assert (newest.promoted, newest.previous, newest.value) == (True, "1", waiting.challenger.value)
    assert [each.detail[:9] for each in promotions(gate)] == ["version 2", "version 1"]
    assert promotions(gate)[0].actor == "cli:me@here"
    line = ModelLine.of(gate.name, first.to_dict())
    assert (line.outcome, line.metric, line.value) == ("promoted", "rmse", waiting.challenger.value)

    gate.enter("exact", tags=TAGS)
    again = promote(gate, 2)

    assert gate.champion() == "3"
    assert (again.promoted, again.decision, again.metrics) == (True, first.decision, first.metrics)
    assert [each.detail[:9] for each in promotions(gate)] == ["version 3", "version 2", "version 1"]


def test_the_champion_of_that_moment_counts_and_a_refusal_stays(gate: Gate) -> None:
    gate.enter("fair", tags=TAGS)
    assert "replaces champion version 1" in wait(gate, "good").decision.sentence
    gate.enter("exact", tags=TAGS)

    refused = promote(gate, "2")

    assert gate.champion() == "3"
    assert (refused.promoted, refused.decision.reason) == (False, "champion_not_beaten")
    assert refused.champion is not None and refused.champion.version == "3"
    gate.run.client.delete_registered_model_alias(gate.name, "champion")
    assert promote(gate, "2").decision == refused.decision
    assert gate.champion() is None


def test_the_rules_of_the_registration_count(gate: Gate) -> None:
    gate.enter("fair", tags=TAGS)
    wait(gate, "good", min_improvement=5.0)
    assert promote(gate, "2").decision.reason == "champion_not_beaten"
    # Rows that the version was trained on are recorded, too, so the champion and this version share no unseen rows.
    wait(gate, "exact", trained_on="holdout", overlap="flag", by="when", slice_tolerance=0.1, metrics=["mae"])
    result = promote(gate, "3")
    assert "although it was trained on 200 rows of the holdout" in result.decision.sentence
    assert set(result.metrics) == {"holdout-rmse", "holdout-mae"}


def test_a_first_version_waits_too_and_a_ranker_keeps_its_groups(gate: Gate) -> None:
    waiting = wait(gate, "ranker", metric="ndcg@4", metrics=["ndcg"], label_col="relevance")
    assert gate.champion() is None
    [listed] = [each for each in list_models(gate.run.uri) if each.name == gate.name]
    assert (listed.champion, listed.challenger.reason) == (None, "waiting")

    result = promote(gate, "1")

    assert (gate.champion(), result.decision.reason, result.metric) == ("1", "first", "ndcg@4")
    assert result.metrics == waiting.metrics


def of_result(gate: Gate, result: JobResult) -> Any:
    return result


def of_dict(gate: Gate, result: JobResult) -> Any:
    return result.to_dict()


def of_job(gate: Gate, result: JobResult) -> Any:
    attempts.end(gate.store, KEY, JobState.SUCCEEDED, 1.0, result=result.document())
    return "job"


def of_submission(gate: Gate, result: JobResult) -> Any:
    return {"job_id": of_job(gate, result), "attempt": 1, "pool": "retrain"}


@pytest.mark.parametrize("named", [of_result, of_dict, of_job, of_submission])
def test_a_training_names_its_version(gate: Gate, named: Any) -> None:
    outcome = wait(gate, "good")
    result = result_of(**outcome.result(), metrics=outcome.metrics)

    found = promote_model(training=named(gate, result), tracking_uri=gate.run.uri, on_log=lambda _: None)

    assert (found.model_name, found.model_version, gate.champion()) == (gate.name, "1", "1")


def test_another_team_decides_about_no_version(gate: Gate) -> None:
    wait(gate, "good")
    with gate.store.transaction() as session:
        session.get_one(Job, ("job", 1)).team = "fraud"
    before = tags(gate, "1")

    with acting_for("ads"), pytest.raises(TeamError, match='job "job" belongs to team "fraud", and this process acts'):
        promote(gate, 1)

    assert (gate.champion(), tags(gate, "1")) == (None, before)
    with acting_for("fraud"):
        assert promote(gate, 1).promoted
    with acting_for("ads"):  # it may read the decision
        assert promote(gate, 1).promoted


def test_what_cannot_be_promoted_changes_nothing(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.enter("fair", tags=TAGS)
    wait(gate, "good")
    wait(gate, "good")
    gate.run.client.delete_model_version(gate.name, "3")
    by_hand = mlflow.register_model(gate.uris["good"], gate.name)
    interrupted = gate.run.client.create_model_version(gate.name, gate.uris["good"], tags=TAGS)
    before = {version: tags(gate, version) for version in ("1", "2")}

    def refused(error: type[ShoalError], said: str, *named: Any, **options: Any) -> None:
        with pytest.raises(error, match=said):
            promote_model(*named, **{"tracking_uri": gate.run.uri, **options})

    refused(ModelNotFoundError, "version 3 .* does not exist: it was never registered, or was deleted", gate.name, "3")
    refused(ModelNotFoundError, "version 99 of the model", gate.name, 99)
    refused(ModelNotFoundError, f'does not exist: did you mean "{gate.name}"', gate.name[:-1], 1)
    refused(ModelNotFoundError, "the model 'a/b' does not exist", "a/b", 1)
    refused(InvalidArgumentError, "was not registered by a job of shoal", gate.name, by_hand.version)
    refused(InvalidArgumentError, "does not wait for a decision", gate.name, interrupted.version)
    refused(InvalidArgumentError, "no version is named", gate.name)
    refused(InvalidArgumentError, "version='newest' is not legal", gate.name, "newest")
    refused(InvalidArgumentError, "give only one of both", gate.name, 2, training=result_of())
    refused(InvalidArgumentError, "job job has registered no model", training=result_of())
    refused(InvalidArgumentError, "job job is running and has no result", training="job")
    refused(RegistryError, "cannot be used", gate.name, 2, tracking_uri="http://127.0.0.1:9")

    mine = loading.load(gate.uris["good"])

    def away(*_: object, **__: object) -> None:
        raise RegistryError("MLflow cannot be reached")

    with monkeypatch.context() as patch:
        patch.setattr("shoal.models.loading.load", away)
        refused(RegistryError, "MLflow cannot be reached", gate.name, 2)

        def load(uri: str, *_: object, **__: object) -> Any:
            if uri.endswith("/1"):
                raise ImportError("no module named catboost")
            return mine

        patch.setattr("shoal.models.loading.load", load)
        refused(JobError, "champion version 1 could not be compared: .* no module named catboost", gate.name, 2)
    assert gate.champion() == "1"
    assert {version: tags(gate, version) for version in ("1", "2")} == before
    assert len(promotions(gate)) == 1
    assert promote(gate, 2).promoted


@pytest.mark.parametrize("point", ["set_registered_model_alias", "load"])
def test_two_who_say_yes_at_once_promote_once(gate: Gate, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """The second one comes when the first one is about to set the alias, or compares with the champion."""
    gate.enter("fair", tags=TAGS)
    wait(gate, "good")
    monkeypatch.setattr(contest, "PROMOTION_LOCK_TTL_S", 0.0)
    owner: Any = mlflow.MlflowClient if point == "set_registered_model_alias" else contest
    original, others = getattr(owner, point), []

    def pausing(*given: Any) -> Any:
        if not others and (point != "load" or str(given[1]) == "1"):
            others.append(None)
            others.append(promote(gate, 2))
        return original(*given)

    monkeypatch.setattr(owner, point, pausing)
    mine = promote(gate, 2)

    assert (mine.promoted, others[1].promoted, gate.champion()) == (True, True, "2")
    assert [each.detail[:9] for each in promotions(gate)] == ["version 2", "version 1"]
    assert told(gate, "2")[0] == "better"


def test_a_process_that_died_before_it_recorded_the_promotion_is_completed(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.enter("fair", tags=TAGS)
    wait(gate, "good")
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "confirm", die)
        with pytest.raises(KeyboardInterrupt):
            promote(gate, 2)
    assert (gate.champion(), told(gate, "2")[0], len(promotions(gate))) == ("2", "waiting", 1)

    again = promote(gate, 2)

    assert (again.promoted, gate.champion(), len(promotions(gate))) == (True, "2", 2)
    assert again.decision.sentence.endswith("was promoted to champion instead of version 1 before")
    assert told(gate, "2") == ("better", again.decision.sentence)


def die(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_alias_that_a_person_has_given_to_the_version_stays(gate: Gate) -> None:
    wait(gate, "good")
    gate.run.client.set_registered_model_alias(gate.name, "champion", "1")

    result = promote(gate, 1)

    assert (result.promoted, result.decision.reason, gate.champion()) == (False, "alias_moved", "1")
    assert promotions(gate) == []


def test_a_holdout_that_has_changed_is_refused(gate: Gate, tmp_path: Path) -> None:
    rows = frame(1)
    rows.to_parquet(tmp_path / "holdout.parquet")
    wait(gate, "good", holdout=DataConnector.from_parquet(tmp_path / "holdout.parquet"))
    rows.assign(y=0.0).to_parquet(tmp_path / "holdout.parquet")

    with pytest.raises(DataError, match="version 1 is not promoted: its holdout has changed since it was registered"):
        promote(gate, 1)

    (tmp_path / "holdout.parquet").unlink()
    with pytest.raises(DataError, match=r"holdout\.parquet"):
        promote(gate, 1)
    assert (gate.champion(), told(gate, "1")[0]) == (None, "waiting")


def test_the_query_of_a_holdout_runs_again(gate: Gate, tmp_path: Path) -> None:
    file = tmp_path / "rows.db"
    with closing(sqlite3.connect(file)) as database, database:
        frame(1).to_sql("rows", database, index=False)
    holdout = DatasetSpec(sql="SELECT * FROM rows WHERE a < :most", connection="warehouse", params={"most": 2.0})
    (tmp_path / "staged").mkdir()
    stage_select(str(holdout.sql), holdout.params or {}, f"sqlite:///{file}", str(tmp_path / "staged"))
    staged = str(tmp_path / "staged")
    # As the driver does it: with the folder of the rows beside the query.
    wait(gate, "good", holdout=holdout.model_copy(update={"staging": staged}))
    shutil.rmtree(staged)
    with pytest.raises(InvalidArgumentError, match="SHOAL_CONNECTION_WAREHOUSE"):
        promote(gate, 1)

    result = promote(gate, 1, connection_url={"warehouse": f"sqlite:///{file}"}.get)

    assert (result.promoted, gate.champion()) == (True, "1")


def test_the_rows_of_a_frame_would_be_gone(gate: Gate) -> None:
    with pytest.raises(ValueError, match="promote=false needs a holdout that exists until the promotion"):
        gate.register(promote=False, holdout=DataConnector.from_dataframe(frame(1)))


def test_the_record_of_a_function_has_what_its_register_adds(gate: Gate) -> None:
    fields = gate.register(promote=False).model_dump() | {"label_col": "y", "input_cols": ("a",), "group_col": "query"}
    options = FunctionRegister(**fields)
    record = WaitingVersion.of(options, "d" * 32, options.label_col, options.input_cols, options.group_col)

    read = WaitingVersion(**json.loads(json.dumps(dataclasses.asdict(record))))

    assert read.options() == gate.register(promote=False)
    assert (read.label_col, tuple(read.input_cols), read.group_col) == ("y", ("a",), "query")


def test_a_spec_that_promotes_has_the_fingerprint_that_it_had_before(gate: Gate) -> None:
    assert "promote" not in gate.register().model_dump(mode="json")
    assert gate.register(promote=False).model_dump(mode="json")["promote"] is False


def test_the_command_promotes_or_says_why_not(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", gate.run.uri)
    wait(gate, "good")
    wait(gate, "fair")

    def shoal(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["models", *arguments])

    assert shoal("history", gate.name).stdout.count("waits for a decision") == 2
    assert "waits for a decision" in shoal("show", gate.name).stdout
    yes, no = shoal("promote", gate.name, "1"), shoal("promote", gate.name, "2")
    assert (yes.exit_code, no.exit_code, gate.champion()) == (0, 1, "1")
    assert "version 1 (rmse=0.0279121) is the first champion" in yes.stdout
    assert "does not beat champion version 1" in no.stdout
    assert promotions(gate)[0].actor.startswith("cli:")
    again = shoal("promote", gate.name, "2", "--json")
    assert (again.exit_code, json.loads(again.stdout)["decision"]["reason"]) == (1, "champion_not_beaten")
    assert (shoal("promote", gate.name, "7").exit_code, shoal("promote", gate.name, "newest").exit_code) == (3, 2)
    assert "waits for" not in shoal("history", gate.name).stdout


@pytest.mark.parametrize("kept", ["uri", "hidden", "default"])
def test_the_registry_is_that_of_the_training(gate: Gate, monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    """A URI whose password the store does not have is taken from the environment."""
    away = "http://anna:***@127.0.0.1:9"
    of_job, environment = (away, gate.run.uri) if kept == "hidden" else (gate.run.uri, away)
    if kept == "default":
        of_job = None
        monkeypatch.setattr("shoal.jobs.mlflow_run.default_uri", lambda: gate.run.uri)
    outcome = wait(gate, "good")
    with gate.store.transaction() as session:
        job = session.get_one(Job, (KEY.job_id, KEY.attempt))
        job.spec = {**job.spec, "tracking": {"uri": of_job}}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", environment)
    result = result_of(**outcome.result(), metrics=outcome.metrics)

    assert promote_model(training=result, on_log=lambda _: None).promoted
    assert gate.champion() == "1"


@pytest.mark.parametrize(("fingerprint", "left"), [("q", ["2"]), ("another", ["2", "1"])])
def test_an_attempt_replaces_the_waiting_version_of_an_earlier_one_with_its_spec(
    gate: Gate, fingerprint: str, left: list[str]
) -> None:
    # Another model has the same logged model, so it is not deleted with the version: the fixture logs it only once.
    dataclasses.replace(gate, name=f"{gate.name} besides").enter("fair")
    wait(gate, "fair")
    attempts.end(gate.store, KEY, JobState.FAILED, 1.0, seen={JobState.RUNNING}, error="lost")
    again = attempts.Key("job", 2)
    attempts.ask(gate.store, attempts.Order("job", POOL, "cli:me@here", {"fingerprint": fingerprint}, {}, None), 2.0)
    attempts.start(gate.store, again, {}, 2.0)
    gate.enter("good", promote=False, tags=TAGS | {"shoal.attempt": "2"}, key=again)
    assert [each.version for each in model_history(gate.name, tracking_uri=gate.run.uri)] == left
