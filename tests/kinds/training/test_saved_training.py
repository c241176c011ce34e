"""A job whose first attempt has saved its model and failed later, and what its next attempt does."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from shoal.data import DataConnector
from shoal.jobs import JobResult, JobSpec, Register, Tracking, load_training, shipped_code
from shoal.jobs.driver.attempt_metrics import MetricSeries
from shoal.jobs.files import artifacts
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.mlflow_run import Run
from shoal.state import Store
from shoal.state.schema import JobState
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.run_config import RunConfig
from tests.jobs.driver.test_main import drive, environment, log, plain_lightgbm, plain_xgboost, serving, spec

__all__ = ["environment", "spec"]

pytestmark = pytest.mark.usefixtures("environment")

FIRST, SECOND, THIRD = (Key("job", number) for number in (1, 2, 3))
NEVER_FAILED = Key("never-failed", 1)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainRequest]:
    """The trainings that the driver has started."""
    requests: list[TrainRequest] = []

    def train(request: TrainRequest, **more: object) -> TrainResult:
        requests.append(request)
        return (plain_xgboost if request.framework == "xgboost" else plain_lightgbm)(request, **more)

    monkeypatch.setattr("shoal.training.boosting.engine.train", train)
    return requests


def fail_after_saving(store: Store, spec: JobSpec) -> None:
    """The first attempt, whose MLflow goes away when its model is saved."""

    def fail(*_: object) -> None:
        raise ConnectionError("MLflow is away")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MetricSeries, "flush", fail)
        code, job = drive(store, spec)
    assert (code, job.state) == (1, JobState.FAILED), log()
    assert "its model is saved in " in str(job.error)


def contents(result: JobResult, uri: str) -> dict[str, Any]:
    """What a job has recorded in MLflow, without times."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    run = client.get_run(result.mlflow_run_id)
    return {
        "status": run.info.status,
        "params": run.data.params,
        "metrics": {
            name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
            if not name.startswith(("seconds/", "system/"))
        },
        "timed": sorted(name for name in run.data.metrics if name.startswith(("seconds/", "system/"))),
        "datasets": [
            (each.dataset.name, each.dataset.digest, each.dataset.source) for each in run.inputs.dataset_inputs
        ],
        "models": len(run.outputs.model_outputs),
    }


