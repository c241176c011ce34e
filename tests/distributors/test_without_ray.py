"""Trainings on a pool without Ray, embedded or with two nodes: the same models, and the same clean-up."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from shoal import ComputePool, RunConfig
from shoal.data import DataConnector
from shoal.distributors.lightgbm import LightGBMEstimator, LightGBMScalingConfig
from shoal.distributors.pytorch import TorchDistributor
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
from shoal.errors import InvalidArgumentError, JobFailedError
from shoal.jobs import FunctionJobSpec, JobSpec, Tracking, attach, list_jobs, submit
from shoal.pool.api import list_pools
from shoal.pool.spec import PoolSpec
from shoal.training.pytorch.program import Program, may_call_ray
from tests.support.pool_processes import node_rows, nothing_left, processes_of_home
from tests.support.two_node_cluster import TwoNodes
from tests.support.waiting import wait_until

pytestmark = pytest.mark.processes

SCRIPT = """
import hashlib, os, signal, sys
from pathlib import Path
from xgboost.callback import TrainingCallback
from shoal import ComputePool, RunConfig
from shoal.data import DataConnector
from shoal.distributors.lightgbm import LightGBMEstimator, LightGBMScalingConfig
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig

rows, reached, what = sys.argv[1:]

class Stop(TrainingCallback):
    def after_iteration(self, model, epoch, evals_log):
        if epoch == 7 and not Path(reached).exists():
            Path(reached).write_text(str(os.getpid()))
            if what == "waits":
                signal.pause()
            os.kill(os.getpid(), 9)

config = RunConfig(checkpoint_every=5, max_restarts=1)
if what == "dies":
    pool = ComputePool("local://two?max_nodes=2&min_nodes=2&ray=false").up()
    print("nodes", *(node["cpus"] for node in pool.get_nodes()))
two = {"num_workers": 2, "num_cpu_per_worker": 1}
columns = ["a", "b", "c"]
data = DataConnector.from_parquet(rows)
xgb = XGBEstimator(
    20, "reg:squarederror", scaling_config=XGBScalingConfig(**two), run_config=config, callbacks=[Stop()]
).fit(data, columns, "y")
lgb = LightGBMEstimator(
    20, "regression", scaling_config=LightGBMScalingConfig(**two), run_config=config
).fit(data, columns, "y")
for model in (bytes(xgb.save_raw("ubj")), lgb.model_to_string().encode()):
    print(hashlib.sha256(model).hexdigest())
if what == "dies":
    pool.down()
"""

FUNCTION_SCRIPT = """
import os, sys
from shoal import ComputePool, RunConfig
from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig
import torch

rows, reached, what = sys.argv[1:]

def train(rows, reached):
    import pandas as pd
    from torch.nn.parallel import DistributedDataParallel
    from shoal.distributors.pytorch import get_context
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank == 1 and not os.path.exists(reached):
        open(reached, "w").close()
        os.kill(os.getpid(), 9)
    mine = pd.read_parquet(rows).iloc[rank::world]
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        inputs, labels = (torch.tensor(mine[columns].to_numpy("float32")) for columns in (["a", "b", "c"], ["y"]))
        torch.nn.functional.mse_loss(model(inputs), labels).backward()
        optimizer.step()
    return model.module.weight.tolist()[0]

two = PyTorchScalingConfig(num_nodes=1, num_workers_per_node=2)
answer = PyTorchDistributor(train, two, RunConfig(max_restarts=1)).run(rows, reached)
print(*answer.result.results[0])
"""


def script(rows: Path, reached: Path, what: str, folder: Path, code: str = SCRIPT) -> subprocess.Popen[str]:
    """A user's script, in which no process of shoal can import Ray."""
    (folder / "ray").mkdir()
    (folder / "ray" / "__init__.py").write_text("raise ImportError('this process must not import Ray')")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code, str(rows), str(reached), what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder)


@pytest.mark.ray
def test_models_of_two_nodes_are_those_of_a_ray_cluster_also_after_a_worker_was_killed(
    driver: TwoNodes, rows: Path, fresh_home: Path, tmp_path: Path
) -> None:
    data, columns = DataConnector.from_parquet(str(rows)), ["a", "b", "c"]
    two, config = {"num_workers": 2, "num_cpu_per_worker": 1}, RunConfig(checkpoint_every=5)
    xgb = XGBEstimator(20, "reg:squarederror", scaling_config=XGBScalingConfig(**two), run_config=config)
    lgb = LightGBMEstimator(20, "regression", scaling_config=LightGBMScalingConfig(**two), run_config=config)
    on_ray = [
        bytes(xgb.fit(data, columns, "y").save_raw("ubj")),
        lgb.fit(data, columns, "y").model_to_string().encode(),
    ]
    with script(rows, tmp_path / "reached", "dies", tmp_path) as process:
        said = process.communicate()[0]
    assert said.startswith("nodes 1 1\n")
    assert "(restart 1 of 1)" in said
    assert "Binding port" not in said  # of LightGBM, which nobody has asked for
    assert said.split()[-2:] == [hashlib.sha256(model).hexdigest() for model in on_ray]
    wait_until(lambda: not node_rows(), "the end of the pool")
    nothing_left()


