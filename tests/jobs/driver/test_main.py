"""The driver with everything real but the gang: the engine is replaced by plain XGBoost in this process."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sqlalchemy as sa
from werkzeug.serving import make_server

from shoal.data import DataConnector, staged_data
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.numpy_columns import encoded, find_categories, to_matrix
from shoal.data.staged_data import staged as staged_in
from shoal.errors import (
    CapacityError,
    CapacityTimeoutError,
    JobError,
    StoreError,
    StoreUnreachableError,
    TrainingError,
    UnusableGpuError,
)
from shoal.jobs import JobResult, JobSpec, Register, Tracking, credentials, load_training
from shoal.jobs.credentials import Secrets
from shoal.jobs.driver import heartbeats
from shoal.jobs.driver import main as driver
from shoal.jobs.driver.attempt_context import AttemptContext
from shoal.jobs.files import artifacts, staged_rows, storage
from shoal.jobs.files import staged_rows as jobs_staging
from shoal.jobs.files.logs import LogFollower, log_path
from shoal.jobs.files.retention import discard_leftovers
from shoal.jobs.journal import attempts, job_queue
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.journal.job_queue import Admission
from shoal.jobs.mlflow_run import Run
from shoal.jobs.status import JobStatus
from shoal.jobs.timeouts import MLFLOW_RETRIES
from shoal.kinds.training import driver as training
from shoal.models import holdout, loading, promote_model
from shoal.models.holdout import Holdout
from shoal.state import Store
from shoal.state.schema import Job, JobState
from shoal.training.boosting.messages import by_round
from shoal.training.boosting.request import TrainRequest, TrainResult, WorkerStats
from shoal.training.demand import GangClaim, XGBScalingConfig
from shoal.training.reporting import MetricSink, OnProgress, Progress
from shoal.training.run_config import RunConfig
from tests.support.job_store import POOL, add_node
from tests.support.postgres import PASSWORD
from tests.support.s3_server import s3_server
from tests.support.waiting import wait_until

KEY = Key("job", 1)


def plain_lightgbm(request: TrainRequest, **_: object) -> TrainResult:
    import lightgbm

    data = DataConnector.from_spec(request.dataset).to_pandas()
    rows = lightgbm.Dataset(data[list(request.input_cols)], data[request.label_col])
    model = lightgbm.train({"verbosity": -1, **request.params}, rows, request.n_estimators)
    return TrainResult(
        framework="lightgbm",
        model=model.model_to_string().encode(),
        eval_results={},
        rounds=request.n_estimators,
        rows=len(data),
        num_workers=1,
        threads_per_worker=1,
        seconds=0.5,
        workers=(),
    )


def plain_xgboost(request: TrainRequest, metrics: MetricSink | None = None, **_: object) -> TrainResult:
    import xgboost

    data = DataConnector.from_spec(request.dataset).to_pandas()
    matrix = xgboost.DMatrix(data[list(request.input_cols)], data[request.label_col])
    evals: dict[str, dict[str, list[float]]] = {}
    model = xgboost.train(request.params, matrix, request.n_estimators, evals=[(matrix, "eval")], evals_result=evals)
    for step, values in enumerate(by_round(evals)):
        if metrics:
            metrics.log(0, values, step)
    stats = WorkerStats(
        rank=0,
        node="n",
        rows=len(data),
        passes=1,
        read_seconds=0,
        quantise_seconds=0,
        train_seconds=0,
        idle_rss_bytes=5,
        peak_rss_bytes=7,
    )
    return TrainResult(
        model=bytes(model.save_raw("ubj")),
        eval_results=evals,
        rounds=request.n_estimators,
        rows=len(data),
        num_workers=1,
        threads_per_worker=1,
        seconds=0.5,
        workers=(stats,),
    )


def with_categories(request: TrainRequest, **_: object) -> TrainResult:
    import lightgbm
    import xgboost

    from shoal.training.lightgbm import library as of_lightgbm
    from shoal.training.xgboost import library as of_xgboost
    from shoal.training.xgboost import params as xgboost_params

    connector = DataConnector.from_spec(request.dataset)
    known = find_categories(connector.source, request.categorical_cols)
    table = connector.to_arrow()
    features, label = to_matrix(encoded(table, known), request.input_cols), table[request.label_col].to_numpy()
    names, rounds = list(request.input_cols), request.n_estimators
    if request.framework == "xgboost":
        types = xgboost_params.feature_types(names, known)
        matrix = xgboost.DMatrix(features, label, feature_names=names, feature_types=types)
        booster = xgboost.train({}, matrix, rounds)
        of_xgboost.note(booster, known)
        model = bytes(booster.save_raw("ubj"))
    else:
        rows = lightgbm.Dataset(features, label, feature_name=names, categorical_feature=list(known)).construct()
        of_lightgbm.note(rows, known)
        model = lightgbm.train({"verbosity": -1}, rows, rounds).model_to_string().encode()
    return TrainResult(
        framework=request.framework,
        model=model,
        eval_results={},
        rounds=rounds,
        rows=len(label),
        num_workers=1,
        threads_per_worker=1,
        seconds=0.5,
        workers=(),
    )


@pytest.fixture
def spec(tmp_path: Path, mlflow_uri: str) -> JobSpec:
    random = np.random.default_rng(0)
    data = pd.DataFrame({"a": random.random(50), "b": random.random(50)})
    data.assign(y=data["a"]).to_parquet(tmp_path / "train.parquet")
    train = DataConnector.from_parquet(tmp_path / "train.parquet")
    return JobSpec(
        dataset=train, input_cols=("a", "b"), label_col="y", n_estimators=3, tracking=Tracking(uri=mlflow_uri)
    )


@pytest.fixture
def environment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signal handlers and variables are the test process's own: put back what a driver changes."""
    monkeypatch.setattr(driver, "connect", lambda gcs, runtime_env: None)
    # A driver that does not end in this time after SIGTERM ends itself, which here would end pytest without a word.
    monkeypatch.setattr(heartbeats, "SIGTERM_GRACE_S", 60.0)
    monkeypatch.setattr("shoal.training.boosting.engine.train", plain_xgboost)
    monkeypatch.setattr(sys, "argv", ["driver", KEY.job_id, str(KEY.attempt)])
    before = signal.getsignal(signal.SIGTERM)
    variables = dict(os.environ)
    yield
    signal.signal(signal.SIGTERM, before)
    os.environ.clear()
    os.environ.update(variables)


