"""Batch prediction: shoal, Ray Data's `map_batches` and one plain process write the same predictions as Parquet.

All predict with the same XGBoost model, loaded through MLflow. shoal and Ray Data run on a Ray that is up, warmed with
one prediction before. Run it with ``python -m tests.benchmarks.batch_prediction``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.datasets import MAKE, Data, small
from tests.benchmarks.report import table
from tests.benchmarks.turns import take_turns

_ROUNDS = 100
_BATCH = 50_000
"""Rows of a batch of Ray Data and of the plain process: a row group of the data."""


@dataclass(frozen=True)
class Order:
    """What is to be predicted.

    Attributes:
        data: The rows.
        model: Folder of the MLflow model.
        output: Folder for the predictions, new with every call.
    """

    data: Data
    model: str
    output: str

    def fresh(self) -> str:
        """A folder that is not there yet."""
        return f"{self.output}/{uuid.uuid4().hex}"


Predict = Callable[[Order], float]
"""From an order to the seconds that it took."""


@contextmanager
def shoal(workers: int) -> Iterator[Predict]:
    """shoal on a Ray of its own; from the second prediction on its gang is warm."""
    import ray

    from shoal.data import DataConnector
    from shoal.distributors import predict
    from shoal.training.demand import ScalingConfig

    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def run(order: Order) -> float:
        began = time.perf_counter()
        done = predict(
            order.model,
            DataConnector.from_parquet(list(order.data.files)),
            order.fresh(),
            scaling_config=ScalingConfig(num_workers=workers, num_cpu_per_worker=1),
        )
        seconds = time.perf_counter() - began
        assert done.rows == order.data.rows
        return seconds

    yield run
    ray.shutdown()


@contextmanager
def ray_data(workers: int) -> Iterator[Predict]:
    """`map_batches` with one actor a worker."""
    import ray

    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")

    class Model:
        """Ray Data's way: an actor that loads the model once."""

        def __init__(self, model: str, features: Sequence[str]) -> None:
            import mlflow

            self.booster = mlflow.xgboost.load_model(model)
            self.features = list(features)

        def __call__(self, batch: Any) -> Any:
            return batch.assign(
                prediction=self.booster.inplace_predict(batch[self.features].to_numpy("float32", na_value=float("nan")))
            )

    # One CPU more than workers: Ray Data's tasks that read and write need room beside the actors.
    ray.init(address="local", num_cpus=workers + 1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def run(order: Order) -> float:
        began = time.perf_counter()
        rows = ray.data.read_parquet(list(order.data.files)).map_batches(
            Model,
            fn_constructor_args=(order.model, order.data.features),
            batch_format="pandas",
            batch_size=_BATCH,
            compute=ray.data.ActorPoolStrategy(size=workers),
        )
        rows.write_parquet(order.fresh())
        return time.perf_counter() - began

    yield run
    ray.shutdown()


@contextmanager
def one_process(workers: int) -> Iterator[Predict]:
    """A loop over the row groups, as a script would do it, with as many threads as there are workers."""
    import mlflow
    import pyarrow as pa
    import pyarrow.parquet as pq

    def run(order: Order) -> float:
        began = time.perf_counter()
        booster = mlflow.xgboost.load_model(order.model)
        booster.set_param({"nthread": workers})
        folder = Path(order.fresh())
        folder.mkdir()
        for number, path in enumerate(order.data.files):
            writer = None
            for batch in pq.ParquetFile(path).iter_batches(_BATCH):
                frame = batch.to_pandas()
                frame["prediction"] = booster.inplace_predict(frame[list(order.data.features)].to_numpy())
                rows = pa.Table.from_pandas(frame)
                writer = writer or pq.ParquetWriter(folder / f"{number}.parquet", rows.schema)
                writer.write_table(rows)
            if writer:
                writer.close()
        return time.perf_counter() - began

    yield run


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time batch prediction.")
    parser.add_argument("--data", choices=MAKE, default="2m", help="dataset (default 2m)")
    parser.add_argument("--workers", type=int, default=2, help="workers or threads (default 2)")
    parser.add_argument("--repeat", type=int, default=3, help="turns, of which the fastest counts (default 3)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="sb-") as name:
        folder = Path(name)
        os.environ["SHOAL_HOME"] = str(folder / "home")
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        data, warming = MAKE[args.data](folder), small(folder / "january")
        (folder / "out").mkdir()
        orders = {each: Order(each, _model(each, folder), str(folder / "out")) for each in (warming, data)}
        sides = {
            "shoal": lambda: _side(shoal, args.workers),
            "Ray Data, map_batches": lambda: _side(ray_data, args.workers),
            "one process": lambda: _side(one_process, args.workers),
        }
        taken = take_turns(sides, orders[warming], orders[data], args.repeat)
        ours = min(taken["shoal"].turns)
        rows = []
        for side, found in taken.items():
            if found.failure:
                rows.append([side, found.failure, "", "", ""])
                continue
            best = min(found.turns)
            rate = f"{data.rows / best / 1000:,.0f}"
            rows.append([side, f"{best:.1f}", rate, f"{best / ours:.2f}", f"{found.peak_bytes >> 20:,}"])
        head = [f"{data.name}, {_ROUNDS} trees", "seconds", "1,000 rows/s", "x shoal's time", "MiB, whole tree"]
        print(table(head, rows), flush=True)


def _side(opened: Any, workers: int) -> Any:
    from tests.benchmarks.side import Side

    return Side(opened, workers)


def _model(data: Data, folder: Path) -> str:
    """Train on a part of the rows, and save the model as MLflow does."""
    import mlflow
    import pyarrow.parquet as pq
    import xgboost

    rows = pq.read_table(data.judged_by).to_pandas()
    matrix = xgboost.QuantileDMatrix(rows[list(data.features)], rows[data.label])
    booster = xgboost.train({"max_depth": 6}, matrix, _ROUNDS)
    path = folder / f"model-{uuid.uuid4().hex[:6]}"
    mlflow.xgboost.save_model(booster, path)
    return str(path)


if __name__ == "__main__":
    main()