def test_the_next_attempt_uploads_and_promotes_the_saved_model(store, spec, tmp_path, monkeypatch, own_mlflow, trained):
    """MLflow's own server goes away for real after the upload, is still away at the second attempt, and comes back."""
    import mlflow
    from mlflow.server import app, handlers
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as RegistryStore
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    # The server's stores are given, because it would make its database the one of this whole process.
    monkeypatch.setattr(handlers, "_tracking_store", SqlAlchemyStore(own_mlflow, str(tmp_path / "artifacts")))
    monkeypatch.setattr(handlers, "_model_registry_store", RegistryStore(own_mlflow))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    server, log_model = ExitStack(), Run.log_model
    uri = server.enter_context(serving(app))

    def log_model_and_lose_the_server(*arguments: Any, **options: Any) -> str:
        model = log_model(*arguments, **options)
        server.close()
        return model

    register = Register(model="resumed", metric="rmse", holdout=spec.dataset, overlap="flag")
    run_config = RunConfig(artifact_location=str(tmp_path / "models"))
    spec = spec.model_copy(update={"tracking": Tracking(uri=uri), "register_as": register, "run_config": run_config})
    with monkeypatch.context() as patched:
        patched.setattr(Run, "log_model", log_model_and_lose_the_server)
        code, job = drive(store, spec)
    assert (code, job.state, len(trained)) == (1, JobState.FAILED, 1), log()
    assert f"its model is saved in {tmp_path}/models/job/1/model.ubj, but MLflow cannot be reached" in job.error

    code, job = drive(store, spec, key=SECOND)
    assert (code, job.state, job.error_is_permanent, len(trained)) == (1, JobState.FAILED, False, 1)
    assert f"no worker was started, because MLflow at {uri} cannot be reached: MlflowException: " in job.error
    assert "Check that its server runs" in job.error
    assert "Traceback" not in log(SECOND)

    with serving(app, port=int(uri.rpartition(":")[2])):
        code, job = drive(store, spec, key=THIRD)
        assert (code, job.state, len(trained)) == (0, JobState.SUCCEEDED, 1), log(THIRD)
        assert f"not trained again: attempt 1 has saved its model in {tmp_path}/models/job/1, " in log(THIRD)
        resumed = JobResult.model_validate(job.result)
        assert resumed.model_path == f"{tmp_path}/models/job/3/model.ubj"
        assert (resumed.promoted, resumed.decision.reason) == (True, "first")
        register = register.model_copy(update={"model": "never-failed"})
        code, job = drive(store, spec.model_copy(update={"register_as": register}), key=NEVER_FAILED)
        assert (code, len(trained)) == (0, 2)
        usual = JobResult.model_validate(job.result)
        assert contents(resumed, own_mlflow) == contents(usual, own_mlflow)
        changing = {"job_id", "attempt", "model_path", "model_uri", "mlflow_run_id", "seconds", "node_seconds", "times"}
        fields = resumed.model_dump(exclude={*changing, "model_name", "decision"})
        assert fields == usual.model_dump(exclude={*changing, "model_name", "decision"})
        assert resumed.times.measured().keys() == usual.times.measured().keys()
        registered = mlflow.xgboost.load_model(f"models:/resumed/{resumed.model_version}")
    assert load_training(resumed) == load_training(usual)
    import xgboost  # here, because the driver imports it anew

    rows = DataConnector.from_spec(spec.dataset).to_pandas()
    matrix, evals = xgboost.DMatrix(rows[["a", "b"]], rows["y"]), {}
    plain = xgboost.train(spec.params, matrix, 3, evals=[(matrix, "eval")], evals_result=evals)
    np.testing.assert_array_equal(registered.predict(matrix), plain.predict(matrix))
    assert load_training(resumed).eval_results == evals


def test_lightgbm_and_staged_rows(store, spec, tmp_path, trained):
    """As with a task that is tried again, the second attempt gets a new copy of the same DataFrame."""
    import lightgbm

    rows = DataConnector.from_spec(spec.dataset).to_pandas()
    spec = spec.model_copy(update={"framework": "lightgbm", "params": {"min_data_in_leaf": 2}})

    def staged_again() -> JobSpec:
        return spec.model_copy(update={"dataset": DataConnector.from_dataframe(rows).to_spec()})

    fail_after_saving(store, staged_again())
    code, job = drive(store, staged_again(), key=SECOND)

    assert (code, len(trained)) == (0, 1), log(SECOND)
    model = load_training(JobResult.model_validate(job.result)).booster()
    plain = lightgbm.train(
        {"verbosity": -1, **spec.params}, lightgbm.Dataset(rows[["a", "b"]], rows["y"]), spec.n_estimators
    )
    np.testing.assert_array_equal(model.predict(rows[["a", "b"]]), plain.predict(rows[["a", "b"]]))


Change = Callable[[JobSpec, Path], JobSpec]


def rows_swapped(spec: JobSpec, folder: Path) -> JobSpec:
    """The footer, with its sizes and statistics, stays the same."""
    rows = pd.read_parquet(folder / "train.parquet")
    rows.loc[[10, 20], "y"] = rows.loc[[20, 10], "y"].to_numpy()
    rows.to_parquet(folder / "train.parquet")
    return spec


def staged_rows_swapped(spec: JobSpec, folder: Path) -> JobSpec:
    rows = pd.read_parquet(folder / "train.parquet")
    rows.loc[[10, 20], "y"] = rows.loc[[20, 10], "y"].to_numpy()
    return spec.model_copy(update={"dataset": DataConnector.from_dataframe(rows).to_spec()})


