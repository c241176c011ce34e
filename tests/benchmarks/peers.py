"""Ways to train the same model from the same Parquet files, each as its own documentation does it.

Each is opened once, with the cluster that it needs, and then trains as often as it is asked to. Every way gets as many
threads: `workers` workers of one thread, or one process of as many.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from shoal.training.boosting.request import WorkerStats
from tests.benchmarks.datasets import Data

if TYPE_CHECKING:
    from shoal import RunConfig

_PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2)."""

# Before Ray is imported: without these it may listen beyond loopback and report home.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

Library = Literal["xgboost", "lightgbm"]


@dataclass(frozen=True)
class Trained:
    """What one training took.

    Attributes:
        seconds: From the files to the model.
        model: The model, as its library writes it.
        workers: What each worker did; only shoal tells.
    """

    seconds: float
    model: bytes
    workers: tuple[WorkerStats, ...] = ()


Fit = Callable[[Data], Trained]


@contextmanager
def plain(library: Library, workers: int) -> Iterator[Fit]:
    """One process, which reads with Arrow into a quantised matrix: the fastest way there is without a cluster."""
    import numpy as np
    import pyarrow.parquet as pq

    def xgboost_fit(data: Data) -> Trained:
        import xgboost

        began = time.perf_counter()
        table = pq.read_table(list(data.files), columns=[*data.features, data.label])
        matrix = xgboost.QuantileDMatrix(table.select(data.features), table[data.label].to_numpy(), nthread=workers)
        booster = xgboost.train({"nthread": workers}, matrix, data.rounds)
        return Trained(time.perf_counter() - began, bytes(booster.save_raw("ubj")))

    def lightgbm_fit(data: Data) -> Trained:
        import lightgbm

        began = time.perf_counter()
        table = pq.read_table(list(data.files), columns=[*data.features, data.label])
        label = table[data.label].to_numpy().astype(np.float32)
        params = {"objective": "regression", "num_threads": workers, "verbosity": -1}
        booster = lightgbm.train(params, lightgbm.Dataset(table.select(data.features), label), data.rounds)
        return Trained(time.perf_counter() - began, booster.model_to_string().encode())

    yield xgboost_fit if library == "xgboost" else lightgbm_fit


@contextmanager
def shoal(library: Library, workers: int, external_memory: bool = False, threads: int = 1) -> Iterator[Fit]:
    """shoal on a Ray of its own; from the second training on its gang is warm."""
    import ray

    cpus = workers * threads
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield partial(_shoal_fit, library, workers, threads, external_memory, None)
    ray.shutdown()


@contextmanager
def own_pool(options: str) -> Iterator[str]:
    """A pool of one node without Ray, in a home of its own; yields its name.

    Args:
        options: Further options of its URI.
    """
    from shoal import ComputePool

    # The pool's processes do not descend from this one. As their reaper, it gets them as children, and the benchmark
    # counts their memory.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as home:
        os.environ["SHOAL_HOME"] = home
        pool = ComputePool(f"local://bench?ray=false&{options}").up()
        yield pool.name
        pool.down()


@contextmanager
def shoal_pool(library: Library, workers: int) -> Iterator[Fit]:
    """shoal as its users have it: each training is a job on a pool of one node, which is up and has no Ray."""
    from shoal import RunConfig

    with own_pool(f"cpus_per_node={workers}") as name:
        config = RunConfig(pool_name=name, tracking=None)  # the peers log no run, either
        yield partial(_shoal_fit, library, workers, 1, False, config)


def _shoal_fit(
    library: Library, workers: int, threads: int, external_memory: bool, config: RunConfig | None, data: Data
) -> Trained:
    from shoal.data import DataConnector
    from shoal.distributors.lightgbm import LightGBMEstimator, LightGBMScalingConfig
    from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig

    size = {"num_workers": workers, "num_cpu_per_worker": threads}
    began = time.perf_counter()
    estimator = (
        XGBEstimator(data.rounds, scaling_config=XGBScalingConfig(**size), run_config=config)
        if library == "xgboost"
        else LightGBMEstimator(data.rounds, scaling_config=LightGBMScalingConfig(**size), run_config=config)
    )
    files = DataConnector.from_parquet(list(data.files))
    estimator.fit(files, data.features, data.label, external_memory=external_memory or None)
    seconds = time.perf_counter() - began
    result = estimator.get_result()
    return Trained(seconds, result.model, result.workers)


@contextmanager
def shoal_external(library: Library, workers: int) -> Iterator[Fit]:
    """The same, with the quantised rows on disk."""
    with shoal(library, workers, external_memory=True) as fit:
        yield fit