def drive(store: Store, spec: JobSpec, secrets: Secrets | None = None, key: Key = KEY) -> tuple[int, Job]:
    sys.argv[1:] = [key.job_id, str(key.attempt)]
    document, uris = credentials.hide(spec.model_copy(update={"fingerprint": spec.fingerprint or "q"}).document())
    attempts.ask(store, Order(key.job_id, "retrain", "cli:me@here", document, {"gcs": "g"}, None), 0.0)
    credentials.hand_over(key.submission_id, Secrets((secrets or Secrets()).environment, uris))
    code = driver.main()
    return code, attempts.load(store, key)


def staged(spec: JobSpec) -> tuple[JobSpec, Path]:
    """The spec with its rows staged by a process that has submitted the job and dropped its connector."""
    connector = DataConnector.from_dataframe(DataConnector.from_spec(spec.dataset).to_pandas())
    location = str(connector.staging)
    staged_data.claim(location, KEY.submission_id)
    dataset = DatasetSpec.model_validate(connector.to_spec().model_dump())
    return spec.model_copy(update={"dataset": dataset}), Path(location)


@contextmanager
def serving(application: Any, port: int = 0) -> Iterator[str]:
    """A web server in a thread, and its address."""
    server = make_server("127.0.0.1", port, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def log(key: Key = KEY) -> str:
    return log_path(key).read_text()


@pytest.mark.usefixtures("environment")
class TestDriver:
    def test_from_spec_to_result(self, store, spec, tmp_path):
        import mlflow

        spec = spec.model_copy(
            update={
                "register_as": Register(model="driven", metric="rmse", holdout=spec.dataset, overlap="flag"),
                "run_config": RunConfig(artifact_location=str(tmp_path / "models")),
            }
        )

        code, job = drive(store, spec)

        assert (code, job.state, job.error) == (0, JobState.SUCCEEDED, None), log()
        result = JobResult.model_validate(job.result)
        assert result.model_path == f"{tmp_path}/models/job/1/model.ubj"
        assert (result.rows, result.promoted, result.model_version, result.champion) == (50, True, "1", None)
        assert result.metrics.keys() == {"eval-rmse", "holdout-rmse"}
        assert result.metrics["eval-rmse"] == pytest.approx(result.metrics["holdout-rmse"], rel=1e-5)
        assert result.peak_memory_per_worker == (7,)
        assert result.mlflow_run_id == job.mlflow_run_id
        run = mlflow.MlflowClient(spec.tracking.uri).get_run(result.mlflow_run_id)
        assert run.info.status == "FINISHED"
        assert run.data.tags["shoal.holder"] == "cli:me@here"
        assert result.times is not None
        steps = result.times.measured()
        assert steps.keys() == {"queue", "start", "read", "train", "score", "upload"}
        assert {name: run.data.metrics[f"seconds/{name}"] for name in steps} == steps
        assert f"seconds: {result.times}" in log()
        assert run.data.params["n_estimators"] == "3"
        assert job.driver is not None
        assert job.driver["pid"] == os.getpid()
        assert "is the first champion" in log()
        assert result.decision is not None
        assert result.decision.reason == "first"
        assert result.decision.sentence in log()
        assert "although it was trained on 50 rows of the holdout" in log()
        trained = load_training(result)
        assert trained.eval_results["eval"]["rmse"][-1] == result.metrics["eval-rmse"]
        assert trained.booster().num_boosted_rounds() == 3
        Path(result.model_path).write_bytes(trained.model + b" ")
        with pytest.raises(JobError, match=r"model\.ubj was changed after job job wrote it"):
            load_training(result)

    @pytest.mark.parametrize("ends", ["well", "badly"])
    def test_the_next_job_starts_as_soon_as_the_training_is_over(self, store, spec, head, monkeypatch, ends):
        """While the driver still saves and logs the model."""
        monkeypatch.setattr("shoal.jobs.reconcile.look.pool_endpoint", lambda *_, **__: head.endpoint)
        add_node(store, cpus=1)
        save, sent_when_saved = artifacts.save, []

        def train_while_others_wait(request: TrainRequest, **_: object) -> TrainResult:
            for now, name in enumerate(("next", "later")):
                order = Order(name, POOL, "airflow:d/r", {"fingerprint": "q"}, {}, None, 0, GangClaim(1, 1).to_json())
                attempts.ask(store, order, now)
                assert job_queue.admit(store, Key(name, 1), now, {}) is Admission.WAITS
            if ends == "badly":
                raise TrainingError("on purpose")
            return plain_xgboost(request)

        def noted_save(*arguments: Any) -> str:
            sent_when_saved.extend(head.jobs)
            return save(*arguments)

        monkeypatch.setattr("shoal.training.boosting.engine.train", train_while_others_wait)
        monkeypatch.setattr(artifacts, "save", noted_save)

        code, _ = drive(store, spec.model_copy(update={"tracking": None}))

        assert (code, sent_when_saved) == ((0, ["next-1"]) if ends == "well" else (1, [])), log()
        assert list(head.jobs) == ["next-1"]

    def test_the_next_job_starts_before_the_end_of_the_mlflow_run_is_tried(self, store, spec, head, monkeypatch):
        """A driver may try for minutes if MLflow is away."""
        import mlflow

        monkeypatch.setattr("shoal.jobs.reconcile.look.pool_endpoint", lambda *_, **__: head.endpoint)
        add_node(store, cpus=1)
        started_before_the_end: list[str] = []

        def fail_while_another_waits(request: TrainRequest, **_: object) -> TrainResult:
            order = Order("next", POOL, "airflow:d/r", {"fingerprint": "q"}, {}, None, 0, GangClaim(1, 1).to_json())
            attempts.ask(store, order, 0.0)
            assert job_queue.admit(store, Key("next", 1), 0.0, {}) is Admission.WAITS
            raise TrainingError("on purpose")

        def unanswered(*_: object) -> None:
            started_before_the_end.extend(head.jobs)
            raise ConnectionError("MLflow is away")

        monkeypatch.setattr("shoal.training.boosting.engine.train", fail_while_another_waits)
        monkeypatch.setattr(Run, "log_values", unanswered)
        monkeypatch.setattr(Run, "finish", unanswered)

        try:
            assert drive(store, spec)[0] == 1
        finally:
            mlflow.end_run()

        assert started_before_the_end == ["next-1"] * 2, log()

    def test_lightgbm_from_spec_to_result(self, store, spec, tmp_path, monkeypatch):
        monkeypatch.setattr("shoal.training.boosting.engine.train", plain_lightgbm)
        register = Register(model="driven-lightgbm", metric="rmse", holdout=spec.dataset, overlap="flag")
        run_config = RunConfig(artifact_location=str(tmp_path / "models"))
        changes = {"framework": "lightgbm", "register_as": register, "run_config": run_config}

        code, job = drive(store, spec.model_copy(update=changes))

        assert (code, job.state, job.error) == (0, JobState.SUCCEEDED, None), log()
        result = JobResult.model_validate(job.result)
        assert result.model_path == f"{tmp_path}/models/job/1/model.txt"
        assert result.promoted
        assert load_training(result).booster().num_trees() == 3

    @pytest.mark.parametrize("framework", ["xgboost", "lightgbm"])
    def test_a_version_that_waits_is_promoted_from_its_job(self, store, spec, monkeypatch, framework):
        plain = plain_xgboost if framework == "xgboost" else plain_lightgbm
        monkeypatch.setattr("shoal.training.boosting.engine.train", plain)
        model = f"waits-{framework}"
        register = Register(model=model, metric="rmse", holdout=spec.dataset, overlap="flag", promote=False)

        code, job = drive(store, spec.model_copy(update={"framework": framework, "register_as": register}))

        assert (code, job.state, job.error) == (0, JobState.SUCCEEDED, None), log()
        result = JobResult.model_validate(job.result)
        assert (result.model_name, result.model_version, result.promoted) == (model, "1", None)
        assert result.decision.reason == "waiting" and result.decision.sentence in log()
        promoted = promote_model(training="job", on_log=lambda _: None)
        assert (promoted.promoted, promoted.decision.reason) == (True, "first")
        assert promoted.metrics["holdout-rmse"] == result.metrics["holdout-rmse"]

    def test_mlflow_that_goes_away_after_the_training_ends_the_job_soon_and_the_model_is_named(
        self, store, spec, tmp_path, monkeypatch, mlflow_uri
    ):
        """The server is MLflow's own. From the registration on, it answers as a proxy without a server does."""
        from mlflow.server import app, handlers
        from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as RegistryStore
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        asked: list[str] = []

        def server(environ: dict[str, Any], start: Any) -> Any:
            asked.append(environ["PATH_INFO"].rpartition("mlflow/")[2])
            if "registered-models/create" in asked:
                start("503 Service Unavailable", [])
                return [b""]
            return app(environ, start)

        # The server's stores are given, because it would make its database the one of this whole process.
        monkeypatch.setattr(handlers, "_tracking_store", SqlAlchemyStore(mlflow_uri, str(tmp_path / "artifacts")))
        monkeypatch.setattr(handlers, "_model_registry_store", RegistryStore(mlflow_uri))
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
        with serving(server) as uri:
            register = Register(model="away", metric="rmse", holdout=spec.dataset, overlap="flag")
            changes = {"tracking": Tracking(uri=uri), "register_as": register}
            code, job = drive(store, spec.model_copy(update=changes))

        assert (code, job.state, job.error_is_permanent) == (1, JobState.FAILED, False), log()
        saved = f"{artifacts.folder(KEY, None)}/model.ubj"
        assert f"its model is saved in {saved}, but MLflow cannot be reached: MlflowException: " in job.error
        assert job.error.endswith("run the job again, or load the model from that file")
        assert Path(saved).stat().st_size
        assert asked.count("registered-models/create") == 1 + MLFLOW_RETRIES

    @pytest.mark.parametrize("framework", ["xgboost", "lightgbm"])
    def test_categories_are_logged_registered_and_scored(self, store, spec, tmp_path, monkeypatch, framework):
        import mlflow

        monkeypatch.setattr("shoal.training.boosting.engine.train", with_categories)
        random = np.random.default_rng(0)
        carrier, day = random.choice(["é", "b", "a", "d"], 400), random.integers(1, 8, 400)
        data = pd.DataFrame({"carrier": carrier, "day": pd.array(day, "Int64"), "x": random.random(400)})
        data["y"] = 4.0 * (data["carrier"] == "b") + (day % 2) + data["x"]
        data.loc[:20, ["carrier", "day"]] = None
        in_pandas_own_way = data.assign(carrier=data["carrier"].astype("category"))
        in_pandas_own_way.to_parquet(tmp_path / "train.parquet", row_group_size=150)
        data.assign(carrier=data["carrier"].replace("d", "unseen")).to_parquet(tmp_path / "holdout.parquet")
        held_out = DataConnector.from_parquet(tmp_path / "holdout.parquet")
        name = f"categories-{framework}"
        changes = {
            "framework": framework,
            "input_cols": ("carrier", "day", "x"),
            "categorical_cols": ("carrier", "day"),
            "n_estimators": 50,
            "register_as": Register(model=name, metric="rmse", holdout=held_out),
            "run_config": RunConfig(artifact_location=str(tmp_path / "models")),
        }

        code, job = drive(store, spec.model_copy(update=changes))

        assert (code, job.state, job.error) == (0, JobState.SUCCEEDED, None), log()
        result = JobResult.model_validate(job.result)
        assert result.metrics["holdout-rmse"] < 1
        again = holdout.evaluate(loading.load(f"models:/{name}/1"), Holdout.read(changes["register_as"], "y"), ["rmse"])
        assert again.value == result.metrics["holdout-rmse"]
        params = mlflow.MlflowClient(spec.tracking.uri).get_run(result.mlflow_run_id).data.params
        assert params["categorical_cols"] == "carrier, day"

    def test_without_mlflow_it_runs_untracked(self, store, spec, monkeypatch):
        monkeypatch.setattr("shoal.jobs.mlflow_run.available", lambda: False)

        code, job = drive(store, spec.model_copy(update={"tracking": Tracking()}))

        assert code == 0, log()
        result = JobResult.model_validate(job.result)
        assert (result.mlflow_run_id, result.model_uri) == (None, result.model_path)
        assert "the job records nothing in MLflow" in log()

    def test_credentials_that_expired_in_the_queue_are_named(self, store, spec, monkeypatch):
        def refuse(*_: object, **__: object) -> None:
            raise OSError("When reading from bucket b: AWS Error ACCESS_DENIED: ExpiredToken")

        monkeypatch.setattr("shoal.training.boosting.engine.train", refuse)
        admit = attempts.start

        def after_two_hours(*given: object) -> Job | None:
            job = admit(*given)
            assert job is not None
            job.queued_at, job.admitted_at = 1_000.0, 8_200.0
            return job

        monkeypatch.setattr(attempts, "start", after_two_hours)

        code, job = drive(store, spec, Secrets({"AWS_SESSION_TOKEN": "a-session-token"}))

        assert (code, job.state) == (1, JobState.FAILED)
        assert (
            "ExpiredToken. The job waited 120 minutes in the queue, and the credentials from its submission"
            in job.error
        )

    def test_without_mlflow_nothing_can_be_registered(self, store, spec, monkeypatch):
        monkeypatch.setattr("shoal.jobs.mlflow_run.available", lambda: False)
        spec = spec.model_copy(
            update={"register_as": Register(model="m", metric="rmse", holdout=spec.dataset, overlap="flag")}
        )

        code, job = drive(store, spec)

        assert (code, job.state) == (1, JobState.FAILED)
        assert 'pip install "shoal[mlflow]"' in str(job.error)

    def test_a_library_that_is_missing_is_named_with_its_extra(self, store, spec, monkeypatch):
        monkeypatch.setitem(sys.modules, "lightgbm", None)

        code, job = drive(store, spec.model_copy(update={"framework": "lightgbm"}))

        assert (code, job.state, job.error_is_permanent) == (1, JobState.FAILED, True)
        assert 'pip install "shoal[lightgbm]"' in str(job.error)

    def test_a_holdout_with_training_rows_is_refused_before_training(self, store, spec, monkeypatch):
        trained: list[object] = []
        monkeypatch.setattr("shoal.training.boosting.engine.train", trained.append)
        spec = spec.model_copy(update={"register_as": Register(model="m", metric="rmse", holdout=spec.dataset)})

        code, job = drive(store, spec)

        assert (code, job.state, trained) == (1, JobState.FAILED, [])
        assert f"50 rows of {spec.dataset.paths[0]}. Name a holdout without these rows" in str(job.error)
        assert job.error_is_permanent is True

    @pytest.mark.parametrize(
        ("columns", "said"),
        [
            ({}, "the holdout lacks columns that the model needs: m"),
            ({"m": None}, 'the base_margin "m" is null in 9 of 9 rows'),
            ({"m": 1.0, "a": "text"}, 'column "a" is of type'),
            # The name is wrong in the spec: the holdout is not to blame.
            ({"input_cols": ("a", "b", "t")}, "if the column is a feature, add it to categorical_cols"),
            ({"group_col": "z", "params": {"objective": "rank:ndcg"}}, '/train/1.parquet has no column "z"'),
            ({"label_col": "z"}, '/train/1.parquet has no column "z"; its columns are a, b, y, m, t'),
        ],
    )
    def test_a_holdout_that_the_model_could_not_predict_is_refused_before_training(
        self, store, spec, tmp_path, monkeypatch, columns, said
    ):
        trained: list[object] = []
        monkeypatch.setattr("shoal.training.boosting.engine.train", trained.append)
        wrong = {name: value for name, value in columns.items() if name in JobSpec.model_fields}
        columns = {name: value for name, value in columns.items() if name not in wrong}
        rows = pd.DataFrame({"a": 0.0, "b": 1.0, "y": np.arange(9.0)})
        (tmp_path / "train").mkdir()
        rows.assign(a=0.5, m=1.0, t="text").to_parquet(tmp_path / "train" / "1.parquet")
        rows.assign(**columns).to_parquet(tmp_path / "holdout.parquet")
        register = Register(model="m", metric="rmse", holdout=DataConnector.from_parquet(tmp_path / "holdout.parquet"))
        dataset = DataConnector.from_parquet(tmp_path / "train").to_spec()
        update = {"dataset": dataset, "base_margin_col": "m", "register_as": register, **wrong}

        code, job = drive(store, spec.model_copy(update=update))

        assert (code, trained) == (1, [])
        assert said in str(job.error)

    def test_a_failure_is_the_last_word_of_the_log_and_the_rows_error(self, store, spec, monkeypatch):
        import mlflow

        def fail(*_: object, **__: object) -> None:
            raise TrainingError("rank 1: out of memory")

        monkeypatch.setattr("shoal.training.boosting.engine.train", fail)

        code, job = drive(store, spec)

        assert (code, job.state, job.error) == (1, JobState.FAILED, "rank 1: out of memory")
        assert job.error_is_permanent is False
        assert log().rstrip().endswith("failed: rank 1: out of memory")
        assert mlflow.MlflowClient(spec.tracking.uri).get_run(job.mlflow_run_id).info.status == "FAILED"

    @pytest.mark.parametrize(("workers", "active", "permanent"), [(4, 1, False), (5, 1, True), (4, 0, False)])
    def test_too_few_nodes_are_a_permanent_error_only_if_the_pool_can_never_have_enough(
        self, store, spec, workers, active, permanent
    ):
        """The pool has at most four nodes with one CPU. One of them may have been lost a moment ago."""
        spec = spec.model_copy(update={"scaling_config": XGBScalingConfig(num_workers=workers)})
        attempt = driver.Driver(store, Job(id="job", attempt=1, pool=POOL, created_at=0.0), spec, Secrets())
        for _ in range(active):
            add_node(store, cpus=1)
        errors = [CapacityError("no room"), CapacityTimeoutError("no room in time"), UnusableGpuError("no CUDA")]
        assert [attempt._is_permanent(error) for error in errors] == [permanent, False, True]

    def test_no_secret_is_in_its_log_or_its_error(self, store, spec, monkeypatch):
        password = "hunter22"

        def fail(request: TrainRequest, *, env: dict[str, str], **_: object) -> None:
            assert env["MLFLOW_TRACKING_PASSWORD"] == password == os.environ["MLFLOW_TRACKING_PASSWORD"]
            print(f"trying {password}")
            raise ValueError(f"{password} was refused" + "x" * 30_000)

        monkeypatch.setattr("shoal.training.boosting.engine.train", fail)

        code, job = drive(store, spec, Secrets({"MLFLOW_TRACKING_PASSWORD": password}))

        assert code == 1
        assert job.error.startswith("ValueError: *** was refusedx")
        assert "characters left out" in job.error and len(job.error) < 20_100
        assert "trying ***" in log()
        assert password not in log()

    def test_a_variable_of_the_spec_wins_over_the_submitters(self, store, spec, monkeypatch):
        seen = []

        def train(request: TrainRequest, *, env: dict[str, str], **_: object) -> TrainResult:
            seen.extend((env["AWS_REGION"], env["AWS_PROFILE"]))
            return plain_xgboost(request)

        monkeypatch.setattr("shoal.training.boosting.engine.train", train)
        config = RunConfig(env={"AWS_REGION": "eu-central-1"})
        secrets = Secrets({"AWS_REGION": "us-east-1", "AWS_PROFILE": "mine"})

        drive(store, spec.model_copy(update={"run_config": config, "tracking": None}), secrets)

        assert seen == ["eu-central-1", "mine"]

    @pytest.mark.parametrize("compiled", [False, True], ids=["in Python", "in compiled code of Ray"])
    def test_sigterm_cancels(self, store, spec, monkeypatch, compiled):
        import mlflow

        def stopped(*_: object, **__: object) -> None:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait(60)
            except BaseException as ended:
                if compiled:  # seen in ray.get
                    raise SystemError("returned a result with an exception set") from ended
                raise

        monkeypatch.setattr("shoal.training.boosting.engine.train", stopped)

        code, job = drive(store, spec)

        assert (code, job.state) == (1, JobState.CANCELLED)
        assert "stopped by SIGTERM, but the job was not cancelled with shoal" in str(job.error)
        assert mlflow.MlflowClient(spec.tracking.uri).get_run(job.mlflow_run_id).info.status == "KILLED"

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
    def test_an_exception_that_ends_processes_fails_the_job(self, store, spec, monkeypatch, error):
        def ends(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("shoal.training.boosting.engine.train", ends)

        code, job = drive(store, spec)

        assert (code, job.state) == (1, JobState.FAILED)
        assert str(job.error).startswith(f"{type(error).__name__}: {error}, raised in the driver")

    def test_the_log_of_a_failed_training_has_the_traceback_of_each_rank(self, store, spec, monkeypatch):
        def fails(*_: object, **__: object) -> None:
            error = TrainingError("rank 1 failed: ZeroDivisionError: on purpose")
            error.add_note("In rank 1 (node n, pid 7):\nTraceback ...\nZeroDivisionError: on purpose")
            error.add_note("In rank 0 (node n, pid 6):\nTraceback ...\nValueError: too")
            raise error

        monkeypatch.setattr("shoal.training.boosting.engine.train", fails)

        code, job = drive(store, spec)

        assert (code, job.error) == (1, "rank 1 failed: ZeroDivisionError: on purpose")
        found = LogFollower(KEY, log).tracebacks()
        assert [note.splitlines()[-1] for note in found] == ["ZeroDivisionError: on purpose", "ValueError: too"]

    def test_its_row_ends_it(self, store, spec, monkeypatch):
        monkeypatch.setattr(heartbeats, "ROW_CHECK_S", 0.01)

        def cancelled(*_: object, **__: object) -> None:
            attempts.end(Store(), KEY, JobState.CANCELLED, 1.0, error="on request")
            threading.Event().wait(60)

        monkeypatch.setattr("shoal.training.boosting.engine.train", cancelled)

        code, job = drive(store, spec)

        assert (code, job.state, job.error) == (1, JobState.CANCELLED, "on request")
        assert log().rstrip().endswith("cancelled: on request")

    @pytest.mark.parametrize("error", [None, TrainingError("rank 0 failed")])
    def test_progress_is_in_the_row_while_it_trains_and_after_its_end(self, store, spec, monkeypatch, error):
        monkeypatch.setattr(heartbeats, "ROW_CHECK_S", 0.01)
        monkeypatch.setattr(heartbeats, "HEARTBEAT_S", 0.01)
        seen = []

        def training(request: TrainRequest, *, on_progress: OnProgress, **_: object) -> TrainResult:
            on_progress(Progress(1, 3, "rounds", {"eval-rmse": 2.5}))
            wait_until(lambda: attempts.load(Store(), KEY).progress, "the first record")
            seen.append(JobStatus.of(attempts.load(Store(), KEY)).progress)
            monkeypatch.setattr(heartbeats, "HEARTBEAT_S", 60.0)
            on_progress(Progress(3, 3, "rounds", {"eval-rmse": 1.5, "eval-inf": math.inf}))
            if error is not None:
                raise error
            return plain_xgboost(request)

        monkeypatch.setattr("shoal.training.boosting.engine.train", training)

        _, job = drive(store, spec.model_copy(update={"tracking": None}))

        assert seen == [Progress(1, 3, "rounds", {"eval-rmse": 2.5})]
        assert job.state is (JobState.SUCCEEDED if error is None else JobState.FAILED)
        assert JobStatus.of(job).progress == Progress(3, 3, "rounds", {"eval-rmse": 1.5, "eval-inf": math.inf})

    def test_what_is_not_wanted_any_more_is_not_begun(self, store, spec):
        assert drive(store, spec)[0] == 0
        first = log()

        assert driver.main() == 0
        assert log().removeprefix(first).startswith("nothing to do: attempt 1 of job job has ended")

    def test_staged_data_go_with_the_job(self, store, spec):
        spec, folder = staged(spec)
        assert folder.exists()

        drive(store, spec)

        assert not folder.exists()

    def test_staged_data_stay_after_the_job_while_the_connector_is_there(self, store, spec):
        connector = DataConnector.from_dataframe(DataConnector.from_spec(spec.dataset).to_pandas())
        staged_data.claim(str(connector.staging), KEY.submission_id)

        drive(store, spec.model_copy(update={"dataset": connector.to_spec()}))

        assert staged_data.claims(str(connector.staging)) == set()
        assert connector.num_rows() == 50

    def test_a_file_of_credentials_that_came_too_late_goes_with_the_job(self, store, spec, monkeypatch):
        def train(request: TrainRequest, **more: object) -> TrainResult:
            credentials.hand_over(KEY.submission_id, Secrets({"AWS_SECRET_ACCESS_KEY": "of another sender"}))
            return plain_xgboost(request, **more)

        monkeypatch.setattr("shoal.training.boosting.engine.train", train)

        drive(store, spec)

        assert credentials.take(KEY.submission_id) == Secrets()

    def test_the_run_of_a_killed_driver_is_ended_by_the_next_attempt(self, store, spec, monkeypatch):
        import mlflow

        client = mlflow.MlflowClient(spec.tracking.uri)
        killed = client.create_run(client.create_experiment("of a killed driver")).info.run_id
        document, _ = credentials.hide(spec.model_copy(update={"fingerprint": "q"}).document())
        attempts.ask(store, Order("job", "retrain", "cli:me@here", document, {"gcs": "g"}, None), 0.0)
        attempts.start(store, KEY, {}, 1.0)
        attempts.note_run(store, KEY, killed)
        attempts.end(store, KEY, JobState.FAILED, 2.0, error="its driver was killed")

        code, _ = drive(store, spec, key=Key("job", 2))

        assert code == 0, log(Key("job", 2))
        assert client.get_run(killed).info.status == "FAILED"


@pytest.mark.usefixtures("environment")
class TestResultComesFirst:
    """Nothing that is done after the result is stored can take it away."""

    def test_a_staging_folder_that_cannot_be_removed(self, store, spec, monkeypatch):
        spec, folder = staged(spec)
        work: list[set[str]] = []

        def train(request: TrainRequest, **more: object) -> TrainResult:
            trained = plain_xgboost(request, **more)
            work.append(storage.left())
            (folder / staged_data.MARKER).unlink()
            return trained

        monkeypatch.setattr("shoal.training.boosting.engine.train", train)

        code, job = drive(store, spec)

        assert (code, job.state, job.error) == (0, JobState.SUCCEEDED, None), log()
        assert "was not staged by shoal" in log()
        assert folder.exists()
        assert (work, storage.left()) == ([{KEY.submission_id}], set())

    def test_an_mlflow_run_that_cannot_be_finished(self, store, spec, monkeypatch):
        import mlflow

        work = training.train_and_publish

        def then_deleted(spec: JobSpec, place: AttemptContext) -> JobResult:
            result = work(spec, place)
            mlflow.MlflowClient(spec.tracking.uri).delete_run(result.mlflow_run_id)
            return result

        monkeypatch.setattr(training, "train_and_publish", then_deleted)

        code, job = drive(store, spec)

        assert (code, job.state, job.error) == (0, JobState.SUCCEEDED, None), log()
        assert "the MLflow run could not be marked FINISHED" in log()

    def test_a_signal_between_result_and_clean_up(self, store, spec, monkeypatch):
        import mlflow

        spec, folder = staged(spec)
        give_up = jobs_staging.give_up
        states = []

        def interrupted(key: Key, locations: set[str]) -> None:
            states.append(attempts.load(store, KEY).state)
            os.kill(os.getpid(), signal.SIGTERM)
            give_up(key, locations)

        monkeypatch.setattr(jobs_staging, "give_up", interrupted)

        code, job = drive(store, spec)

        assert states == [JobState.SUCCEEDED]
        assert (code, job.state, job.error) == (0, JobState.SUCCEEDED, None), log()
        assert not folder.exists()
        assert mlflow.MlflowClient(spec.tracking.uri).get_run(job.mlflow_run_id).info.status == "FINISHED"

    def test_a_result_that_is_not_wanted_any_more(self, store, spec, monkeypatch):
        import mlflow

        def train(request: TrainRequest, **more: object) -> TrainResult:
            attempts.end(Store(), KEY, JobState.CANCELLED, 1.0, error="on request")
            return plain_xgboost(request, **more)

        monkeypatch.setattr("shoal.training.boosting.engine.train", train)

        code, job = drive(store, spec)

        assert (code, job.state, job.error, job.result) == (1, JobState.CANCELLED, "on request", None)
        assert mlflow.MlflowClient(spec.tracking.uri).get_run(job.mlflow_run_id).info.status == "KILLED"

    def test_a_result_with_nan_whose_commit_was_not_answered(self, store, spec, monkeypatch):
        end = attempts.end

        def train(request: TrainRequest, **more: object) -> TrainResult:
            return plain_xgboost(request, **more).model_copy(update={"eval_results": {"eval": {"auc": [float("nan")]}}})

        def unanswered(*arguments: object, **more: object) -> bool:
            monkeypatch.setattr(attempts, "end", end)
            assert end(*arguments, **more)
            raise StoreUnreachableError("the server closed the connection")

        monkeypatch.setattr("shoal.training.boosting.engine.train", train)
        monkeypatch.setattr("shoal.jobs.journal.steps.STORE_PERIOD", 0.05)
        monkeypatch.setattr(attempts, "end", unanswered)

        code, job = drive(store, spec.model_copy(update={"tracking": None}))

        assert (code, job.state) == (0, JobState.SUCCEEDED), log()
        assert math.isnan(JobResult.model_validate(job.result).metrics["eval-auc"])

    def test_a_run_that_the_row_cannot_take_is_ended(self, store, spec, monkeypatch):
        import mlflow

        def refused(*_: object) -> None:
            raise StoreError("the disk is full")

        monkeypatch.setattr(attempts, "note_run", refused)
        spec = spec.model_copy(update={"tracking": Tracking(uri=spec.tracking.uri, experiment="not noted")})

        code, job = drive(store, spec)

        assert (code, job.state, job.error) == (1, JobState.FAILED, "the disk is full")
        client = mlflow.MlflowClient(spec.tracking.uri)
        [run] = client.search_runs([client.get_experiment_by_name("not noted").experiment_id])
        assert run.info.status == "FAILED"


@pytest.mark.usefixtures("on_postgresql", "environment")  # in this order: the store is opened there
def test_a_result_waits_for_a_store_that_is_away(on_postgresql, store, spec, monkeypatch):
    database = store.url.rpartition("/")[2]

    def train(request: TrainRequest, **more: object) -> TrainResult:
        trained = plain_xgboost(request, **more)
        on_postgresql.run(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
        on_postgresql.run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'")
        return trained

    def back_when_missed() -> None:
        try:
            wait_until(lambda: log_path(KEY).exists() and "trying again" in log(), "the driver's patience", 240)
        finally:
            on_postgresql.run(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")

    monkeypatch.setattr("shoal.training.boosting.engine.train", train)
    administrator = threading.Thread(target=back_when_missed)
    administrator.start()
    try:
        code, job = drive(store, spec.model_copy(update={"tracking": None}))
    finally:
        administrator.join()

    assert (code, job.state, job.error) == (0, JobState.SUCCEEDED, None), log()
    assert JobResult.model_validate(job.result).rows == 50


LEAVES_SOMETHING = """
import atexit, os, sys, threading
from pathlib import Path

atexit.register(Path("inherited").touch)
from shoal.jobs.driver import main

def leave(*attempt, start=main._start):
    main.file = Path("file").open("w")
    main.file.write("rows")
    atexit.register(print, "at exit")
    waits = threading.Event().wait
    threading.Thread(target=lambda: waits(seconds) or print("thread")).start()
    return start(*attempt)

seconds, main._start, main.DRIVER_END_S = float(sys.argv.pop()), leave, 2
os._exit(main.run())
"""


def run_driver(seconds: float, folder: Path) -> list[str]:
    """Run a driver, without an attempt, that leaves a file, an exit handler and a thread, and return its output."""
    command = [sys.executable, "-c", LEAVES_SOMETHING, "job", "1", str(seconds)]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


@pytest.mark.usefixtures("store")
def test_a_driver_ends_as_an_interpreter_ends_within_a_limit(tmp_path: Path) -> None:
    assert run_driver(0.2, tmp_path)[1:] == ["thread", "at exit"]
    assert (tmp_path / "file").read_text() == "rows"
    assert not (tmp_path / "inherited").exists()
    assert run_driver(600, tmp_path)[1:] == ["the threads and exit handlers of the driver did not end within 2 s"]


WINDOW = ("SELECT month, a, b, y FROM flights WHERE month >= :low ORDER BY row", {"low": 4})


@pytest.mark.usefixtures("environment")
class TestWindows:
    @pytest.fixture
    def flights(self, tmp_path) -> pd.DataFrame:
        random = np.random.default_rng(0)
        frame = pd.DataFrame({"month": np.arange(120) // 20 + 1, "a": random.random(120), "b": random.random(120)})
        frame.assign(y=frame["a"]).to_parquet(tmp_path / "flights.parquet", row_group_size=17)
        return frame.assign(y=frame["a"])

    @pytest.fixture
    def window(self, spec, tmp_path, flights) -> JobSpec:
        """A spec with filters."""
        dataset = DataConnector.from_parquet(tmp_path / "flights.parquet", filters=[("month", ">=", 4)]).to_spec()
        run_config = RunConfig(artifact_location=str(tmp_path / "models"))
        return spec.model_copy(update={"dataset": dataset, "run_config": run_config})

    def test_the_rows_stand_in_the_result_and_on_the_version(self, store, window):
        import mlflow

        dataset = window.dataset.model_copy(update={"time_col": "month"})
        before = DataConnector.from_parquet(dataset.paths, filters=[("month", "<", 4)])
        register = Register(model="windowed", metric="rmse", holdout=before)

        code, job = drive(store, window.model_copy(update={"dataset": dataset, "register_as": register}))

        assert code == 0, log()
        data = JobResult.model_validate(job.result).data
        assert data is not None
        assert (data.rows, data.time_from, data.time_to) == (60, "4", "6")
        assert data.digest == DataConnector.from_spec(dataset).digest()
        tags = mlflow.MlflowClient(window.tracking.uri).get_model_version("windowed", "1").tags
        assert (
            tags.items()
            >= {"shoal.data_rows": "60", "shoal.data_digest": data.digest, "shoal.data_time_to": "6"}.items()
        )

    @pytest.mark.parametrize("database", ["sqlite", "postgresql"])
    def test_sql_gives_the_rows_digest_and_model_of_filters(
        self, store, window, flights, tmp_path, database, request, monkeypatch
    ):
        frame = flights.reset_index(names="row")
        if database == "sqlite":
            url = f"sqlite:///{tmp_path}/warehouse.db"
        else:
            url = request.getfixturevalue("postgres").url("postgres")
        engine = sa.create_engine(url)
        frame.to_sql("flights", engine, index=False, if_exists="replace")
        sql, params = WINDOW
        dataset = DatasetSpec(sql=sql, params=params, connection="ware-house")
        secrets = Secrets({"SHOAL_CONNECTION_WARE_HOUSE": url})
        used = DataConnector.from_dataframe(frame[frame["month"] >= 4][["a", "b", "y"]], staging_location=tmp_path)

        changes = {"dataset": dataset, "eval_set": {"same": dataset}}

        code, job = drive(store, window.model_copy(update=changes), secrets)
        with engine.begin() as connection:
            connection.execute(sa.text("DROP TABLE flights"))
        engine.dispose()

        assert code == 0, log()
        result = JobResult.model_validate(job.result)
        assert result.data.digest == used.digest()
        assert result.model_digest == hashlib.sha256(plain_xgboost(window).model).hexdigest()
        assert log().count("copied 60 rows of connection ware-house") == 1
        assert not list((tmp_path / "models" / "staging").iterdir())
        assert "SHOAL_CONNECTION_WARE_HOUSE" not in os.environ
        if database == "postgresql":
            assert PASSWORD not in json.dumps([job.spec, job.result]) + log()

    @pytest.mark.parametrize("form", ["csv", "json", "parquet"])
    def test_copies_of_files_give_the_digest_and_model_of_files_in_place(self, store, window, tmp_path, form):
        dataset = window.dataset.model_copy(update={"stage": True})
        if form != "parquet":
            rows = DataConnector.from_spec(window.dataset.model_copy(update={"filters": None})).to_pandas()
            if form == "csv":
                rows.to_csv(tmp_path / "rows.csv.gz", index=False)
            else:
                # pandas writes at most 15 digits of a number to JSON.
                lines = "".join(f"{json.dumps(row)}\n" for row in rows.to_dict("records"))
                (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
            paths = (str(tmp_path / f"rows.{'csv' if form == 'csv' else 'jsonl'}.gz"),)
            dataset = window.dataset.model_copy(update={"format": form, "paths": paths})

        code, job = drive(store, window.model_copy(update={"dataset": dataset, "eval_set": {"same": dataset}}))

        assert code == 0, log()
        result = JobResult.model_validate(job.result)
        assert result.data.digest == DataConnector.from_spec(window.dataset).digest()
        assert result.model_digest == hashlib.sha256(plain_xgboost(window).model).hexdigest()
        assert log().count(f"rows of {dataset.paths[0]}") == 1
        assert not list((tmp_path / "models" / "staging").iterdir())

    def test_a_copy_serves_all_datasets_of_the_same_files(self, store, window):
        copied = window.dataset.model_copy(update={"stage": True})
        spec = window.model_copy(update={"dataset": copied, "eval_set": {"in_place": window.dataset}})

        found = staged_rows.staged(spec, KEY, Secrets())

        assert len({each.files for each in found.datasets()}) == 1
        assert found.eval_set["in_place"].files != window.dataset.files

    @pytest.mark.parametrize(
        ("times", "registers", "columns"),
        [
            ((None, None), False, [["a", "b", "y"], ["a", "b", "y"]]),
            (("row", None), False, [["row", "a", "b", "y"], ["row", "a", "b", "y"]]),
            (("row", "row"), True, [["row", "a", "b", "y"], ["row", "a", "b", "month", "y"]]),
            (("row", None), True, [["row", "a", "b", "month", "y"]] * 2),
        ],
    )
    def test_only_columns_that_the_job_uses_are_copied(
        self, store, window, tmp_path, flights, times, registers, columns
    ):
        flights.reset_index(names="row")[["row", "a", "b", "month", "y"]].to_sql(
            "flights", sa.create_engine(url := f"sqlite:///{tmp_path}/w.db"), index=False
        )
        first, second = (
            DatasetSpec(sql=f"SELECT * FROM flights WHERE month {part} 4 ORDER BY row", connection="w", time_col=time)
            for part, time in zip(("<", ">="), times, strict=True)
        )
        changes = {"register_as": Register(model="m", metric="rmse", holdout=second)} if registers else {}
        changes |= {"dataset": first, "eval_set": {} if registers else {"second": second}}
        found = staged_rows.staged(window.model_copy(update=changes), KEY, Secrets({"SHOAL_CONNECTION_W": url}))
        assert [DataConnector.from_spec(each).schema().names for each in found.datasets()] == columns

    def test_a_dropped_table_fails_the_job_before_training_and_leaves_nothing(
        self, store, window, tmp_path, monkeypatch
    ):
        sqlite3.connect(tmp_path / "empty.db").close()
        monkeypatch.setattr("shoal.training.boosting.engine.train", lambda *_, **__: pytest.fail("it trains"))
        dataset = DatasetSpec(sql="SELECT * FROM gone", connection="w")

        code, job = drive(
            store,
            window.model_copy(update={"dataset": dataset}),
            Secrets({"SHOAL_CONNECTION_W": f"sqlite:///{tmp_path}/empty.db"}),
        )

        assert (code, job.state) == (1, JobState.FAILED)
        assert "no such table: gone" in job.error
        assert not list((tmp_path / "models" / "staging").iterdir())

    @pytest.mark.server
    def test_refused_credentials_of_a_storage_fail_the_job_before_training(self, store, window, monkeypatch, tmp_path):
        monkeypatch.setattr("shoal.training.boosting.engine.train", lambda *_, **__: pytest.fail("it trains"))
        monkeypatch.setattr(os, "environ", os.environ.copy())
        dataset = DatasetSpec.model_validate({"paths": ["s3://air/flights"], "storage": "lake"})
        with s3_server() as settings:
            settings = {**settings, "aws_secret_access_key": "cAnArY-of-40-letters", "role_arn": ""}
            secrets = Secrets({"SHOAL_STORAGE_LAKE": json.dumps(settings), "SHOAL_CATALOG_PROD": "{}"})
            code, job = drive(store, window.model_copy(update={"dataset": dataset}), secrets)

        assert (code, job.state, job.error_is_permanent) == (1, JobState.FAILED, True)
        assert 's3://lake@air/flights cannot be read: the credentials of the storage "lake" are wrong' in job.error
        assert "cAnArY" not in json.dumps([job.spec, job.error]) + log()
        assert "SHOAL_STORAGE_LAKE" in secrets.variables() and "SHOAL_CATALOG_PROD" not in secrets.variables()

    def test_rows_that_a_killed_driver_staged_are_removed(self, store, window):
        dataset = DatasetSpec(sql="SELECT 1", connection="w")
        spec = window.model_copy(update={"dataset": dataset, "run_config": RunConfig()})
        attempts.ask(store, Order("job", "retrain", "cli:me@here", spec.document(), {"gcs": "g"}, None), 0.0)
        [location] = staged_rows.locations(spec, KEY).values()
        base, _, name = location.rpartition("/")
        with staged_in(base, name):
            pass
        assert discard_leftovers(store) == []
        attempts.end(store, KEY, JobState.FAILED, 1.0, seen={JobState.PENDING}, error="lost")
        assert discard_leftovers(store) == ["job job, attempt 1: removed its staged data"]
        assert not Path(location).exists()


@pytest.mark.parametrize("metric", ["ndcg@10", "quantile:0.5", "my metric", "map@3"])
def test_the_result_names_a_metric_as_its_series_does(metric: str) -> None:
    trained = TrainResult.model_construct(eval_results={"eval": {metric: [0.5, 0.4]}}, best_iteration=None)

    assert training._final_metrics(trained) == by_round(trained.eval_results)[-1] == {f"eval-{metric}": 0.4}