def test_a_function_trains_on_two_ranks_as_plain_pytorch_does_also_after_a_rank_was_killed(
    rows: Path, fresh_home: Path, tmp_path: Path
) -> None:
    import torch

    table = pd.read_parquet(rows)
    inputs, labels = (torch.tensor(table[columns].to_numpy("float32")) for columns in (["a", "b", "c"], ["y"]))
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), labels).backward()
        optimizer.step()
    with script(rows, tmp_path / "reached", "", tmp_path, FUNCTION_SCRIPT) as process:
        said = process.communicate()[0]
    assert "(restart 1 of 1)" in said
    assert list(map(float, said.split()[-3:])) == pytest.approx(model.weight.tolist()[0], rel=1e-5)
    wait_until(lambda: not node_rows(), "the end of the pool")
    nothing_left()


def test_code_that_uses_ray_on_a_pool_without_ray_is_refused_before_ray_starts() -> None:
    code = """if True:
        import ray
        from pathlib import Path
        from shoal.errors import InvalidArgumentError
        from shoal.node_register import NodeRegister
        from shoal.training import cluster
        cluster.use_register(NodeRegister(Path("register")))
        try:
            ray.put(1)
        except InvalidArgumentError as error:
            print(error, ray.is_initialized())
    """
    ran = subprocess.run([sys.executable, "-c", code], check=True, text=True, capture_output=True)
    assert "its pool runs without Ray" in ran.stdout
    assert ran.stdout.endswith("False\n")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch\n", False),
        ("from shoal.distributors.pytorch import get_context\n", False),
        ("import ray\n", True),
        ("x = None  # array, x.ray\n", False),
        ("from shoal.distributors.xgboost import XGBEstimator\n", True),
    ],
)
def test_whether_a_function_may_call_ray_is_seen_in_its_code(
    code: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"users_module_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(f"{code}def train():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    by_name = importlib.import_module(module).train
    (tmp_path / "script.py").write_text(code)
    inner: dict[str, Any] = {"__name__": "__main__"}
    exec(f"def train():\n    {code}", inner)
    for program in (by_name, tmp_path / "script.py", inner["train"]):
        assert may_call_ray(Program.of(program, (), {}).dumps()) is expected


def test_a_job_that_needs_ray_is_refused_and_a_killed_script_leaves_nothing(
    rows: Path, fresh_home: Path, tmp_path: Path
) -> None:
    reached = tmp_path / "reached"
    with script(rows, reached, "waits", tmp_path) as process:
        wait_until(lambda: reached.exists() or process.poll() is not None, "the seventh round", seconds=120)
        [pool] = list_pools(embedded=True)
        assert pool.uri.endswith("&ray=false")
        function = FunctionJobSpec(
            program="x", run_config=RunConfig(pool_name=pool.name, packages=["river"]), tracking=None
        )
        with pytest.raises(InvalidArgumentError, match=r"runs without Ray .*name another pool"):
            submit(function)
        process.kill()
    wait_until(lambda: not node_rows() and not processes_of_home(), "the end of the pool")
    nothing_left()
    assert not Path("/proc", reached.read_text()).exists()
    [job] = list_jobs()
    settled = attach(job.job_id).status()
    assert (settled.state, "the process that started the job" in str(settled.error)) == ("failed", True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"scaling_config": {"num_workers": 2, "use_gpu": False}}, False),
        ({"scaling_config": {"use_gpu": True}}, True),
        ({"run_config": {"packages": ["river"]}}, True),
        ({"dataset": {"paths": ["x"], "ingester": "ray"}}, True),
        ({"eval_set": {"eval": {"paths": ["x"], "ingester": "ray"}}}, True),
    ],
)
def test_which_jobs_need_ray(given: Mapping[str, Any], expected: bool) -> None:
    spec = {"framework": "xgboost", "dataset": {"paths": ["x"]}, "input_cols": ["a"], "label_col": "y"}
    assert JobSpec.parse({**spec, **given}).demand().needs_ray is expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"tracking": {"system_metrics": True}}, True),
        ({"room_for": {"num_workers": 2}}, True),
        ({"dataset_map": {"train": {"paths": ["x"], "ingester": "ray"}}}, True),
        ({"scaling_config": {"resource_requirements_per_worker": {"num_gpus": 1}}}, True),
    ],
)
def test_which_functions_need_ray(given: Mapping[str, Any], expected: bool) -> None:
    assert FunctionJobSpec.parse({"program": "x", **given}).demand().needs_ray is expected
    assert FunctionJobSpec(train_func="a_module:train").may_call_ray


