"""Three trainings as Airflow tasks on a cluster that is reached over the network; as a script, it runs its DAG.

The last task writes what the tasks have found and returned into the file ``$SAID``.
"""

from __future__ import annotations

import importlib.util
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from airflow.sdk import dag, get_current_context, task

from shoal import ComputePool, RunConfig
from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

PLACE = {"pool_name": "lab", "artifact_location": "s3://bucket/jobs"}
BOOSTED: dict[str, Any] = {"input_cols": ["a", "b"], "label_col": "y"}
WORKERS = {"num_workers": 2, "num_cpu_per_worker": 1}


@dag(schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC))
def remote_trainings() -> None:
    @task
    def preflight() -> dict[str, list[str]]:
        for missing in ("ray", "xgboost", "lightgbm", "torch"):
            assert importlib.util.find_spec(missing) is None, missing
        found = ComputePool("lab").preflight()
        return {
            "broken": [str(each) for each in found if each.status == "broken"],
            "checked": [each.name for each in found],
        }

    @task
    def lightgbm() -> dict[str, Any]:
        import pandas as pd

        from shoal.distributors.lightgbm import LightGBMEstimator, LightGBMScalingConfig

        rows = range(300)
        frame = pd.DataFrame({"a": rows, "b": [i % 7 for i in rows], "y": [i % 2 for i in rows]})
        estimator = LightGBMEstimator(
            n_estimators=5, scaling_config=LightGBMScalingConfig(**WORKERS), run_config=RunConfig(pool_name="lab")
        )
        return estimator.submit(frame, **BOOSTED).job.wait().to_dict()

    @task.distributed(
        num_workers=2,
        pool_name="lab",
        spec={
            "tracking": None,
            "run_config": {
                **PLACE,
                "secret_env": ["MY_PIN"],
                "packages": ["tidbit==1.0"],
                "code": [os.environ["CODE"]],
                "env": {"UV_FIND_LINKS": os.environ["WHEELS"], "UV_OFFLINE": "1"},
            },
        },
    )
    def function() -> dict[str, Any]:
        import features
        import tidbit
        import torch

        pin = os.environ["MY_PIN"]
        print("the pin is", pin)
        return {
            "answer": tidbit.ANSWER,
            "columns": features.COLUMNS,
            "sum": torch.ones(3).sum().item(),
            "reversed": pin[::-1],
        }

    @task
    def say(checked: dict[str, Any], from_frame: dict[str, Any], results: list[Any]) -> None:
        from shoal.jobs import attach, list_jobs, load_training

        from_files = get_current_context()["ti"].xcom_pull(task_ids="xgboost")
        returned = {"preflight": checked, "xgboost": from_files, "lightgbm": from_frame, "function": results}
        boosted = [attach(returned[name]["job_id"]).wait(on_log=None) for name in ("xgboost", "lightgbm")]
        said = {
            **returned,
            "bytes": [len(load_training(result).model) for result in boosted],
            "logs": {job.job_id: list(attach(job.job_id).logs()) for job in list_jobs("lab")},
        }
        Path(os.environ["SAID"]).write_text(json.dumps(said))

    with pool_for_run(size=2, pool_name=os.environ["POOL"]):
        checked = preflight()
        xgboost = DistributedTrainOperator(
            task_id="xgboost",
            pool_name="lab",
            spec={
                **BOOSTED, "framework": "xgboost", "dataset": {"paths": ["s3://bucket/train"]}, "n_estimators": 5,
                "tracking": None, "scaling_config": WORKERS, "run_config": PLACE,
            },
        )  # fmt: skip
        from_frame, results = lightgbm(), function()
        checked >> [xgboost, from_frame, results]
        xgboost >> say(checked, from_frame, results)


trainings = remote_trainings()
if __name__ == "__main__":
    trainings.test()
