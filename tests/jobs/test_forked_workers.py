"""Boosting workers on a local pool with Ray: forks of their driver's template that belong to the nodes of the pool."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from xgboost.callback import TrainingCallback

from shoal import ComputePool, RunConfig, jobs
from shoal.data import DataConnector
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
from shoal.errors import JobFailedError
from shoal.jobs import JobHandle, JobSpec
from shoal.os_processes import ProcessId
from shoal.pool.backends.local.backend import node_folder
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.state import Store
from shoal.state.schema import Job, Node
from shoal.training.host.own_process import WORKER
from tests.support.pool_processes import living, node_processes, node_rows
from tests.support.two_node_cluster import assert_ended
from tests.support.waiting import wait_until

pytestmark = pytest.mark.ray

RESTARTS = 9


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"a": random.random(4_000), "b": random.random(4_000)})
    frame.assign(y=frame["a"] * 3 + frame["b"]).to_parquet(tmp_path / "rows.parquet", row_group_size=500)
    return tmp_path / "rows.parquet"


def forever(pool: ComputePool, rows: Path, framework: str, workers: int, **run_config: str) -> JobHandle:
    """Submit a training that ends only when it is made to."""
    spec = {
        "framework": framework,
        "dataset": {"paths": [str(rows)]},
        "input_cols": ["a", "b"],
        "label_col": "y",
        "n_estimators": 10_000_000,
        "eval_set": {"eval": {"paths": [str(rows)]}},
        "verbose_eval": 100,
        "tracking": None,
        "scaling_config": {"num_workers": workers, "num_cpu_per_worker": 1},
        "run_config": {"pool_name": pool.name, "max_restarts": RESTARTS, "checkpoint_every": 200} | run_config,
    }
    return jobs.submit(JobSpec.parse(spec))


def workers_by_node() -> dict[str, list[psutil.Process]]:
    """The workers of this home, by the names of the nodes in whose folders they have a file open for writing."""
    titled = [each.pid for each in living() if each.command.startswith(WORKER.encode()) and each.is_of_home()]
    found: dict[str, list[psutil.Process]] = {}
    for process in map(psutil.Process, titled):
        opened = {file.path for file in process.open_files()}
        for node in node_rows():
            if str(node_folder(node.id) / "workers") in opened:
                found.setdefault(node.name, []).append(process)
    return found


def pids_of(found: dict[str, list[psutil.Process]]) -> list[int]:
    return [process.pid for each in found.values() for process in each]


def training(handle: JobHandle, restarts: int = 0) -> dict[str, list[psutil.Process]]:
    """Wait until the workers have trained since the last restart; return them by the names of their nodes."""

    def trains() -> bool:
        assert not handle.status().error
        before, _, since = "\n".join(handle.logs()).rpartition(f"(restart {restarts} of")
        return (bool(before) or not restarts) and since.count("eval") > 1

    wait_until(trains, "the first rounds", 120)
    return workers_by_node()


def row_of(name: str) -> Node:
    return next(node for node in node_rows() if node.name == name)


def raylet_of(node: Node) -> psutil.Process:
    children = psutil.Process(ProcessId.from_json(node.supervisor).pid).children()
    return next(child for child in children if child.name() == "raylet")


def driver_of(handle: JobHandle) -> ProcessId:
    with Store().reading() as session:
        return ProcessId.from_json(session.get_one(Job, (handle.job_id, handle.attempt)).driver)


@pytest.mark.parametrize("framework", ["xgboost", "lightgbm"])
def test_a_forked_worker_is_a_process_of_the_node_on_which_ray_has_reserved_its_cpu(
    pool: ComputePool, rows: Path, framework: str
) -> None:
    handle = forever(pool, rows, framework, 3)
    found = training(handle)
    driver = driver_of(handle).pid
    assert {name: len(workers) for name, workers in found.items()} == {node["name"]: 1 for node in pool.get_nodes()}
    for name, [worker] in found.items():
        node = row_of(name)
        assert worker.pid in {process.pid for process in node_processes(node)}
        assert driver in [parent.pid for parent in worker.parents()][:2]
        assert (worker.nice(), Path(f"/proc/{worker.pid}/oom_score_adj").read_text()) == (15, "1000\n")
    assert not any(process.command.startswith(b"ray::Worker") for process in living() if process.is_of_home())
    wait_until(lambda: all(node.busy for node in pool.describe().active), "the nodes to be busy")
    jobs.cancel(handle.job_id)
    assert_ended(pids_of(found))
    wait_until(lambda: not any(node.busy for node in pool.describe().active), "the CPUs to be free")


class Look(TrainingCallback):
    """Write what user code finds in a worker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def before_training(self, model: Any) -> Any:
        """Called once per worker."""
        import ray
        import xgboost

        ray.init(logging_level="ERROR", log_to_driver=False)
        free = ray.available_resources().get("CPU", 0.0)
        ray.shutdown()
        # A lean library has no estimators.
        found = [os.environ[NODE_TAG], tempfile.gettempdir(), xgboost.compat.SKLEARN_INSTALLED, free]
        (self._folder / str(os.getpid())).write_text(json.dumps(found))
        return model