@pytest.mark.parametrize("wrong", ["gpus_per_node=1", "ray_dashboard=true"])
def test_a_pool_without_ray_has_no_options_that_need_ray(wrong: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{wrong} is not allowed with ray=false"):
        PoolSpec.parse(f"local://x?ray=false&{wrong}")


class DiesAndFails:
    """XGBoost's callback, or LightGBM's: the worker is killed in round 7 of its first run, and fails in round 12."""

    def __new__(cls, reached: Path, library: str) -> Any:
        def seen(rounds: int) -> None:
            if rounds == 7 and not reached.exists():
                reached.touch()
                os.kill(os.getpid(), 9)
            if rounds == 12:
                raise RuntimeError("round 12")

        if library == "lightgbm":
            return lambda place: seen(place.iteration + 1)
        from xgboost.callback import TrainingCallback

        class Callback(TrainingCallback):
            def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
                seen(epoch + 1)
                return False

        return Callback()


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_a_failed_training_has_the_metrics_of_its_rounds_everywhere(
    library: str, outside: None, fresh_home: Path, tmp_path: Path, mlflow_database: Path
) -> None:
    import lightgbm
    import mlflow
    import xgboost

    shutil.copy(mlflow_database, tmp_path / "mlflow.db")
    tracking = f"sqlite:///{tmp_path / 'mlflow.db'}"
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"a": random.random(300), "b": random.random(300)})
    frame["y"] = 3 * frame["a"] + frame["b"]
    estimator: Any = XGBEstimator if library == "xgboost" else LightGBMEstimator
    config = RunConfig(checkpoint_every=5, max_restarts=1, tracking=Tracking(uri=tracking))
    with pytest.raises(JobFailedError, match="round 12"):
        estimator(20, callbacks=[DiesAndFails(tmp_path / "reached", library)], run_config=config).fit(
            frame, ["a", "b"], "y", eval_set=frame
        )

    history: dict[str, Any] = {}
    if library == "xgboost":
        matrix = xgboost.DMatrix(frame[["a", "b"]], frame["y"])
        xgboost.train({}, matrix, 12, evals=[(matrix, "eval")], evals_result=history, verbose_eval=False)
    else:
        rows = lightgbm.Dataset(frame[["a", "b"]], frame["y"])
        callback = lightgbm.record_evaluation(history)
        lightgbm.train({"verbosity": -1}, rows, 12, valid_sets=[rows], valid_names=["eval"], callbacks=[callback])
    [(name, expected)] = history["eval"].items()
    job = attach(list_jobs()[0].job_id)
    points = job.metrics()
    assert [point.step for point in points] == list(range(12))
    assert [point.values[f"eval-{name}"] for point in points] == pytest.approx(expected)
    client = mlflow.MlflowClient(tracking)
    logged = client.get_metric_history(job.status().mlflow_run_id, f"eval-{name}")
    assert [each.value for each in sorted(logged, key=lambda each: each.step)] == pytest.approx(expected)


READS_ITS_FILES = """
import json, os, sys
import torch
from helper import answer

torch.distributed.init_process_group("gloo")
config = json.load(open(sys.argv[2]))
beside = open(os.path.join(os.path.dirname(__file__), "conf", "model.json")).read()
print("said", answer(), config, beside, open("project/conf/model.json").read(), flush=True)
os.chdir(sys.path[0])
print("said", open("conf/model.json").read(), flush=True)
"""


def test_a_script_finds_its_files_from_the_folder_of_its_job(
    outside: None, fresh_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("project/conf", "shared"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "project" / "train.py").write_text(READS_ITS_FILES)
    (tmp_path / "project" / "helper.py").write_text("def answer(): return 42")
    (tmp_path / "project" / "conf" / "model.json").write_text("{}")
    (tmp_path / "shared" / "base.json").write_text('{"rate": 1}')
    monkeypatch.chdir(tmp_path)
    pool = ComputePool("local://named?ray=false&cpus_per_node=2").up()
    try:
        distributor = TorchDistributor(2, use_gpu=False, run_config=RunConfig(pool_name="named"))
        assert distributor.run("project/train.py", "--config", "shared/base.json") is None
    finally:
        pool.down()
    said = capsys.readouterr().out
    assert said.count("said 42 {'rate': 1} {} {}") == 2 and said.count("said {}") == 2, said
