"""Tracking and the gate against a real MLflow store and tiny real boosters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import DataConnector
from shoal.errors import DataError, InvalidArgumentError, JobError
from shoal.jobs import Register, Tracking, mlflow_run
from shoal.jobs.files.storage import default_uri
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.mlflow_run import Run, legal_name
from shoal.models import contest, gate, loading
from shoal.models.contest import Outcome
from shoal.models.decision import Candidate, Evaluation
from shoal.models.holdout import Holdout, check_holdout, evaluate
from shoal.models.ledger import Ledger
from shoal.state import Store
from shoal.state.schema import JobState
from shoal.training.tracking import folder_of
from tests.support.gate import attempt_of
from tests.support.job_store import POOL

NAN = float("nan")
COLUMNS = ["a", "b"]


@pytest.fixture
def tracking(mlflow_uri: str) -> Tracking:
    return Tracking(uri=mlflow_uri, experiment="test", tags={"team": "x"})


@pytest.fixture
def run(store: Store, tracking: Tracking) -> Iterator[Run]:
    import mlflow

    run = Run.begin(tracking, name="job-1", tags={"shoal.job_id": "job"})
    yield run
    mlflow.end_run()


def frame(rows: int = 200, seed: int = 0) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    data = pd.DataFrame({"a": random.random(rows), "b": random.random(rows)})
    return data.assign(y=data["a"] * 3 + data["b"])


def booster(rounds: int, columns: list[str] = COLUMNS):
    import xgboost

    data = frame()
    return xgboost.train({"eta": 0.3}, xgboost.DMatrix(data[columns], data["y"]), rounds)


@pytest.fixture
def holdout(tmp_path: Path) -> DataConnector:
    frame(100, seed=1).to_parquet(tmp_path / "holdout.parquet", row_group_size=30)
    return DataConnector.from_parquet(tmp_path / "holdout.parquet")


class TestRun:
    def test_what_is_logged_can_be_read(self, run, tracking):
        run.log_params({"eta": 0.3, "input_cols": "x" * 7000, "/x{}": 1, **{f"p{n}": n for n in range(150)}})
        run.log_dataset("y", "d" * 32, ["s3://key:secret@bucket/train"], context="training")
        run.log_metrics([("eval-rmse", 0.5 if step < 1500 else 0.25, step, 1.0) for step in range(1501)])
        run.log_metrics([("eval-ndcg@10", NAN, 0, 1.0)])
        run.log_values({"rows": 3, "nothing": NAN})
        run.finish("FINISHED")

        read = run.client.get_run(run.run_id)
        assert read.info.status == "FINISHED"
        assert read.info.run_name == "job-1"
        assert (read.data.tags["shoal.job_id"], read.data.tags["team"]) == ("job", "x")
        assert (read.data.params["eta"], read.data.params["p149"]) == ("0.3", "149")
        assert len(read.data.params["input_cols"]) == 6000
        assert read.data.metrics["eval-rmse"] == 0.25
        assert len(run.client.get_metric_history(run.run_id, "eval-rmse")) == 1501
        [dataset] = read.inputs.dataset_inputs
        assert dataset.dataset.digest == "d" * 32
        assert "secret" not in dataset.dataset.source
        assert run.run_id in run.link

    def test_credentials_stay_out_of_it(self, store: Store, tracking):
        tagged = tracking.model_copy(
            update={
                "run_name": "http://me:cAnArY@host/run",
                "tags": {"db": "postgresql://me:cAnArY@db", "token": "cAnArY"},
            }
        )
        run = Run.begin(tagged, name="job-1", tags={})
        run.log_params({"source": "s3://k:cAnArY/x@bucket", "password": "cAnArY", "nested": {"api_key": "cAnArY"}})
        run.log_dataset("y", "c" * 32, ["https://host/x?sig=cAnArY"], context="training")
        run.finish("FINISHED")

        read = run.client.get_run(run.run_id)
        assert "cAnArY" not in str(read.to_dictionary())
        assert read.info.run_name == "http://host/run"
        assert read.data.tags["db"] == "postgresql://db"
        assert read.data.params["source"] == "s3://bucket"
        assert [item.dataset.source for item in read.inputs.dataset_inputs] == ["https://host/x?sig=***"]
        assert "cAnArY" not in repr(run)

    @pytest.mark.parametrize("name", ["../../x", "..", "/x", "a/../../../x", "..%2F..%2Fx", "a#b?c", "x" * 400])
    def test_no_experiment_leads_out_of_the_folder_of_artifacts(
        self, store: Store, own_mlflow: str, tmp_path: Path, name: str
    ):
        run = Run.begin(Tracking(uri=own_mlflow, experiment=name), name="job-1", tags={})
        run.client.log_text(run.run_id, "x", "note.txt")
        run.finish("FINISHED")

        artifacts = tmp_path / "artifacts"
        experiment = run.client.get_experiment_by_name(name)
        folder = experiment.artifact_location.removeprefix("file://")
        assert Path(folder) == artifacts / folder_of(name)
        assert Path(folder).parent == artifacts
        [note] = tmp_path.rglob("note.txt")
        assert note.resolve().is_relative_to(folder)

    def test_a_deleted_experiment_is_named_with_the_command_that_restores_it(self, own_mlflow):
        import mlflow

        client = mlflow_run.connect(own_mlflow)
        number = client.create_experiment("nightly")
        client.delete_experiment(number)
        for named in ({"experiment": "nightly"}, {"experiment_id": number}):
            with pytest.raises(InvalidArgumentError, match=r"was deleted.*restore it with") as caught:
                Run.begin(Tracking(uri=own_mlflow, **named), name="job-1", tags={})
            assert f'experiment "nightly" (id {number})' in str(caught.value)
            command = f"`MLFLOW_TRACKING_URI={own_mlflow} mlflow experiments restore -x {number}`"
            assert command in str(caught.value)
        client.restore_experiment(number)
        assert Run.begin(Tracking(uri=own_mlflow, experiment_id=number), name="job-1", tags={}).experiment_id == number
        mlflow.end_run()

    def test_folders_of_experiments(self):
        assert folder_of("Nightly run 1.2") == "Nightly run 1.2"
        folders = [folder_of(name) for name in ("a/b", "a_b", "a#b", "a%2Fb")]
        assert len(set(folders)) == 4

    def test_a_failed_run_is_marked(self, run):
        run.finish("FAILED")

        assert run.client.get_run(run.run_id).info.status == "FAILED"

    def test_a_model_has_a_signature_and_predicts_what_it_predicted(self, run):
        import mlflow

        model = booster(5)
        sample = frame()[COLUMNS]

        uri = run.log_model("xgboost", model, sample)

        loaded = mlflow.pyfunc.load_model(uri)
        assert [column.name for column in loaded.metadata.signature.inputs] == COLUMNS
        for rows in (sample, sample.fillna(0).astype("int64"), sample.assign(**{COLUMNS[0]: np.nan})):
            predicted = model.inplace_predict(rows.to_numpy(dtype=float))
            np.testing.assert_allclose(loaded.predict(rows), predicted, rtol=1e-6)

    def test_the_default_store_is_in_the_home(self, store: Store, fresh_home: Path, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        run = Run.begin(Tracking(), name="job-1", tags={})
        run.log_model("xgboost", booster(1), frame()[COLUMNS])
        run.finish("FINISHED")

        assert (fresh_home / "mlflow" / "mlflow.db").exists()
        assert any((fresh_home / "mlflow" / "artifacts").rglob("*.ubj"))
        assert list(tmp_path.iterdir()) == []
        assert "mlflow ui --backend-store-uri sqlite:///" in run.link


@given(st.text() | st.text("/._a@", max_size=6))
def test_every_metric_gets_a_name_that_mlflow_accepts(name: str):
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(legal_name(name))


def test_names_that_mlflow_refuses():
    assert legal_name("eval-ndcg@10") == "eval-ndcg_10"


def evaluated(model, holdout: DataConnector, metric: str = "rmse", label_col: str = "y", input_cols=()) -> Evaluation:
    register = Register(model="m", metric=metric, holdout=holdout)
    predictor = model if hasattr(model, "predict_table") else loading.predictor_of(model, input_cols)
    return evaluate(predictor, Holdout.read(register, label_col), register.all_metrics)


class TestGate:
    def challenge(
        self,
        run: Run,
        store: Store,
        name: str,
        model,
        holdout: DataConnector,
        framework: str = "xgboost",
        meanwhile=None,
    ) -> Outcome:
        def score_champion(version: str) -> Candidate:
            if meanwhile is not None:
                meanwhile(str(version))
            return Candidate(version, evaluated(loading.load(f"models:/{name}/{version}"), holdout))

        register = Register(model=name, metric="rmse", holdout=holdout)
        uri = run.log_model(framework, model, frame()[COLUMNS])
        digest, tags = holdout.digest(), {"shoal.job_id": "job"}
        return contest.Contest(
            run.client,
            Ledger.of(run.client, store, register),
            register,
            gate.registered(register, uri, evaluated(model, holdout), digest, tags),
            baseline=None,
            holdout_digest=digest,
            key=Key("job", 1),
            score_champion=score_champion,
        ).decided()

    def test_first_worse_better_equal(self, run, store, holdout):
        first, worse, better, equal = (
            self.challenge(run, store, "flights", booster(rounds), holdout) for rounds in (5, 1, 20, 20)
        )

        assert (first.decision.reason, first.champion) == ("first", None)
        assert (worse.decision.reason, worse.champion) == ("champion_not_beaten", first.challenger)
        assert (better.decision.reason, better.champion) == ("better", first.challenger)
        assert (equal.decision.reason, equal.champion) == ("champion_not_beaten", better.challenger)
        assert run.client.get_model_version_by_alias("flights", "champion").version in (3, "3")
        tags = run.client.get_model_version("flights", worse.challenger.version.number).tags
        assert tags["shoal.job_id"] == "job"
        assert float(tags["holdout.rmse"]) == worse.challenger.value
        assert tags["holdout.rmse.digest"] == holdout.digest()

    def test_a_champion_that_changes_meanwhile_is_compared_with_anew(self, run, store, holdout):
        self.challenge(run, store, "race", booster(1), holdout)
        self.challenge(run, store, "race", booster(20), holdout)
        run.client.set_registered_model_alias("race", "champion", "1")
        scored = []

        def meanwhile(version: str) -> None:
            """Another version is promoted while the champion is evaluated."""
            scored.append(version)
            run.client.set_registered_model_alias("race", "champion", "2")

        outcome = self.challenge(run, store, "race", booster(5), holdout, meanwhile=meanwhile)

        assert scored == ["1", "2"]
        assert not outcome.decision.promote
        assert outcome.champion is not None
        assert outcome.champion.version.number == "2"

    def test_a_challenger_of_another_library(self, run, store, holdout):
        import lightgbm

        self.challenge(run, store, "either", booster(1), holdout)
        data = frame()
        model = lightgbm.train({"verbosity": -1}, lightgbm.Dataset(data[COLUMNS], data["y"]), 50)
        outcome = self.challenge(run, store, "either", model, holdout, "lightgbm")
        assert outcome.decision.promote
        assert evaluated(loading.load("models:/either/2"), holdout).value == pytest.approx(outcome.challenger.value)

    def test_a_model_of_any_kind_that_user_code_has_logged(self, run, store, holdout):
        import mlflow
        from mlflow.models import infer_signature

        class Exact(mlflow.pyfunc.PythonModel):
            def predict(self, context, model_input, params=None):
                taken = np.asarray(model_input)
                return taken[:, 0] * 3 + taken[:, 1]

        assert run.logged_model() is None
        champion = self.challenge(run, store, "any", booster(5), holdout).challenger
        features = frame()[COLUMNS].astype("float32")
        for inputs, columns in ((features, ()), (features.to_numpy(), COLUMNS)):
            signature = infer_signature(inputs, features["a"])
            mlflow.pyfunc.log_model(name="exact", python_model=Exact(), signature=signature, pip_requirements=[])
            uri = run.logged_model()
            assert uri is not None
            model = loading.load(uri, columns)
            assert evaluated(model, holdout).value < 1e-6 < champion.value
        with pytest.raises(DataError, match=r"register\.input_cols"):
            loading.load(uri)
        with pytest.raises(DataError, match="the model cannot predict these rows"):
            evaluated(loading.load(uri, ["a"]), holdout)

    def test_a_champion_that_names_no_columns_is_judged_by_its_own(self, run, store, holdout):
        import mlflow
        from mlflow.models import infer_signature

        class Times(mlflow.pyfunc.PythonModel):
            def __init__(self, *factors):
                self.factors = factors

            def predict(self, context, model_input, params=None):
                return np.asarray(model_input) @ np.array(self.factors)

        register = Register(model="tensors", metric="rmse", holdout=holdout)
        attempts.ask(store, Order("job", POOL, "cli:me@here", {"fingerprint": "q"}, {}, None), 0.0)
        attempts.start(store, Key("job", 1), {}, 0.0)

        def entered(times: Times, columns: list[str]) -> Outcome:
            check_holdout(register, "y", columns)
            inputs = frame()[columns].to_numpy()
            signature = infer_signature(inputs, inputs[:, 0])
            uri = mlflow.pyfunc.log_model(
                name="times", python_model=times, signature=signature, pip_requirements=[]
            ).model_uri
            return gate.enter(
                attempt_of(store),
                run,
                register,
                model_uri=uri,
                model=loading.load(uri, columns),
                label_col="y",
                input_cols=columns,
            )

        assert entered(Times(3, 1), ["a", "b"]).challenger.value < 1e-6
        other = entered(Times(1), ["a"])
        assert other.champion is not None
        assert (other.decision.promote, other.champion.version.number) == (False, "1")
        assert other.champion.value < 1e-6 < other.challenger.value
        with pytest.raises(DataError, match="the holdout lacks columns that the model needs: c"):
            entered(Times(1), ["c"])

        attempts.end(store, Key("job", 1), JobState.CANCELLED, 1.0, error="on request")
        versions = len(run.client.search_model_versions("name='tensors'"))
        with pytest.raises(JobError, match='attempt 1 of job "job" is not registered, because the attempt has ended'):
            entered(Times(3, 1), ["a", "b"])
        assert len(run.client.search_model_versions("name='tensors'")) == versions

    def test_a_champion_that_is_gone_is_said(self, run):
        with pytest.raises(JobError, match="the model models:/nothing/1 cannot be loaded"):
            loading.load("models:/nothing/1")


class TestScore:
    def test_a_model_takes_its_own_columns(self, holdout):
        model = booster(20, ["b", "a"])

        assert evaluated(model, holdout).value < 0.2

    def test_a_column_that_the_holdout_lacks(self, holdout):
        with pytest.raises(DataError, match="lacks columns that the model needs: target"):
            evaluated(booster(1), holdout, label_col="target")

    def test_a_null_label(self, tmp_path):
        labels = [1.0] * 6 + [None] + [1.0] * 3
        frame(10).assign(y=labels, n=range(10)).to_parquet(tmp_path / "null.parquet", row_group_size=4)
        holdout = DataConnector.from_parquet(tmp_path / "null.parquet", filters=[("n", ">", 1)])

        with pytest.raises(DataError, match=r'row group 1: the label "y" of the holdout is null in 1 of 4 rows'):
            evaluated(booster(1), holdout)


CREATE = """
import os, signal, time
import mlflow.store.model_registry.sqlalchemy_store, mlflow.store.tracking.sqlalchemy_store
from shoal.jobs.files.storage import default_uri
from shoal.jobs import mlflow_run

