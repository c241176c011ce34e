"""The tasks on tiny pools, in real flow runs."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path

import cloudpickle
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort
from prefect.runtime import flow_run

from shoal.data import DataConnector
from shoal.errors import InvalidArgumentError, JobFailedError, ScaleError
from shoal.pool.api import ComputePool as CorePool
from shoal.prefect import (
    ComputePool,
    acleanup_pool,
    adistributed_train,
    aget_nodes,
    ascale_cluster,
    await_for_nodes,
    batch_predict,
    cleanup_pool,
    distributed_train,
    get_nodes,
    many_models,
    scale_cluster,
    tune,
    wait_for_nodes,
)
from shoal.prefect.reports import NodeLog
from shoal.training.reporting import Progress
from tests.support.job_results import result_of
from tests.support.tiny_node import FAIL_FILE

pytestmark = pytest.mark.server
POOL = "local://tiny?max_nodes=4"


@pytest.fixture
def up(server, tiny):
    return CorePool(POOL).up()


def test_scaling_is_done_in_the_name_of_the_flow_run(up, logged):
    @flow
    def grow():
        assert scale_cluster(2, pool_name="tiny") is True
        return str(flow_run.id), [node["name"] for node in get_nodes("tiny")]

    run_id, names = grow()
    assert names == ["tiny-0", "tiny-1"]
    assert up.describe().last_operation.holder == f"prefect:{run_id}"
    logged("tiny: 1 of 2 nodes active")


def test_the_twins_do_the_same(up):
    @flow
    async def grow():
        assert await ascale_cluster(2, pool_name=ComputePool(name="tiny")) is True
        waited = await await_for_nodes(2, pool_name="tiny")
        report = await acleanup_pool("tiny")
        return waited == await aget_nodes("tiny"), report

    same, report = asyncio.run(grow())
    assert same
    assert report == {"cancelled": (), "released": False, "swept": (), "left": ()}


def test_what_goes_wrong_is_the_state_of_the_run(up, tiny):
    (tiny / FAIL_FILE).write_text("quota exceeded")

    @flow
    def grow():
        scale_cluster(3, pool_name="tiny")

    state = grow(return_state=True)
    assert state.is_failed()
    assert "quota exceeded" in state.message
    with pytest.raises(ScaleError, match="rolled back to 1"):
        state.result()
    assert len(up.get_nodes()) == 1


def test_a_wrong_option_is_refused_by_name(up):
    @flow
    def grow():
        scale_cluster(2, pool_name="tiny", options={"rollback_after": 3})

    with pytest.raises(InvalidArgumentError, match="did you mean rollback_after_seconds"):
        grow()


def test_waiting_for_nodes_that_nobody_wants_ends_at_once(up, tiny):
    @flow
    def wait():
        return wait_for_nodes(3, pool_name="tiny")

    @flow
    def grow_and_wait():
        with pytest.raises(ScaleError):
            scale_cluster(3, pool_name="tiny")
        return wait_for_nodes(3, pool_name="tiny")

    with pytest.raises(ScaleError, match="the target of the pool is 1: request more with a lease or scale_cluster"):
        wait()
    (tiny / FAIL_FILE).write_text("quota exceeded")
    with pytest.raises(ScaleError, match=r"last request of .* was rolled back: \d nodes failed to start"):
        grow_and_wait()


def test_a_cancelled_async_wait_ends_at_once(up, monkeypatch):
    up.scale(3, is_async=True)  # and nobody reconciles
    waits, show = threading.Event(), NodeLog.__call__
    monkeypatch.setattr(NodeLog, "__call__", lambda log, status: (waits.set(), show(log, status)))

    @flow
    async def cancels():
        waiting = asyncio.ensure_future(await_for_nodes(3, pool_name="tiny", timeout=600))
        assert await asyncio.to_thread(waits.wait, 60)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cancels())


def test_waiting_has_an_end(up):
    up.scale(3, is_async=True)  # and nobody reconciles

    @flow
    def wait():
        return wait_for_nodes(3, pool_name="tiny", timeout=0.1)

    with pytest.raises(ScaleError, match=r"has 1 of 3 nodes after 0\.1 s"):
        wait()


def test_cleaning_up_releases_what_the_run_claims(up):
    @flow
    def forgetful():
        up_here = CorePool("tiny", holder=f"prefect:{flow_run.id}")
        up_here.lease(2)
        return cleanup_pool("tiny")

    assert forgetful()["released"] is True
    assert up.describe().leases == ()


def test_a_function_is_trained_with_its_arguments(up, monkeypatch, tmp_path):
    asked = []

    def submit(spec, *, holder, task, connection_url, secret_of, team):
        asked.append(spec)
        raise JobFailedError("job failed: no rank is left")

    monkeypatch.setattr("shoal.prefect.job_task.submit", submit)

    @flow
    def train():
        others = {"run_config": {"artifact_location": str(tmp_path)}, "hyper_params": {"rate": 0.1}}
        by_value = distributed_train(
            others, train_func=pow, args=[2], kwargs={"exp": 3}, pool_name="tiny", return_state=True
        )
        by_name = distributed_train(
            framework="pytorch", train_func="pkg.module:train", args=[3], pool_name="tiny", return_state=True
        )
        return by_value.is_failed() and by_name.is_failed()

    assert train()
    by_value, by_name = asked
    assert cloudpickle.loads(Path(by_value.program).read_bytes())() == 8
    assert (by_value.name, by_value.hyper_params, by_value.run_config.pool_name) == ("pow", {"rate": 0.1}, "tiny")
    assert (by_name.train_func, by_name.args) == ("pkg.module:train", (3,))


def test_a_prediction_is_a_job(up, monkeypatch, tmp_path):
    asked = []

    def submit(spec, *, holder, task, connection_url, secret_of, team):
        asked.append(spec)
        raise JobFailedError("job failed: far enough")

    monkeypatch.setattr("shoal.prefect.job_task.submit", submit)
    dataset = DataConnector.from_parquet(tmp_path)

    @flow
    def score():
        with pytest.raises(JobFailedError, match="far enough"):
            batch_predict("models:/m@champion", dataset, str(tmp_path / "out"), spec={"overwrite": True})
        with pytest.raises(InvalidArgumentError, match="names no version"):
            batch_predict("models:/m", dataset, str(tmp_path / "out"))

    score()
    (spec,) = asked
    assert (spec.framework, spec.model, spec.overwrite) == ("predict", "models:/m@champion", True)
    assert spec.dataset.paths == (str(tmp_path),)


def test_models_per_partition_are_a_job(up, monkeypatch, tmp_path):
    asked = []

    def submit(spec, *, holder, task, connection_url, secret_of, team):
        asked.append(spec)
        raise JobFailedError("job failed: far enough")

    monkeypatch.setattr("shoal.prefect.job_task.submit", submit)
    dataset = DataConnector.from_parquet(tmp_path)

    @flow
    def retrain():
        estimator = {"input_cols": ["price"], "label_col": "sold"}
        with pytest.raises(JobFailedError, match="far enough"):
            many_models(dataset, "store", estimator=estimator, spec={"partition_timeout": 60})
        with pytest.raises(JobFailedError, match="far enough"):
            many_models(dataset, ["store", "item"], function="models:train", kwargs={"rate": 0.1})
        with pytest.raises(InvalidArgumentError, match="exactly one of them is required"):
            many_models(dataset, "store")

    retrain()
    by_estimator, by_name = asked
    assert (by_estimator.framework, by_estimator.by, by_estimator.partition_timeout) == ("partitions", ("store",), 60)
    assert by_estimator.estimator.label_col == "sold"
    assert (by_name.by, by_name.function, by_name.kwargs) == (("store", "item"), "models:train", {"rate": 0.1})
    assert many_models.task_run_name({"by": ["store", "item"]}) == "models by store, item"
    assert many_models.task_run_name({}) == "many_models"


def test_a_search_is_a_job(up, monkeypatch, tmp_path):
    asked = []

    def submit(spec, **_):
        asked.append(spec)
        raise JobFailedError("job failed: far enough")

    monkeypatch.setattr("shoal.prefect.job_task.submit", submit)
    train = {"dataset": {"paths": [str(tmp_path)]}, "input_cols": ["a"], "label_col": "y"}

    @flow
    def search():
        with pytest.raises(JobFailedError, match="far enough"):
            tune({"eta": [0.1, 0.3]}, train, trials=3, spec={"sampler": "grid"})
        with pytest.raises(InvalidArgumentError, match="space is empty"):
            tune({}, train)

    search()
    (spec,) = asked
    assert (spec.framework, spec.trials, spec.sampler, spec.label) == ("tune", 3, "grid", "search for xgboost: y")


def test_a_retry_asks_for_the_same_job_and_another_task_run_for_another(up, monkeypatch):
    asked = []

    def submit(spec, *, holder, task, connection_url, secret_of, team):
        asked.append((holder, task.run, spec.run_config.pool_name))
        raise JobFailedError("job failed: eta is no number")

    monkeypatch.setattr("shoal.prefect.job_task.submit", submit)
    spec = {"dataset": {"paths": ["x.parquet"]}, "input_cols": ["x"], "label_col": "y"}

    @flow
    def train():
        twice = distributed_train.with_options(retries=1, retry_delay_seconds=0)
        states = [twice(spec, pool_name="tiny", return_state=True) for _ in range(2)]
        return str(flow_run.id), [state.message for state in states]

    run_id, messages = train()
    assert {holder for holder, _, _ in asked} == {f"prefect:{run_id}"}
    assert {pool for _, _, pool in asked} == {"tiny"}
    runs = [run for _, run, _ in asked]
    assert len(runs) == 4 and runs[0] == runs[1] != runs[2] == runs[3]
    assert all("eta is no number" in message for message in messages)


class Reporting:
    """A job that reports its progress, and then fails."""

    job_id, attempt, was_collected = "reporting", 1, False

    def wait(self, *, on_progress, **_):
        on_progress(Progress(3, None, "steps", {"loss": 0.5}))  # no bar: the end is not known
        on_progress(Progress(1, 4, "rounds", {"eval-rmse": 2.5}))
        on_progress(Progress(3, 4, "rounds", {"eval-rmse": 1.5}))
        raise JobFailedError("job failed: on purpose")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_jobs_progress_is_an_artifact_of_the_task_run(up, monkeypatch, is_async):
    monkeypatch.setattr("shoal.prefect.job_task.submit", lambda *_, **__: Reporting())
    monkeypatch.setenv("SHOAL_UI_URL", "https://shoal.example")
    spec = {"dataset": {"paths": ["x.parquet"]}, "input_cols": ["x"], "label_col": "y"}

    @flow
    def train():
        return str(flow_run.id), distributed_train(spec, pool_name="tiny", return_state=True).message

    @flow
    async def atrain():
        state = await adistributed_train(spec, pool_name="tiny", return_state=True)
        return str(flow_run.id), state.message

    run_id, message = asyncio.run(atrain()) if is_async else train()
    assert "on purpose" in message
    with get_client(sync_client=True) as client:
        by_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
        found = {each.key: each for each in client.read_artifacts(artifact_filter=by_run)}
    page, artifact, report = found.pop("shoal-job"), found.pop(None), found.pop("shoal-training")
    assert (found, report.description) == ({}, f"failed    xgboost: y: {message.partition(': ')[2]}")
    assert page.data == "[Job reporting](https://shoal.example/jobs/reporting)"
    assert (artifact.type, float(artifact.data)) == ("progress", 75.0)
    assert artifact.description == "round 3 of 4, eval-rmse: 1.5"
    assert artifact.task_run_id is not None


class Skipped:
    """A job that trains nothing, because it has no new rows."""

    job_id, attempt, was_collected = "skipped", 1, False

    def wait(self, *, on_progress, **_):
        metrics = {"auc": math.nan, "loss": -math.inf}
        return result_of(model_version="3", skipped="no new rows since version 3", metrics=metrics)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_training_without_new_rows_is_a_skipped_task_run(up, monkeypatch, is_async):
    asked = []
    monkeypatch.setattr("shoal.prefect.job_task.submit", lambda spec, **_: asked.append(spec) or Skipped())
    register = {"model": "m", "metric": "rmse", "holdout": {"paths": ["x.parquet"]}}
    spec = {"dataset": {"paths": ["x.parquet"]}, "input_cols": ["x"], "label_col": "y", "register": register}

    @flow
    def train():
        state = distributed_train(spec, pool_name="tiny", return_state=True)
        result = distributed_train(spec, skip_if_unchanged=False, pool_name="tiny")
        assert result == distributed_train.with_options(retries=1)(spec, pool_name="tiny")
        assert result == distributed_train.submit(spec, pool_name="tiny").result()
        return state, result

    @flow
    async def atrain():
        state = await adistributed_train(spec, pool_name="tiny", return_state=True)
        return state, await adistributed_train(spec, skip_if_unchanged=False, pool_name="tiny")

    state, result = asyncio.run(atrain()) if is_async else train()
    assert (state.name, state.is_completed(), state.message) == (
        "Skipped",
        True,
        "no new rows since version 3",
    )
    assert (result["skipped"], result["model_version"]) == (state.message, "3")
    assert result["metrics"] == {"auc": "NaN", "loss": "-Infinity"}
    assert [spec.register_as.skip_if_unchanged for spec in asked[:2]] == [True, False]
    with get_client(sync_client=True) as client:
        by_key = ArtifactFilter(key=ArtifactFilterKey(any_=["shoal-model-m"]))
        report = client.read_artifacts(artifact_filter=by_key, sort=ArtifactSort.CREATED_DESC)[0]
        run = client.read_task_run(report.task_run_id)
    assert (report.type, report.data.partition("\n")[0]) == ("markdown", "# m version 3: skipped")
    assert run.name == "train m"


def test_a_wrong_spec_is_refused_before_anything_starts(up):
    @flow
    def train():
        distributed_train({"dataset": {"paths": ["x.parquet"]}, "input_cols": []}, pool_name="tiny")

    with pytest.raises(InvalidArgumentError, match="label_col"):
        train()