@contextmanager
def dask(library: Library, workers: int) -> Iterator[Fit]:
    """`xgboost.dask` and `lightgbm.dask` on a local cluster of processes."""
    import dask.dataframe
    from distributed import Client, LocalCluster

    with (
        tempfile.TemporaryDirectory() as scratch,
        LocalCluster(
            workers, threads_per_worker=1, dashboard_address=None, local_directory=scratch, memory_limit=0
        ) as cluster,
        Client(cluster) as client,
    ):

        def read(data: Data) -> Any:
            frame = dask.dataframe.read_parquet(list(data.files), columns=[*data.features, data.label])
            # Read once: features and label read by themselves would have partitions that do not match.
            return frame.persist()

        def xgboost_fit(data: Data) -> Trained:
            from xgboost import dask as dxgb

            began = time.perf_counter()
            frame = read(data)
            matrix = dxgb.DaskQuantileDMatrix(client, frame[list(data.features)], frame[data.label])
            booster = dxgb.train(client, {"nthread": 1}, matrix, data.rounds)["booster"]
            return Trained(time.perf_counter() - began, bytes(booster.save_raw("ubj")))

        def lightgbm_fit(data: Data) -> Trained:
            import lightgbm

            began = time.perf_counter()
            frame = read(data)
            model = lightgbm.DaskLGBMRegressor(n_estimators=data.rounds, client=client, n_jobs=1, verbosity=-1)
            model.fit(frame[list(data.features)], frame[data.label])
            return Trained(time.perf_counter() - began, model.booster_.model_to_string().encode())

        yield xgboost_fit if library == "xgboost" else lightgbm_fit


@contextmanager
def ray_train(library: Library, workers: int) -> Iterator[Fit]:
    """Ray Train's trainers, reporting once, at the end: after every round takes them several times as long."""
    import ray
    import ray.data
    import ray.train
    from ray.train import RunConfig, ScalingConfig

    # Ray Data needs CPUs of its own to read with, or the training waits for its rows for good.
    ray.init(address="local", num_cpus=2 * workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False

    def fit(data: Data) -> Trained:
        if library == "xgboost":
            from ray.train.xgboost import RayTrainReportCallback
            from ray.train.xgboost import XGBoostTrainer as Trainer
        else:
            from ray.train.lightgbm import LightGBMTrainer as Trainer
            from ray.train.lightgbm import RayTrainReportCallback

        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as storage:
            trainer = Trainer(
                _train_xgboost if library == "xgboost" else _train_lightgbm,
                train_loop_config={"label": data.label, "rounds": data.rounds},
                datasets={"train": ray.data.read_parquet(list(data.files), columns=[*data.features, data.label])},
                scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
                run_config=RunConfig(storage_path=storage),
            )
            booster: Any = RayTrainReportCallback.get_model(trainer.fit().checkpoint)
        seconds = time.perf_counter() - began
        written = booster.save_raw("ubj") if library == "xgboost" else booster.model_to_string().encode()
        return Trained(seconds, bytes(written))

    yield fit
    ray.shutdown()


def _train_xgboost(config: dict[str, Any]) -> None:
    import ray.train
    import xgboost

    frame = ray.train.get_dataset_shard("train").materialize().to_pandas()
    matrix = xgboost.DMatrix(frame.drop(config["label"], axis=1), label=frame[config["label"]], nthread=1)
    _report(xgboost.train({"nthread": 1}, matrix, config["rounds"]), "model.ubj")


def _train_lightgbm(config: dict[str, Any]) -> None:
    import lightgbm
    import ray.train
    from ray.train.lightgbm import get_network_params

    # LightGBM refuses the columns of pandas' Arrow types, which Ray Data hands over.
    frame = ray.train.get_dataset_shard("train").materialize().to_pandas().astype("float32")
    rows = lightgbm.Dataset(frame.drop(config["label"], axis=1), label=frame[config["label"]])
    # tree_learner: without it every worker trains a model of its own rows.
    params = {"objective": "regression", "num_threads": 1, "verbosity": -1, "tree_learner": "data",
              "pre_partition": True, **get_network_params()}  # fmt: skip
    _report(lightgbm.train(params, rows, config["rounds"]), "model.txt")


def _report(booster: Any, name: str) -> None:
    """What Ray Train's own callback does after the last round; it would report metrics after every round, too."""
    import ray.train

    with tempfile.TemporaryDirectory() as folder:
        booster.save_model(os.path.join(folder, name))
        first = ray.train.get_context().get_world_rank() == 0
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder) if first else None)