def fork(call):
    if pid := os.fork():
        return pid
    try:
        call()
        os._exit(0)
    finally:
        os._exit(1)

uri = default_uri()
database = uri.removeprefix("sqlite:///")
killed = fork(mlflow_run.create_default_database)
while not os.path.exists(f"{database}.new"):
    time.sleep(0.01)
os.kill(killed, signal.SIGKILL)
assert os.waitpid(killed, 0)[1] == signal.SIGKILL
assert not os.path.exists(database)
calls = [mlflow_run.create_default_database, lambda: mlflow_run.connect(uri), mlflow_run.create_default_database]
assert [os.waitpid(pid, 0)[1] for pid in map(fork, calls)] == [0, 0, 0]
mlflow_run.create_default_database()
assert not os.path.exists(f"{database}.new")
assert [each.name for each in mlflow_run.connect(uri).search_experiments()] == ["Default"]
"""


@pytest.mark.processes
def test_default_database_is_created_once_by_several_processes_after_one_was_killed(fresh_home: Path) -> None:
    subprocess.run([sys.executable, "-c", CREATE], check=True, timeout=120)


def test_artifacts_lie_beside_a_database_that_is_a_file(fresh_home: Path) -> None:
    """On a pod, `$SHOAL_HOME` is lost with the pod, and the database is in a folder that all share."""
    assert mlflow_run.artifacts_of(default_uri()) == f"file://{fresh_home}/mlflow/artifacts"
    assert mlflow_run.artifacts_of("sqlite:////shared/runs.db?timeout=9") == "file:///shared/artifacts"
    assert mlflow_run.artifacts_of("postgresql://db/mlflow") == f"file://{fresh_home}/mlflow/artifacts"
    assert mlflow_run.artifacts_of("http://mlflow:5000") is None