def eval_set_written_again(spec: JobSpec, folder: Path) -> JobSpec:
    pd.read_parquet(folder / "eval.parquet").to_parquet(folder / "eval.parquet")
    return spec


def another_spec(spec: JobSpec, _: Path) -> JobSpec:
    return spec.model_copy(update={"fingerprint": "another", "n_estimators": 4})


def model_replaced(spec: JobSpec, folder: Path) -> JobSpec:
    """A colleague has put another good model into the shared folder, with its report."""
    saved = artifacts.folder(FIRST, str(folder / "models"))
    rows = pd.read_parquet(folder / "train.parquet").assign(y=7.0)
    rows.to_parquet(folder / "forged.parquet")
    forged = plain_xgboost(
        spec.model_copy(update={"dataset": DataConnector.from_parquet(folder / "forged.parquet").to_spec()})
    )
    Path(saved, "model.ubj").write_bytes(forged.model)
    return spec


def report_changed(spec: JobSpec, folder: Path) -> JobSpec:
    path = folder / "models/job/1/training.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": 51}))
    return spec


def files_removed(spec: JobSpec, folder: Path) -> JobSpec:
    (folder / "models/job/1/model.ubj").unlink()
    return spec


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rows_swapped, "the files of the datasets changed meanwhile"),
        (staged_rows_swapped, "the files of the datasets changed meanwhile"),
        (eval_set_written_again, "the files of the datasets changed meanwhile"),
        (another_spec, "because the spec changed meanwhile"),
        (model_replaced, "models/job/1 were changed after the attempt had saved them"),
        (report_changed, "models/job/1 were changed after the attempt had saved them"),
        (files_removed, "it cannot be used, so the job trains again: FileNotFoundError: "),
    ],
)
def test_an_attempt_trains_if_anything_has_changed(store, spec, tmp_path, trained, change: Change, reason: str) -> None:
    rows = pd.read_parquet(tmp_path / "train.parquet")
    rows.to_parquet(tmp_path / "eval.parquet")
    update = {
        "run_config": RunConfig(artifact_location=str(tmp_path / "models")),
        "eval_set": {"eval": DataConnector.from_parquet(tmp_path / "eval.parquet").to_spec()},
    }
    if change is staged_rows_swapped:
        update["dataset"] = DataConnector.from_dataframe(rows).to_spec()
    spec = spec.model_copy(update=update)
    fail_after_saving(store, spec)

    code, job = drive(store, change(spec, tmp_path), key=SECOND)

    assert (code, len(trained)) == (0, 2), log(SECOND)
    [why] = [line for line in log(SECOND).splitlines() if "trains again" in line]
    assert why.startswith("attempt 1 has saved a model, but ")
    assert reason in why
    expected = plain_xgboost(trained[1])
    assert load_training(JobResult.model_validate(job.result)).model == expected.model


@pytest.mark.parametrize("last", [JobState.SUCCEEDED, JobState.CANCELLED])
def test_an_attempt_trains_after_one_that_has_succeeded_or_was_cancelled(store, spec, trained, last):
    def stopped(*_: object) -> None:
        attempts.end(store, FIRST, JobState.CANCELLED, 1.0)

    with pytest.MonkeyPatch.context() as patched:
        if last is JobState.CANCELLED:
            patched.setattr(MetricSeries, "flush", stopped)
        drive(store, spec)
    assert attempts.state(store, FIRST) is last
    if last is JobState.SUCCEEDED:
        attempts.collect(store, FIRST, 1.0)

    code, _ = drive(store, spec, key=SECOND)

    assert (code, len(trained)) == (0, 2), log(SECOND)


def test_an_attempt_with_functions_of_the_user_trains(store, spec, trained):
    spec = spec.model_copy(update={"user_code": shipped_code.store_user_code(UserCode(callbacks=(suppress,)))})
    fail_after_saving(store, spec)

    assert drive(store, spec, key=SECOND)[0] == 0, log(SECOND)

    assert len(trained) == 2