def test_user_code_has_the_whole_library_and_its_node_and_finds_the_reserved_cpus_in_ray(
    pool: ComputePool, rows: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "found"
    folder.mkdir()
    XGBEstimator(
        2,
        callbacks=[Look(folder)],
        scaling_config=XGBScalingConfig(num_workers=2, num_cpu_per_worker=1),
        run_config=RunConfig(pool_name=pool.name),
    ).fit(DataConnector.from_parquet(str(rows)), ["a", "b"], "y")
    found = [json.loads(file.read_text()) for file in folder.iterdir()]
    nodes = {node_id for node_id, *_ in found}
    assert len(nodes) == 2
    assert nodes < {node.id for node in node_rows()}
    assert sorted(found) == [[node_id, str(node_folder(node_id)), True, 1.0] for node_id in sorted(nodes)]


def kill_template(name: str, worker: psutil.Process) -> None:
    worker.parent().kill()


def kill_raylet(name: str, worker: psutil.Process) -> None:
    raylet_of(row_of(name)).kill()


def kill_supervisor(name: str, worker: psutil.Process) -> None:
    ProcessId.from_json(row_of(name).supervisor).signal(signal.SIGKILL)


NODE_LOST = "was lost: the raylet of its node ended, so the node is lost"


@pytest.mark.timeout(300)
def test_a_training_survives_what_is_killed_around_its_workers_and_ends_with_its_driver(
    pool: ComputePool, rows: Path
) -> None:
    """Workers that start after the template was killed are no forks, but belong to nodes, too."""
    kills: list[tuple[Callable[[str, psutil.Process], None], str]] = [
        (kill_raylet, NODE_LOST),
        (kill_supervisor, NODE_LOST),
        (kill_template, "was lost: the process that started it ended"),
    ]
    handle = forever(pool, rows, "xgboost", 2)
    found = training(handle)
    for restarts, (kill, cause) in enumerate(kills, 1):
        name, [worker] = next((name, each) for name, each in found.items() if not row_of(name).is_head)
        kill(name, worker)
        lost = pids_of(found)
        found = training(handle, restarts)
        [line] = [line for line in handle.logs() if f"(restart {restarts} of {RESTARTS})" in line]
        assert f"node {name}, pid {worker.pid}) {cause}" in line or (kill is kill_template and cause in line)
        assert_ended(lost)
    driver_of(handle).signal(signal.SIGKILL)
    assert_ended(pids_of(found))
    with pytest.raises(JobFailedError, match="was killed"):
        handle.wait(on_log=None)


def test_a_lightgbm_training_goes_on_if_a_worker_is_paused_while_it_waits_for_another(
    pool: ComputePool, rows: Path
) -> None:
    """The kernel ends a receive with a time-out when a stopped process continues, and LightGBM fails then."""
    handle = forever(pool, rows, "lightgbm", 2)
    busy, waiting = (psutil.Process(pid) for pid in pids_of(training(handle)))
    before = -1.0

    def waits() -> bool:
        nonlocal before
        now = sum(waiting.cpu_times()[:2])
        before, is_same = now, now == before
        return is_same and waiting.status() == psutil.STATUS_SLEEPING

    def lines() -> list[str]:
        return list(handle.logs())

    def restarts() -> bool:
        return any("(restart 1 of" in line for line in lines())

    while not restarts():
        busy.suspend()
        wait_until(waits, "the other worker to wait")
        waiting.suspend()
        wait_until(lambda: waiting.status() == psutil.STATUS_STOPPED, "the other worker to stop")
        waiting.resume()
        seen = len(lines())
        busy.resume()
        # Between two segments a worker waits for the driver, not for the other worker: then the training goes on.
        wait_until(lambda seen=seen: restarts() or len(lines()) > seen + 4, "a restart, or more rounds", 60)
    training(handle, 1)
    assert any("a pause of its process has broken LightGBM's connection" in line for line in handle.logs())
    jobs.cancel(handle.job_id)
