"""The gate's table: models that enter one after the other, and the decision and sentence that the last one gets.

The registry is a real MLflow database, the models are real pyfunc models and one real ranker.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from mlflow.models import infer_signature

from shoal.data import DataConnector
from shoal.errors import DataError, JobError, RegistryError
from shoal.jobs import ModelLine, Register
from shoal.jobs.mlflow_run import ATTEMPT_TAG, JOB_TAG
from shoal.kinds.partitions import logged_model
from shoal.models import contest, describe_model, list_models, loading, model_history, promote_model, training_record
from shoal.models.contest import Outcome
from shoal.models.gate import try_champion
from shoal.models.holdout import Holdout, check_holdout
from tests.support.gate import INPUTS, KEY, MODELS, Gate, frame
from tests.support.partition_models import model_of


def test_a_champion_that_cannot_be_read_is_never_replaced(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    try_champion(gate.run, gate.register())  # there is no such model yet
    gate.enter("fair")
    try_champion(gate.run, gate.register())
    with pytest.raises(JobError, match=r"champion models:/.*/1 cannot be evaluated .*logloss needs probabilities"):
        try_champion(gate.run, gate.register(metric="logloss"))

    def fail(error: Exception) -> None:
        def load(uri: str, *_: Any, **__: Any) -> Any:
            raise error

        monkeypatch.setattr("shoal.models.loading.load", load)

    exact = loading.load(gate.uris["exact"])
    fail(ImportError("no module named catboost"))
    with pytest.raises(JobError, match="cannot be evaluated on the holdout: no module named catboost"):
        try_champion(gate.run, gate.register())
    outcome = gate.enter("exact", loaded=exact)
    assert (outcome.decision.reason, str(outcome.challenger.version), gate.champion()) == ("champion_unread", "2", "1")
    assert "no module named catboost" in outcome.decision.sentence
    fail(RegistryError("MLflow cannot be reached"))
    for call in (
        lambda: try_champion(gate.run, gate.register()),
        lambda: gate.enter("exact", loaded=exact),
    ):
        with pytest.raises(RegistryError, match="MLflow cannot be reached"):
            call()


def one_after_the_other(*models: str, **last: Any) -> Callable[[Gate], Outcome]:
    """Models enter in turn; the options are those of the last one."""

    def play(gate: Gate) -> Outcome:
        for model in models[:-1]:
            gate.enter(model)
        return gate.enter(models[-1], **last)

    return play


def champion_trained_on_the_holdouts_days(gate: Gate) -> Outcome:
    """Its rows may be those of the holdout, read from a database again."""
    timed = DataConnector.from_parquet(gate.data / "holdout.parquet").to_spec().model_copy(update={"time_col": "day"})
    gate.enter("exact", trained_on="the holdout's days", time_col="day")
    return gate.enter("fair", time_col="day", holdout=timed)


def champion_trained_on_the_holdout(challenger: str) -> Callable[[Gate], Outcome]:
    def play(gate: Gate) -> Outcome:
        gate.enter("exact", trained_on="holdout")
        return gate.enter(challenger)

    return play


def two_at_once(gate: Gate) -> Outcome:
    """When the first one is about to set the alias, it is paused beyond its lock, and a better one is promoted."""

    class Client(mlflow.MlflowClient):
        others: int = 0

        def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
            if not self.others:
                self.others += 1
                assert gate.enter("exact").decision.promote
            super().set_registered_model_alias(name, alias, version)

    gate.enter("fair")
    return gate.enter("good", run=dataclasses.replace(gate.run, client=Client(gate.run.uri)))


BY_WHEN = {"by": "when", "slice_tolerance": 0.05, "min_slice_rows": 10}
RANKING = {"metric": "ndcg@4", "metrics": ["ndcg"], "label_col": "relevance"}


@pytest.mark.parametrize(
    ("play", "reason", "champion", "sentence"),
    [
        pytest.param(
            one_after_the_other("constant"),
            "baseline_not_beaten",
            None,
            r"is not promoted: it does not beat the baseline, which always predicts the mean \(rmse=0\.\d+\)",
            id="a constant model",
        ),
        pytest.param(
            one_after_the_other("worse than the mean"),
            "baseline_not_beaten",
            None,
            r"is not promoted: it does not beat the baseline, .*",
            id="worse than the baseline",
        ),
        pytest.param(
            one_after_the_other("good", "good"),
            "champion_not_beaten",
            "1",
            r"does not beat champion version 1 \(rmse=\S+\): both are equal",
            id="a tie",
        ),
        pytest.param(
            one_after_the_other("fair", "not a number"),
            "metric_not_finite",
            "1",
            "is not promoted: its rmse is not a finite number",
            id="NaN",
        ),
        pytest.param(
            champion_trained_on_the_holdout("fair"),
            "champion_not_comparable",
            "2",
            r"replaces champion version 1 \(rmse=0\), which was trained on 200 rows of the holdout and is not "
            r"compared, better than the baseline \(rmse=0\.\d+\)",
            id="the champion has seen the holdout",
        ),
        pytest.param(
            champion_trained_on_the_holdouts_days,
            "champion_newer",
            "1",
            r"is not promoted: champion version 1 \(rmse=0\) was trained on newer rows \(day until 2024-02-28, this "
            r"version until 2024-01-28\) and stays, because a comparison needs 100 rows that neither was trained on, "
            "and the holdout has 0",
            id="the champion has seen the holdout's days",
        ),
        pytest.param(
            champion_trained_on_the_holdout("constant"),
            "baseline_not_beaten",
            "1",
            r"is not promoted: it does not beat the baseline, .*",
            id="the champion has seen the holdout and the challenger is no better than a constant",
        ),
        pytest.param(
            one_after_the_other("fair", "good", trained_on="holdout", overlap="flag"),
            "better",
            "2",
            r"replaces champion version 1 \(rmse=\S+\), although it was trained on 200 rows of the holdout",
            id="the challenger has seen the holdout and that is allowed",
        ),
        pytest.param(
            one_after_the_other("fair", "good but for those who are late", **BY_WHEN),
            "slice_worse",
            "1",
            r"does not replace champion version 1 \(rmse=\S+\): rmse is 0\.4 instead of 0\.\d+ where when is late, "
            r"more than slice_tolerance=0\.05 allows",
            id="a slice falls",
        ),
        pytest.param(
            one_after_the_other("ranker", **RANKING),
            "first",
            "1",
            r"is the first champion, better than the baseline \(ndcg@4=0\.\d+\)",
            id="a ranker",
        ),
        pytest.param(
            two_at_once,
            "champion_not_beaten",
            "3",
            r"does not beat champion version 3 \(rmse=0\)",
            id="two at once",
        ),
    ],
)
def test_decision_and_sentence(gate: Gate, monkeypatch, capsys, play, reason, champion, sentence):
    monkeypatch.setattr(contest, "PROMOTION_LOCK_TTL_S", 0.0)  # who is paused has lost the lock

    outcome = play(gate)

    assert outcome.decision.reason == reason
    assert gate.champion() == champion
    assert outcome.decision.promote is (gate.champion() == outcome.challenger.version.number)
    begin = rf"{gate.name} version {outcome.challenger.version} \(\S+=\S+\) "
    assert re.fullmatch(begin + sentence, outcome.decision.sentence), outcome.decision.sentence
    assert outcome.decision.sentence in capsys.readouterr().out


class TestRowsThatTheChampionHasSeen:
    """The models are compared on the other rows of the holdout, as plain XGBoost, NumPy and scikit-learn compute it."""

    @pytest.fixture(scope="class")
    def flights(self) -> pd.DataFrame:
        """Twenty rows for each of 80 days; the label is noisy, so a model is better on rows that it was trained on."""
        random = np.random.default_rng(0)
        day = np.repeat(pd.date_range("2013-03-01", periods=80).date, 20)
        a = random.random(len(day))
        rows = pd.DataFrame({"a": a, "late": random.random(len(day)), "day": day, "y": 3 * a + random.random(len(day))})
        return rows.assign(when=np.where(np.arange(len(day)) % 4, "on time", "late"))

    def window(self, flights: pd.DataFrame, folder: Path, first: int, end: int) -> DataConnector:
        """Rows of some days in a file of their own, as they are staged from a database."""
        rows = flights[first * 20 : end * 20]
        rows.to_parquet(folder / f"{first}-{end}.parquet", row_group_size=70)
        spec = DataConnector.from_parquet(folder / f"{first}-{end}.parquet").to_spec()
        return DataConnector.from_spec(spec.model_copy(update={"time_col": "day"}))

    def enter(self, gate: Gate, rows: DataConnector, rounds: int, **options: Any) -> tuple[Outcome, Any]:
        import xgboost

        frame = rows.to_pandas()
        model = xgboost.train({"nthread": 1}, xgboost.DMatrix(frame[INPUTS], frame["y"]), rounds)
        signature = infer_signature(frame[INPUTS], frame["y"])
        logged = mlflow.xgboost.log_model(model, name="model", signature=signature, pip_requirements=[])
        gate = dataclasses.replace(gate, uris={"model": logged.model_uri})
        return gate.enter("model", trained_on=rows, time_col="day", metrics=["mae"], **options), model

    @pytest.mark.parametrize(
        ("first", "rounds", "reason", "rows"),
        [
            pytest.param(1, 1, "champion_not_beaten", 120, id="a day later, worse"),
            pytest.param(1, 6, "better", 120, id="a day later, better"),
            pytest.param(7, 6, "champion_newer", 0, id="a week later"),
            pytest.param(19, 6, "champion_newer", 0, id="much later"),
        ],
    )
    def test_a_late_run_is_compared_on_the_other_days(self, gate, flights, tmp_path, first, rounds, reason, rows):
        import xgboost

        if reason == "better" and not xgboost.__version__.startswith("3.2."):
            pytest.skip("which of the two models is better depends on the version of XGBoost")
        # A champion of 60 rounds overfits, so that it loses on new rows.
        holdout = self.window(flights, tmp_path, 60, 67).to_spec().model_copy(update={"time_col": "day"})
        later = self.window(flights, tmp_path, first, first + 60)
        _, champion = self.enter(gate, later, 4 if rounds == 1 else 60, holdout=holdout, overlap="flag")
        options = {"by": "when", "slice_tolerance": 5.0, "min_slice_rows": 1}
        outcome, challenger = self.enter(
            gate, self.window(flights, tmp_path, 0, 60), rounds, holdout=holdout, **options
        )

        assert outcome.decision.reason == reason
        assert gate.champion() == ("2" if reason == "better" else "1")
        report = json.loads(mlflow.artifacts.load_text(f"runs:/{gate.run.run_id}/shoal/promotion.json"))
        unseen = report["unseen"]
        assert (report["decision"]["reason"], unseen["rows"]) == (reason, rows)
        assert outcome.result()["champion"].unseen_rows == rows
        newer = flights[67 * 20 - rows : 67 * 20]
        for name, model in (("champion", champion), ("challenger", challenger)) if rows else ():
            errors = newer["y"] - model.predict(xgboost.DMatrix(newer[INPUTS]))
            right = {"rmse": float(np.sqrt((errors**2).mean())), "mae": float(errors.abs().mean())}
            assert unseen[name] == pytest.approx(right, rel=1e-6)
            assert f"rmse={unseen[name]['rmse']:.6g}" in outcome.decision.sentence
            late = float(np.sqrt((errors[newer["when"] == "late"] ** 2).mean()))
            [found] = [each for each in unseen["slices"] if each["slice"] == "late"]
            assert (found["rows"], found[name]) == (30, pytest.approx(late, rel=1e-6))
        table = mlflow.artifacts.load_text(f"runs:/{gate.run.run_id}/shoal/promotion.md")
        assert f"challenger on {rows} of 140 rows" in table
        # The recorded metric is that of all rows, which the digest of the holdout stands for.
        whole = flights[60 * 20 : 67 * 20]
        errors = whole["y"] - challenger.predict(xgboost.DMatrix(whole[INPUTS]))
        assert outcome.challenger.value == pytest.approx(float(np.sqrt((errors**2).mean())), rel=1e-6)

    def test_without_times_rows_of_the_same_file_are_left_out_by_group(self, gate, data, uris):
        import sklearn.metrics
        import xgboost

        seen = [[("query", "<", 10)], [("query", "=", 10), ("late", "=", 1)]]
        rows = DataConnector.from_parquet(data / "holdout.parquet", filters=seen)
        gate.enter("ranker", trained_on=rows, overlap="flag", **RANKING)

        outcome = gate.enter("ranker", **RANKING)

        assert (outcome.decision.reason, outcome.champion.unseen.rows) == ("champion_not_beaten", 112)
        rest = frame(1)[88:]
        scores = mlflow.xgboost.load_model(uris["ranker"]).predict(xgboost.DMatrix(rest[INPUTS]))
        right = np.mean(
            [
                sklearn.metrics.ndcg_score([rest["relevance"][of]], [scores[of]], k=4)
                for of in (rest["query"] == query for query in rest["query"].unique())
            ]
        )
        assert outcome.champion.unseen.champion.value == pytest.approx(right)

    def test_rows_of_the_challenger_are_left_out_too(self, gate, data):
        """The rest is enough for the second version. For the third it is not, so all rows are compared."""
        parts = DataConnector.from_parquet(data / "holdout.parquet").random_split([0.2, 0.2, 0.6])
        gate.enter("fair", trained_on=parts[0], overlap="flag")

        second = gate.enter("good", trained_on=parts[1], overlap="flag")
        third = gate.enter("exact", trained_on=parts[2], overlap="flag")

        assert second.decision.sentence.endswith(", on 120 of the holdout's 200 rows, which neither was trained on")
        left = parts[2].to_pandas()
        assert second.champion.unseen.champion.value == pytest.approx(
            float(np.sqrt((((2 * left["a"] + 0.5) - left["y"]) ** 2).mean()))
        )
        assert (third.champion.unseen.rows, third.decision.reason) == (40, "better")
        assert third.decision.sentence.endswith(
            ", which was trained on 40 rows of the holdout, although it was trained on 120 rows of the holdout"
        )


def test_models_with_margins_of_several_classes_are_compared(gate: Gate, tmp_path: Path) -> None:
    import xgboost
    from sklearn.metrics import log_loss

    margins = np.random.default_rng(5).normal(size=(200, 3))
    names = ["m0", "m1", "m2"]
    rows = frame(1).assign(**dict(zip(names, margins.T, strict=True)), relevance=lambda it: it["relevance"].clip(0, 2))
    rows.to_parquet(tmp_path / "holdout.parquet")
    data = xgboost.DMatrix(rows[INPUTS], rows["relevance"], base_margin=margins)
    outcomes, right = [], []
    for rounds in (1, 3):
        model = xgboost.train({"objective": "multi:softprob", "num_class": 3, "nthread": 1}, data, rounds)
        uri = gate.run.log_model("xgboost", model, rows[INPUTS], base_margin_cols=names)
        entering = dataclasses.replace(gate, uris={"margins": uri})
        holdout = DataConnector.from_parquet(tmp_path / "holdout.parquet")
        outcomes.append(
            entering.enter("margins", label_col="relevance", metric="logloss", baseline=None, holdout=holdout)
        )
        right.append(log_loss(rows["relevance"], model.predict(data)))
    champion, challenger = outcomes[1].champion, outcomes[1].challenger
    assert (str(champion.version), str(challenger.version), outcomes[1].decision.reason) == ("1", "2", "better")
    assert [champion.value, challenger.value] == pytest.approx(right, rel=1e-5)


def test_the_report_is_in_the_log_and_in_mlflow(gate: Gate, capsys):
    gate.enter("fair", baseline=None)
    gate.enter("good")
    capsys.readouterr()

    last = gate.enter("exact", metrics=["mae", "r2"], **BY_WHEN | {"min_slice_rows": 30})

    folder = f"runs:/{gate.run.run_id}/shoal"
    said, table = capsys.readouterr().out, mlflow.artifacts.load_text(f"{folder}/promotion.md")
    assert table in said
    assert table.startswith(last.decision.sentence)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line]
    assert ["challenger", "3", "0", "0", "1", "0"] in lines
    assert [line[1] for line in lines if line[0] == "champion"] == ["2"]
    assert [line[0] for line in lines if "baseline" in line[0]] == ["baseline (mean)"]
    assert [(line[0], line[1], line[4]) for line in lines if line[0] in ("late", "on time")] == [
        ("late", "20", "too few rows to decide"),
        ("on time", "180", ""),
    ]
    assert [line[1:3] for line in lines if len(line) == 6 and line[5] == "job"][1:] == [
        ["3", "2"],
        ["2", "1"],
        ["1", "-"],
    ]
    report = json.loads(mlflow.artifacts.load_text(f"{folder}/promotion.json"))
    assert report["decision"] == {"promoted": True, "reason": "better", "sentence": last.decision.sentence}
    assert report["challenger"] == {"version": "3", "metrics": {"rmse": 0, "mae": 0, "r2": 1}, "overlap": 0}
    assert [each["version"] for each in report["promotions"]] == ["3", "2", "1"]
    logged = gate.run.client.get_run(gate.run.run_id).data.metrics
    assert (logged["holdout-rmse"], logged["holdout-r2"]) == (0, 1)
    assert gate.run.client.get_model_version(gate.name, "3").tags["holdout.mae"] == "0.0"
    assert [(each.version, each.promoted) for each in last.recent] == [("2", True), ("1", True)]
    assert last.recent[0].value == last.champion.value
    assert last.result()["recent"] == last.recent


def test_the_registry_says_how_it_was_decided(gate: Gate):
    rows = frame(0)
    signature = infer_signature(rows[INPUTS], rows["y"])
    logged = mlflow.pyfunc.log_model(
        name="linear", python_model=MODELS["fair"], signature=signature, pip_requirements=[]
    )
    gate = dataclasses.replace(gate, uris={**gate.uris, "fair": logged.model_uri})
    refused = gate.enter("constant", alias="best", tags={"shoal.job_id": "a"})
    first = gate.enter("fair", alias="best", tags={"shoal.job_id": "b"}, **BY_WHEN)

    details = describe_model(gate.name, gate.run.uri)

    status, (newest, oldest) = details.status, details.challengers
    assert (status.alias, status.champion, details.versions) == ("best", newest, 2)
    assert (newest.promoted, newest.reason, newest.job_id) == (True, "first", "b")
    assert (newest.metric, newest.value) == ("rmse", first.challenger.value)
    told = ("baseline_not_beaten", refused.decision.sentence)
    assert (oldest.promoted, (oldest.reason, oldest.decision)) == (False, told)
    slices = first.challenger.evaluation.slices
    assert [(each.name, each.rows, each.value) for each in details.slices] == [
        (name, each.rows, each.value) for name, each in slices.items()
    ]
    entries = model_history(gate.name, tracking_uri=gate.run.uri)
    assert [(each.version, each.promoted, each.promoted_at is None) for each in entries] == [
        ("2", True, False), ("1", False, True),
    ]  # fmt: skip
    assert entries[0].holdout_digest == entries[1].holdout_digest is not None


def test_a_report_that_cannot_be_stored_fails_no_job(gate: Gate, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("shoal.models.comparison_report.store", refuse)
    monkeypatch.setattr("shoal.models.contest._recent", refuse)

    outcome = gate.enter("good")

    assert outcome.decision.promote and outcome.recent == ()
    said = capsys.readouterr().out
    assert "the report could not be stored in MLflow: no space left" in said
    assert "the earlier versions of the model could not be read from MLflow: no space left" in said


def test_a_version_whose_training_rows_are_not_known_is_compared(gate: Gate, monkeypatch, capsys):
    first = gate.enter("good", trained_on="holdout", overlap="flag")
    gate.run.client.delete_model_version_tag(gate.name, first.challenger.version.number, training_record.ROWS_TAG)
    assert gate.enter("fair").decision.reason == "champion_not_beaten"

    gone = f"runs:/{gate.run.run_id}/nothing.json"
    gate.run.client.set_model_version_tag(gate.name, first.challenger.version.number, training_record.ROWS_TAG, gone)
    assert gate.enter("fair").decision.reason == "champion_not_beaten"
    assert f"version 1 are not known: {gone} cannot be read" in capsys.readouterr().out


def test_a_reported_metric_that_cannot_be_computed_is_nan(gate: Gate, capsys):
    # Its predictions are below -1, of which there is no logarithm.
    outcome = gate.enter("worse than the mean", baseline=None, metrics=["mean_squared_log_error"])

    assert outcome.decision.reason == "first"
    assert np.isnan(outcome.metrics["holdout-mean_squared_log_error"])
    assert "mean_squared_log_error cannot be computed on the holdout" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("texts", "slices"),
    [
        (["null", None, "x", None], {"null": [0], "(null)": [1, 3], "x": [2]}),
        (["(x)", None, "x", None], {"null": [1, 3], "(x)": [0], "x": [2]}),
    ],
)
def test_rows_without_a_value_are_a_slice_of_their_own(tmp_path, texts, slices):
    pd.DataFrame({"y": 1.0, "by": texts}, index=range(4)).to_parquet(tmp_path / "x.parquet")
    register = Register(model="m", metric="rmse", holdout=DataConnector.from_parquet(tmp_path / "x.parquet"), by="by")

    found = Holdout.read(register, "y").slices

    assert {name: rows.tolist() for name, rows in found.items()} == slices


class TestBeforeTraining:
    def check(
        self,
        gate: Gate,
        trained_on: DataConnector,
        label_col: str = "y",
        time_col: str | None = None,
        **options: Any,
    ) -> None:
        times = trained_on.time_range(time_col) if time_col else None
        check_holdout(
            gate.register(**options),
            label_col,
            INPUTS,
            group_col="query",
            trained_on=training_record.of_datasets([(trained_on, times)]),
        )

    def test_a_holdout_with_training_rows_is_refused_by_file(self, gate, data, tmp_path):
        link = tmp_path / "linked.parquet"
        link.symlink_to(data / "holdout.parquet")
        linked = DataConnector.from_parquet([link, data / "train.parquet"])

        said = re.escape(f"200 rows of {data}/holdout.parquet (in training: {link})")
        with pytest.raises(DataError, match=f'{said}. Name a holdout without these rows, or set .*"flag"'):
            self.check(gate, linked)
        self.check(gate, linked, overlap="flag")

    def test_a_holdout_on_which_a_search_chooses_is_refused_as_training_rows_are(self, gate, data, tmp_path):
        """By rows, also of a copy of the file, and by time."""
        shutil.copy(data / "holdout.parquet", tmp_path / "copy.parquet")
        whole = DataConnector.from_parquet(tmp_path / "copy.parquet")
        part, other = whole.random_split([0.5, 0.5])
        days = DataConnector.from_parquet(data / "the holdout's days.parquet")
        timed = DataConnector.from_parquet(data / "holdout.parquet").to_spec().model_copy(update={"time_col": "day"})
        rows = f"{part.num_rows()} rows of .*the search: .*copy.parquet"
        for chosen, times, holdout, said in (
            (part, None, None, rf"rows that the search chooses the parameters on.*{rows}"),
            (days, days.time_range("day"), timed, "from the same period as the holdout of the search"),
        ):
            options = {} if holdout is None else {"holdout": holdout}
            selected = training_record.of_datasets([(chosen, times)])
            with pytest.raises(DataError, match=said):
                check_holdout(gate.register(**options), "y", INPUTS, group_col="query", selected_on=selected)
            flagged = gate.register(**options, overlap="flag")
            check_holdout(flagged, "y", INPUTS, group_col="query", selected_on=selected)
        apart = gate.register(holdout=other)
        selected = training_record.of_datasets([(part, None)])
        check_holdout(apart, "y", INPUTS, group_col="query", selected_on=selected)

    def test_parts_of_one_split_are_not_refused(self, gate, data):
        train, held_out = DataConnector.from_parquet(data / "train.parquet").random_split([0.8, 0.2])

        self.check(gate, train, holdout=held_out)
        with pytest.raises(DataError, match=f"{held_out.num_rows()} rows of .*train.parquet"):
            self.check(gate, DataConnector.from_parquet(data / "train.parquet"), holdout=held_out)

    @pytest.mark.parametrize(
        ("trained_on", "columns", "refused"),
        [
            pytest.param("the holdout's days", ("day", "day"), True, id="the holdout's days"),
            pytest.param("the holdout's days", ("day", None), False, id="the holdout has no time column"),
            pytest.param("the holdout's days", (None, "day"), False, id="the training rows have no time column"),
            pytest.param("the holdout's days", ("a", "day"), False, id="another column"),
            pytest.param("train", ("day", "day"), False, id="earlier days"),
            pytest.param("later days", ("day", "day"), False, id="later days"),
        ],
    )
    def test_a_holdout_of_the_same_time_is_refused(self, gate, data, trained_on, columns, refused):
        """Other rows, as far as the files tell: the same rows may have been read from a database again."""
        rows = DataConnector.from_parquet(data / f"{trained_on}.parquet")
        of_training, of_holdout = columns
        spec = (
            DataConnector.from_parquet(data / "holdout.parquet").to_spec().model_copy(update={"time_col": of_holdout})
        )

        if not refused:
            return self.check(gate, rows, time_col=of_training, holdout=spec)
        said = "day is 2024-02-01 to 2024-02-28 in the training rows, and 2024-02-01 to 2024-02-28 in the holdout"
        with pytest.raises(DataError, match=f'{said}. Choose a holdout that begins after .*"flag"'):
            self.check(gate, rows, time_col=of_training, holdout=spec)
        return self.check(gate, rows, time_col=of_training, holdout=spec, overlap="flag")

    def test_rows_of_one_file_are_compared_by_row_and_not_by_time(self, gate, data):
        """A random split has the same days in all its parts; filters on another column, too."""
        whole = DataConnector.from_parquet(data / "train.parquet")
        train, held_out = whole.random_split([0.8, 0.2])
        self.check(gate, train, time_col="day", holdout=held_out.to_spec().model_copy(update={"time_col": "day"}))

        early, late = (
            DataConnector.from_parquet(
                data / "train.parquet", filters=[("a", operator, 0.5), ("day", ">", "2024-01-02")]
            )
            for operator in ("<", ">=")
        )
        assert early.time_range() == late.time_range()
        self.check(gate, early, time_col="day", holdout=late)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"by": "carrier"}, "the holdout lacks columns that the model needs: carrier"),
            ({"metric": "accuracy"}, "accuracy needs class numbers from 0 to"),
            ({"metric": "accuracy", "baseline": None}, "accuracy needs class numbers from 0 to"),
            ({"metrics": ["mae", "f1"]}, "f1 needs class numbers from 0 to"),
            ({"metrics": ["mae", "average_precision"]}, "average_precision needs the labels 0 and 1"),
            ({"label_col": "when"}, 'label column "when" must be numeric, but is'),
        ],
    )
    def test_what_does_not_suit_the_rules_is_refused(self, gate, data, options, said):
        with pytest.raises(DataError, match=said):
            self.check(gate, DataConnector.from_parquet(data / "train.parquet"), **options)

    def test_a_holdout_without_a_digest_is_refused(self, gate, data, monkeypatch):
        def refuse(self: DataConnector) -> str:
            raise DataError("row group 1 is corrupt")

        monkeypatch.setattr(DataConnector, "digest", refuse)
        with pytest.raises(DataError, match="row group 1 is corrupt"):
            check_holdout(gate.register(), "y", INPUTS)

    def test_a_column_of_ids_is_no_column_of_slices(self, gate, tmp_path):
        pd.DataFrame({"a": 0.0, "late": 0.0, "y": np.arange(1001.0), "id": range(1001)}).to_parquet(
            tmp_path / "x.parquet"
        )

        with pytest.raises(DataError, match=r'"id", which has 1001 different values .* at most 1000'):
            check_holdout(
                gate.register(holdout=DataConnector.from_parquet(tmp_path / "x.parquet"), by="id"), "y", INPUTS
            )


class TestVersionsOfPartitions:
    """The holdout has 100 rows of each of the keys "north" and "south". The label is three times `a`."""

    def enter(self, gate: Gate, folder: Path, factors: dict[str, float | None], **options: Any) -> Outcome:
        model = model_of(folder / str(len(os.listdir(folder))), factors, pa.string())
        schema = pa.schema([("key", pa.string()), ("a", pa.float64())])
        uri, _ = logged_model.log(model.results, by=["key"], input_cols=["a"], schema=schema)
        holdout = frame(1).assign(key=["north", "south"] * 100)
        holdout.to_parquet(folder / "holdout.parquet")
        rows = DataConnector.from_parquet(folder / "holdout.parquet")
        return dataclasses.replace(gate, uris={"model": uri}).enter("model", holdout=rows, **options)

    def rmse(self, *parts: tuple[str, float]) -> float:
        """The rmse on the rows of keys, from the factor of each."""
        a = frame(1)["a"]
        errors = [(3 - factor) * a[{"north": 0, "south": 1}[key] :: 2] for key, factor in parts]
        return float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))

    def test_both_are_compared_on_the_keys_that_both_know(self, gate: Gate, tmp_path: Path) -> None:
        first = self.enter(gate, tmp_path, {"north": 2.9, "west": 1.0})
        assert first.decision.reason == "first"
        assert first.challenger.value == pytest.approx(self.rmse(("north", 2.9)))
        assert first.decision.sentence.endswith(
            "; measured without the rows whose keys have no model. Left out: key 'south' (100 rows)"
        )

        worse = self.enter(gate, tmp_path, {"north": 2.8, "south": 3.0}, by="key", metrics=["mae"])
        assert (worse.decision.reason, gate.champion()) == ("champion_not_beaten", "1")
        mine, theirs = self.rmse(("north", 2.8)), self.rmse(("north", 2.9))
        assert f"(rmse={mine:.6g}) does not beat champion version 1 (rmse={theirs:.6g})" in worse.decision.sentence
        assert worse.decision.sentence.endswith(
            "; measured on the 100 of 200 rows whose keys both know. Left out: key 'south' (100 rows)"
        )
        assert worse.result()["champion"].unseen_rows == 100
        report = json.loads(mlflow.artifacts.load_text(f"runs:/{gate.run.run_id}/shoal/promotion.json"))
        assert (report["common"]["rows"], report["common"]["other_keys"]) == (100, {"'south'": 100})
        assert report["common"]["challenger"]["rmse"] == pytest.approx(mine)
        assert [(each["slice"], each["rows"]) for each in report["slices"]] == [("north", 100)]

        better = self.enter(gate, tmp_path, {"north": 2.95, "south": None})
        assert (better.decision.reason, gate.champion()) == ("better", "3")

    def test_without_a_common_key_the_champion_stays(self, gate: Gate, tmp_path: Path) -> None:
        self.enter(gate, tmp_path, {"north": 2.0})
        other = self.enter(gate, tmp_path, {"south": 3.0})
        assert (other.decision.reason, gate.champion()) == ("no_common_keys", "1")
        assert "champion version 1 stays, because no key of the holdout has a model in both" in other.decision.sentence
        assert other.decision.sentence.endswith("Left out: keys 'north' (100 rows), 'south' (100 rows)")

        unknown = self.enter(gate, tmp_path, {"east": 3.0})
        assert (unknown.decision.reason, gate.champion()) == ("metric_not_finite", "1")

    def test_rows_that_one_was_trained_on_are_left_out_of_the_common_ones(self, gate: Gate, tmp_path: Path) -> None:
        self.enter(gate, tmp_path, {"north": 2.0})
        champion = self.enter(gate, tmp_path, {"north": 3.0}, trained_on=self.seen(tmp_path), overlap="flag")
        assert champion.decision.reason == "better"
        found = self.enter(gate, tmp_path, {"north": 2.9, "south": 3.0})
        assert (found.champion.unseen.rows, found.champion.unseen.holdout_rows) == (60, 100)
        right = 2.9 * frame(1)["a"][80::2] - frame(1)["y"][80::2]
        assert found.champion.unseen.challenger.value == pytest.approx(float(np.sqrt((right**2).mean())))

    def seen(self, folder: Path) -> DataConnector:
        return DataConnector.from_parquet(folder / "holdout.parquet", filters=[("query", "<", 10)])


def test_a_metric_has_its_plain_name_everywhere_but_in_mlflow(gate: Gate) -> None:
    """MLflow refuses the "@" of ndcg@4, so that it has another character there, and only there."""
    tags = {JOB_TAG: KEY.job_id, ATTEMPT_TAG: str(KEY.attempt)}
    gate.enter("ranker", tags=tags, **RANKING)
    outcome = gate.enter("ranker", tags=tags, **RANKING)

    value = outcome.challenger.value
    assert outcome.metrics == {"holdout-ndcg@4": value, "holdout-ndcg": outcome.metrics["holdout-ndcg"]}
    assert outcome.recent[0].value == value
    assert "holdout-ndcg_4" in gate.run.client.get_run(gate.run.run_id).data.metrics
    details = describe_model(gate.name, gate.run.uri)
    [listed] = [each for each in list_models(gate.run.uri) if each.name == gate.name]
    for version in (details.status.champion, details.challengers[0], listed.challenger):
        assert version is not None
        assert (version.metric, version.value, version.metrics.keys()) == ("ndcg@4", value, {"ndcg@4", "ndcg"})
    history = model_history(gate.name, tracking_uri=gate.run.uri)
    assert [(each.metric, each.holdout_digest is None) for each in history] == [("ndcg@4", False)] * 2
    decided = promote_model(gate.name, 2, tracking_uri=gate.run.uri)
    assert (decided.metric, decided.metrics) == ("ndcg@4", outcome.metrics)
    assert ModelLine.of(gate.name, decided).value == value
    report = json.loads(mlflow.artifacts.load_text(f"runs:/{gate.run.run_id}/shoal/promotion.json"))
    assert report["challenger"]["metrics"].keys() == {"ndcg@4", "ndcg"}
