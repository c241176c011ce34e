"""Ways to run the same PyTorch function in several processes of one thread, each as its own documentation does it.

Each is opened once, with the cluster that it needs, and then trains as often as it is asked to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks import ddp, peers

# Before Ray and Spark are imported: without these they may listen beyond loopback, and Ray report home.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


@dataclass(frozen=True)
class Ran:
    """What one training took.

    Attributes:
        seconds: The whole call.
        function: From the call until rank 0 was in the function.
        first_step: From the call until rank 0 had done its first step.
        steps_per_second: Rank 0's, after those that warm up.
    """

    seconds: float
    function: float
    first_step: float
    steps_per_second: float


Run = Callable[[int], Ran]
"""Trains so many steps."""


@contextmanager
def torchrun(workers: int) -> Iterator[Run]:
    """torchrun, which is cold each time."""

    def call(steps: int, notes: str) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        subprocess.run([*torchrun, "-m", ddp.__name__, str(steps), notes], check=True,
                       env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip

    yield _timed(call)


@contextmanager
def shoal(workers: int) -> Iterator[Run]:
    """shoal on a Ray of its own."""
    import ray

    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as artifacts:
        yield _distributor(workers, artifact_location=artifacts)
    ray.shutdown()


@contextmanager
def shoal_pool(workers: int) -> Iterator[Run]:
    """shoal as its users have it: each training is a job on a pool of one node, which is up and has no Ray."""
    with peers.own_pool(f"libraries=torch&cpus_per_node={workers}") as name:
        yield _distributor(workers, pool_name=name, tracking=None)


def _distributor(workers: int, **config: Any) -> Run:
    from shoal import RunConfig
    from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig

    def call(steps: int, notes: str) -> None:
        scaling = PyTorchScalingConfig(num_nodes=1, num_workers_per_node=workers)
        PyTorchDistributor(ddp.train, scaling, RunConfig(**config)).run(steps, notes)

    return _timed(call)


@contextmanager
def ray_train(workers: int) -> Iterator[Run]:
    """Ray Train on a Ray of its own; it makes the process group itself."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def call(steps: int, notes: str) -> None:
        with tempfile.TemporaryDirectory() as storage:
            TorchTrainer(
                lambda config: ddp.train(**config),
                train_loop_config={"steps": steps, "notes": notes},
                torch_config=TorchConfig("gloo"),
                scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
                run_config=RunConfig(storage_path=storage),
            ).fit()

    yield _timed(call)
    ray.shutdown()


@contextmanager
def spark(workers: int) -> Iterator[Run]:
    """PySpark's TorchDistributor on a Spark cluster of this machine, with an executor for each process."""
    with _torch_distributor(workers, f"local-cluster[{workers},1,1024]", local_mode=False) as run:
        yield run


@contextmanager
def spark_driver(workers: int) -> Iterator[Run]:
    """The same on Spark's driver: a torchrun that it calls."""
    with _torch_distributor(workers, "local[1]", local_mode=True) as run:
        yield run


@contextmanager
def _torch_distributor(workers: int, master: str, local_mode: bool) -> Iterator[Run]:
    import pyspark

    os.environ["PYSPARK_PYTHON"] = sys.executable
    with tempfile.TemporaryDirectory() as home:
        # Executors write their logs into Spark's home, which is the installed package otherwise.
        for part in Path(pyspark.__file__).parent.iterdir():
            Path(home, part.name).symlink_to(part)
        os.environ["SPARK_HOME"] = home
        from pyspark import cloudpickle
        from pyspark.ml.torch.distributor import TorchDistributor
        from pyspark.sql import SparkSession

        settings: dict[str, Any] = {"spark.ui.enabled": False, "spark.driver.host": "127.0.0.1"}
        session = SparkSession.builder.master(master).config(map=settings).getOrCreate()
        cloudpickle.register_pickle_by_value(ddp)  # its processes cannot import what is not installed

        def call(steps: int, notes: str) -> None:
            TorchDistributor(workers, local_mode=local_mode, use_gpu=False).run(ddp.train, steps, notes)

        yield _timed(call)
        session.stop()


def _timed(call: Callable[[int, str], None]) -> Run:
    def run(steps: int) -> Ran:
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder, "notes.json")
            began = time.time()
            call(steps, str(notes))
            seconds = time.time() - began
            said = json.loads(notes.read_text())
        return Ran(seconds, said["called"] - began, said["first_step"] - began, said["steps_per_second"])

    return run
