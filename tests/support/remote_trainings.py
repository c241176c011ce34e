"""Three trainings at once on a cluster that is reached over the network: the program of an orchestrator without Ray.

``python remote_trainings.py JSON`` prints the outcome of each as JSON. The JSON has the fields of `Settings`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pandas as pd

from shoal import ComputePool
from shoal.data import DataConnector
from shoal.errors import ShoalError
from shoal.jobs import AnyJobSpec, JobSpec, load_results, shipped_code, spec_of, submit
from shoal.training.boosting.params import UserCode

ROUNDS = 60

PLACE = "s3://bucket/jobs"


@dataclass(frozen=True)
class Settings:
    """What the test wants.

    Attributes:
        folder: Folder on the cluster in which workers leave a byte for each round, and get their permits.
        job: First part of the ids of the jobs. Without it, shoal makes the ids.
        tries: How often a training that fails is submitted.
        run_config: Further options of the jobs.
    """

    folder: str
    job: str = ""
    tries: int = 1
    run_config: dict[str, Any] | None = None

    def config(self, name: str) -> dict[str, Any]:
        """Options of one job."""
        own = {"pool_name": "lab", "artifact_location": PLACE, "checkpoint_every": 10}
        named = {"job_id": f"{self.job}-{name}"} if self.job else {}
        return {**own, **named, **(self.run_config or {})}


def pace_of(settings: Settings, name: str) -> Callable[[], None]:
    """What a worker calls in each round: it waits for a permit, a byte in a pipe, until the test lets it hurry."""
    begun = f"{settings.folder}/{name}"

    def pace() -> None:
        import os

        # Opened for writing, too, so that neither this call nor that of another worker waits for the test.
        permits = os.open(f"{begun}.permits", os.O_RDWR)
        if not os.path.exists(f"{begun}.hurries"):
            os.read(permits, 1)
        os.close(permits)
        with open(f"{begun}.{os.getpid()}", "ab") as rounds:
            rounds.write(b".")

    return pace


def boosted(settings: Settings, framework: str, data: Any) -> JobSpec:
    """A training with an objective of its own, which paces it."""
    pace = pace_of(settings, framework)

    def logistic(margins: Any, rows: Any) -> tuple[Any, Any]:
        import numpy as np

        pace()
        chance = 1 / (1 + np.exp(-margins))
        return chance - rows.get_label(), chance * (1 - chance)

    return JobSpec(
        framework=framework, dataset=data, input_cols=("a", "b"), label_col="y", n_estimators=ROUNDS, tracking=None,
        params={"max_depth": 2}, user_code=shipped_code.store_user_code(UserCode(objective=logistic)),
        scaling_config={"num_workers": 2, "num_cpu_per_worker": 1}, run_config=settings.config(framework),
    )  # fmt: skip


def stepwise(settings: Settings) -> Callable[[], float]:
    """A function that reduces a number over its ranks in each step, and saves a checkpoint after each tenth."""
    pace = pace_of(settings, "pytorch")

    def train() -> float:
        import torch

        from shoal.distributors.pytorch import get_context

        context = get_context()
        torch.distributed.init_process_group("gloo")
        state = context.get_checkpoint() or {"step": 0, "total": torch.zeros(1)}
        for step in range(state["step"], ROUNDS):
            pace()
            number = torch.tensor([float(context.get_rank() + step)])
            torch.distributed.all_reduce(number)
            state = {"step": step + 1, "total": state["total"] + number}
            if state["step"] % 10 == 0:
                context.save_checkpoint(state)
        return float(state["total"])

    return train


def function(settings: Settings) -> AnyJobSpec:
    """A job with the function of `stepwise`."""
    config = {key: value for key, value in settings.config("pytorch").items() if key != "checkpoint_every"}
    fields = {"scaling_config": {"num_nodes": 2}, "run_config": config, "tracking": None}
    return spec_of(fields, framework="pytorch", train_func=stepwise(settings))


def frame_connector() -> DataConnector:
    """A frame of 300 rows, staged."""
    rows = range(300)
    return DataConnector.from_dataframe(
        pd.DataFrame({"a": rows, "b": [i % 7 for i in rows], "y": [i % 2 for i in rows]})
    )


def outcome(spec: AnyJobSpec, tries: int) -> dict[str, Any]:
    """Submit a job until one of its attempts succeeds, as the tries of a task do."""
    errors: list[str] = []
    for _ in range(tries):
        try:
            handle = submit(spec)
            result = handle.wait(on_log=None)
            value = load_results(result).results if spec.framework == "pytorch" else result.model_digest
            return {"attempt": handle.attempt, "value": value, "errors": errors}
        except ShoalError as error:
            errors.append(f"{type(error).__name__}: {error}")
            ComputePool("lab").wait_for_nodes(2, timeout=300)
    return {"attempt": None, "value": None, "errors": errors}


def main(settings: Settings) -> dict[str, Any]:
    """Train all three on two nodes of the cluster, and let the pool go."""
    pool = ComputePool(os.environ["POOL"]).up()
    pool.scale(2)
    connector = frame_connector()
    specs = {
        "xgboost": boosted(settings, "xgboost", {"paths": ["s3://bucket/train"]}),
        "lightgbm": boosted(settings, "lightgbm", connector.to_spec()),
        "pytorch": function(settings),
    }
    with ThreadPoolExecutor(len(specs)) as threads:
        running = {name: threads.submit(outcome, spec, settings.tries) for name, spec in specs.items()}
    connector.discard_staging()
    pool.down()
    return {name: outcome.result() for name, outcome in running.items()}


if __name__ == "__main__":
    print(json.dumps(main(Settings(**json.loads(sys.argv[1])))))
