"""Fitting from a process that is no Ray driver: as a job on a pool, checked before anything starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from shoal import ComputePool, RunConfig
from shoal.data import DataConnector
from shoal.distributors import call, distributed
from shoal.distributors.call import Call
from shoal.distributors.call_pool import _forget_parents_pools, embedded_pool, least_gpus_of, pool_for_job
from shoal.distributors.pytorch import Response, get_context
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
from shoal.errors import CapacityTimeoutError, DataError, InvalidArgumentError, JobFailedError
from shoal.jobs import FunctionJobSpec, JobSpec, list_jobs
from shoal.jobs.files.storage import default_uri
from shoal.jobs.kind import call_of
from shoal.os_processes import ProcessId
from shoal.pool.api import list_pools
from shoal.pool.reconciling import sweep
from shoal.state import Store
from shoal.state.home import home
from shoal.training.boosting.params import UserCode
from shoal.training.pytorch.request import SpreadScalingConfig
from tests.support.pool_processes import node_rows, nothing_left
from tests.support.waiting import wait_until


@pytest.fixture
def frame():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 3))
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": x @ [1.0, -2.0, 0.5]})


def test_what_footers_show_is_refused_before_a_pool_starts(outside, fresh_home, frame, monkeypatch):
    monkeypatch.setattr(call, "pool_for_job", lambda *_, **__: pytest.fail("a pool was asked for"))
    with pytest.raises(DataError, match='no column "aa"'):
        XGBEstimator().fit(frame, ["aa", "b"], "y")


def test_a_callback_that_cannot_travel_is_refused_before_a_job_is_made(outside, fresh_home, frame, monkeypatch):
    monkeypatch.setattr(call, "pool_for_job", lambda *_, **__: nullcontext("nowhere"))
    with pytest.raises(
        InvalidArgumentError, match=r"callbacks, objective or metrics cannot be sent to the pool: .*lock"
    ):
        XGBEstimator(callbacks=[threading.Lock()]).fit(frame, ["a", "b"], "y")
    assert list_jobs() == []


class StopAfter:
    """Of this module, which the nodes cannot import."""

    def __new__(cls, rounds):
        from xgboost.callback import TrainingCallback

        class Stop(TrainingCallback):
            def after_iteration(self, model, epoch, evals_log):
                return epoch + 1 == rounds

        return Stop()


@pytest.mark.ray
def test_a_fit_is_a_job_on_the_pool_and_a_connector_is_used_for_several(outside, pool, frame, tmp_path, capsys):
    frame["broken"] = frame["y"].where(frame.index != 7, np.inf)
    connector = DataConnector.from_dataframe(frame)
    estimator = XGBEstimator(
        n_estimators=20,
        objective="reg:squarederror",
        callbacks=[StopAfter(10)],
        scaling_config=XGBScalingConfig(num_workers=2),
        run_config=RunConfig(pool_name=pool.name),
    )
    booster = estimator.fit(connector, ["a", "b", "c"], "y", eval_set={"train": frame}, verbose_eval=5)
    said = capsys.readouterr().out
    assert "[5]" in said  # the rounds were printed where the caller is
    assert booster.feature_names == ["a", "b", "c"]
    losses = estimator.get_eval_results()["train"]["rmse"]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    predictions = estimator.predict(frame)
    assert np.sqrt(np.mean((predictions - frame["y"]) ** 2)) == pytest.approx(losses[-1], rel=1e-3)
    assert np.allclose(estimator.to_sklearn().predict(frame[["a", "b", "c"]]), predictions)
    assert [str(folder) for folder in (home() / "staging").iterdir()] == [connector.staging]  # the frame's is gone

    another = RunConfig(pool_name=pool.name, artifact_location=str(tmp_path))
    with pytest.raises(JobFailedError, match='the label "broken" is null, NaN or infinite in 1 of'):
        XGBEstimator(n_estimators=2, run_config=another).fit(connector, ["a", "b"], "broken")
    assert list_jobs(pool.name)[0].state == "failed"
    assert Path(connector.staging).exists()
    assert connector.discard_staging() is True
    assert list((home() / "staging").iterdir()) == []


def pinball(predictions, matrix, quantile):
    """Of this module, too."""
    below = predictions < matrix.get_label()
    return np.where(below, -quantile, 1 - quantile), np.ones(len(predictions))


def share_below(predictions, matrix):
    return "share-below", np.mean(matrix.get_label() < predictions)


@pytest.mark.ray
@pytest.mark.long
def test_an_objective_and_a_metric_travel_with_the_job(outside, pool, frame):
    estimator = XGBEstimator(
        n_estimators=60,
        objective=partial(pinball, quantile=0.9),
        params={"eta": 1.0, "max_depth": 3},
        custom_metric=share_below,
        scaling_config=XGBScalingConfig(num_workers=2),
        run_config=RunConfig(pool_name=pool.name),
    )
    estimator.fit(frame, ["a", "b", "c"], "y", eval_set=frame)
    share = np.mean(frame["y"] < estimator.predict(frame))
    assert share == pytest.approx(0.9, abs=0.05)
    assert estimator.get_eval_results()["eval"]["share-below"][-1] == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize(
    ("variables", "run_config", "function", "fit"),
    [
        ({}, RunConfig(), True, False),
        ({"MLFLOW_EXPERIMENT_NAME": "mine"}, RunConfig(), True, True),
        ({"MLFLOW_TRACKING_URI": "http://t:1"}, RunConfig(tracking=None), False, False),
        ({}, RunConfig(tracking={"experiment": "mine"}), True, True),
    ],
    ids=["by default", "where MLflow is used", "turned off", "turned on"],
)
def test_which_jobs_record_a_run(fresh_home, monkeypatch, variables, run_config, function, fit):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    rows = {"dataset": {"paths": ["/data"]}, "input_cols": ("a",), "label_col": "y", "run_config": run_config}
    called = Call(call_of(FunctionJobSpec(run_config=run_config, program="x"), b"x"))._spec("p")
    fitted = Call(call_of(JobSpec(**rows), UserCode()))._spec("p")

    assert (called.tracking is not None, fitted.tracking is not None) == (function, fit)
    assert called.run_config.pool_name == fitted.run_config.pool_name == "p"
    if called.tracking == fitted.tracking is not None:
        assert fitted.completed("p", variables).tracking.experiment == "mine"


def test_the_library_of_the_model_is_imported_while_the_job_runs_and_an_interrupt_cancels_the_job(
    monkeypatch, tmp_path
):
    events, imported = [], threading.Event()
    (tmp_path / "a_library.py").write_text("from tests.distributors import test_call as t; t.imported()")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(globals(), "imported", imported.set)
    wait = lambda *_: imported.wait(timeout=60) and events.append("wait")  # noqa: E731
    handle = SimpleNamespace(wait=wait, cancel=events.append)
    monkeypatch.setattr("shoal.jobs.submit", lambda spec, **_: events.append("submit") or handle)

    monkeypatch.setattr(call, "is_connected", lambda: False)
    parts = SimpleNamespace(
        spec=SimpleNamespace(framework="a_library", run_config=RunConfig()),
        returns_model=True,
        check=lambda: None,
        read=lambda *_: "",
        value=str,
    )
    training = Call(parts, pool=lambda _: nullcontext("p"))
    monkeypatch.setattr(Call, "_spec", lambda *_: None)
    training.run()
    assert events == ["submit", "wait"]

    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(call, "ProgressDisplay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.run()
    assert events[2:] == ["submit", "the process that waited for the job was interrupted"]


@pytest.fixture
def calls(outside, monkeypatch):
    """The pools on which functions would run, as they are then: each call notes one instead of submitting a job."""
    seen = []

    def note(spec, **_):
        seen.append(ComputePool(spec.run_config.pool_name).describe())
        return SimpleNamespace(wait=lambda *_: None)

    monkeypatch.setattr("shoal.jobs.submit", note)
    answer = Response(SimpleNamespace(results=("done",)))
    monkeypatch.setattr("shoal.kinds.function.call.FunctionCall.read", lambda *_: answer.result)
    return seen


def remote(**options):
    return distributed(remote=True, **options)(abs)


def test_a_pool_that_is_named_and_down_is_up_for_a_call(calls, tiny):
    pool = ComputePool("local://named?max_nodes=3&cpus_per_node=2").up()
    pool.down()
    named = RunConfig(pool_name="named")
    for each_is_too_large in ({"num_cpus": 3}, {"gpus": 1}):
        with pytest.raises(
            InvalidArgumentError, match=r"does not fit on a node of pool .*: a node has 2 CPUs and 0 GPUs"
        ):
            remote(run_config=named, **each_is_too_large).distributed(-1)
    with pytest.raises(InvalidArgumentError, match="a lease of 4 is above MAX_NODES=3"):
        remote(num_workers=8, run_config=named).distributed(-1)
    assert pool.describe().state == "down"

    assert remote(num_workers=3, run_config=named).distributed(-1) == ["done"]
    assert [(seen.name, len(seen.active)) for seen in calls] == [("named", 2)]
    assert pool.describe().state == "down"


def test_a_pool_that_is_named_by_its_uri_is_created_for_a_call(calls, tiny, monkeypatch):
    config = RunConfig(pool_name="local://new?max_nodes=3&cpus_per_node=2&gpus_per_node=0")
    assert remote(num_workers=3, run_config=config).distributed(-1) == ["done"]
    assert [(seen.name, len(seen.active)) for seen in calls] == [("new", 2)]
    assert ComputePool("new").describe().state == "down"

    size = SpreadScalingConfig(num_workers=5)
    with pool_for_job(FunctionJobSpec(program="x", scaling_config=size, run_config=config)) as name:
        assert (name, len(ComputePool(name).describe().active)) == ("new", 3)
    monkeypatch.setenv("SHOAL_POOL", "local://other?max_nodes=1")
    with pool_for_job(FunctionJobSpec(program="x")) as name, pool_for_job(FunctionJobSpec(program="x")) as again:
        assert name == again == "other" and ComputePool("other").describe().state == "up"
    assert [ComputePool(name).describe().state for name in ("new", "other")] == ["down", "down"]


def test_a_call_without_a_pool_that_is_up_has_one_of_its_own_size(calls, tiny, capsys):
    ComputePool("local://old").up().down()
    cpus = 2 * len(os.sched_getaffinity(0)) + 1
    assert remote(num_workers=cpus).distributed(-1) == ["done"]
    assert capsys.readouterr().err.startswith("no pool was named, and none is up on this host (the store contains old)")
    assert remote(num_workers=cpus).distributed(-1) == ["done"]
    assert remote(num_workers=cpus + 1).distributed(-1) == ["done"]
    first, again, larger = calls
    assert (len(first.active), first.active[0].cpus, larger.active[0].cpus) == (1, cpus, cpus + 1)
    assert again.active == first.active
    assert [(pool.name, pool.embedded_in) for pool in list_pools(embedded=True) if pool.embedded_in] == [
        (larger.name, f"process {os.getpid()}")
    ]
    assert ComputePool(first.name).describe().state == "down"
    assert [pool.name for pool in list_pools()] == ["old"]


def test_calls_at_once_share_a_pool_that_is_started_again_after_it_went_down(tiny, monkeypatch):
    both_in = threading.Barrier(2, timeout=60)

    def call() -> str:
        with embedded_pool() as name:
            both_in.wait()
            return name

    with ThreadPoolExecutor(2) as threads:
        names = [each.result() for each in [threads.submit(call) for _ in range(2)]]
    assert names[0] == names[1]
    [node] = node_rows()
    with monkeypatch.context() as limited, embedded_pool():
        limited.setattr(Store, "transaction", None)
        with embedded_pool() as name:  # a pool that is up is only read
            assert name == names[0]
    ComputePool(names[0]).down()  # as its idle_timeout does
    with embedded_pool() as name:
        assert name == names[0]
        [another] = node_rows()
    assert another.id != node.id


def test_a_pool_with_ray_also_serves_calls_that_need_no_ray(tiny):
    with embedded_pool(gpus=0) as with_ray, embedded_pool(gpus=0, ray=False) as again:
        assert again == with_ray
    assert len(node_rows()) == 1


def test_a_forked_child_has_a_pool_of_its_own_and_leaves_that_of_its_parent(tiny):
    with embedded_pool() as parents:
        pass
    if (child := os.fork()) == 0:
        try:
            with embedded_pool() as own:
                (tiny / "own").write_text(own)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    own = (tiny / "own").read_text()
    assert own.startswith(f"embedded-{child}-")
    wait_until(lambda: sweep(Store()) == [] and len(node_rows()) == 1, "the end of the child's pool")
    assert [pool.name for pool in list_pools(embedded=True)] == [parents]
    assert len(ComputePool(parents).get_nodes()) == 1


def test_a_pool_of_an_earlier_process_with_the_same_id_is_ended_first(tiny, monkeypatch):
    earlier = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr("shoal.distributors.call_pool._numbers", count(9))
    name = f"embedded-{os.getpid()}-9"
    ComputePool(f"local://{name}?max_nodes=1").up(owner=ProcessId.of(earlier.pid))
    [node] = node_rows()
    earlier.kill()
    earlier.wait()
    with embedded_pool() as own:
        assert own == name
        assert [each.id for each in node_rows()] != [node.id]
        assert sweep(Store()) == []
        assert len(node_rows()) == 1


@pytest.mark.ray
def test_a_remote_call_grows_the_pool_is_tracked_and_gives_it_back(
    outside, real_pool, session_home, mlflow_database, capsys
):
    """Without a tracking URI, all ranks log to one run in the default database, which need not be there."""
    import mlflow

    real_pool.scale(1)
    if not Path(default_uri().removeprefix("sqlite:///")).exists():
        shutil.copy(mlflow_database, session_home / "mlflow")  # MLflow's migrations take seconds

    @distributed(num_workers=2, remote=True, run_config=RunConfig(pool_name=real_pool.name))
    def where():
        import mlflow
        import ray

        mlflow.log_metric(f"rank-{get_context().get_rank()}", 1.0)
        return ray.get_runtime_context().get_node_id()

    first, second = where.distributed()
    assert first != second
    run_id = list_jobs(real_pool.name, limit=1)[0].result.mlflow_run_id
    assert f"MLflow run: {run_id} (to view it" in capsys.readouterr().out
    metrics = mlflow.MlflowClient(default_uri()).get_run(run_id).data.metrics
    assert (metrics["rank-0"], metrics["rank-1"]) == (1.0, 1.0)
    assert real_pool.describe().leases == ()
    assert len(real_pool.get_nodes()) == 1

    @distributed(num_cpus=2, remote=True, run_config=RunConfig(pool_name=real_pool.name))
    def large():
        pass

    with pytest.raises(InvalidArgumentError, match=r"a worker of 2 CPUs and 0 GPUs does not fit on a node of pool"):
        large.distributed()


def test_a_call_that_needs_two_gpus_waits_for_both(tiny, gpu_machine):
    gpu_machine(2)
    with (
        embedded_pool(gpus=1),
        pytest.raises(CapacityTimeoutError, match="within 0 s"),
        embedded_pool(least_gpus=2, timeout_s=0),
    ):
        pass
    fields = {"dataset": {"paths": ["/x"]}, "input_cols": ["x"], "label_col": "y"}
    spec = JobSpec.parse({**fields, "scaling_config": {"num_workers": 2, "use_gpu": True}})
    assert least_gpus_of(spec.demand()) == 2
    assert least_gpus_of(spec.model_copy(update={"run_config": RunConfig(clamp=True)}).demand()) == 1
    assert least_gpus_of(JobSpec.parse(fields).demand()) == 1


def test_an_embedded_pool_has_all_gpus_and_another_waits_for_them(tiny, gpu_machine):
    gpu_machine(2)
    with embedded_pool() as first:
        assert ComputePool(first).get_nodes()[0]["gpus"] == 2
        with embedded_pool(timeout_s=0) as same:
            assert same == first
        said = f"within 0 s .*claimed them: {first}"
        _forget_parents_pools()  # from here on, this is another process
        with pytest.raises(CapacityTimeoutError, match=said), embedded_pool(timeout_s=0):
            pass
    with embedded_pool(timeout_s=0) as second:
        assert ComputePool(second).get_nodes()[0]["gpus"] == 2


@pytest.mark.ray
def test_a_call_on_this_node_has_a_worker_for_each_gpu_and_leaves_nothing(
    outside, fresh_home, gpu_machine, monkeypatch
):
    """On a machine that NVML's fake makes up: no GPU has seen it."""
    a, b, c, _ = gpu_machine(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0,1")

    def gpus():
        return os.environ["CUDA_VISIBLE_DEVICES"].split(","), int(os.environ["LOCAL_RANK"])

    # Each worker sees all of the node's GPUs, as with torchrun.
    seen = distributed(num_cpus=0)(gpus).distributed()
    assert [(sorted(visible), rank) for visible, rank in seen] == [(sorted([a, b, c]), rank) for rank in range(3)]
    assert list_pools(embedded=True) == []
    sweep(Store())
    nothing_left()
