"""Three trainings as Airflow tasks that do a round when the test permits it (`tests/support/remote_trainings.py`)."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

import cloudpickle
from airflow.sdk import dag, task

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run
from shoal.jobs import AnyJobSpec
from tests.support import remote_trainings
from tests.support.remote_trainings import PLACE, ROUNDS, Settings

cloudpickle.register_pickle_by_value(remote_trainings)  # the nodes do not have this module

CONFIG = {"artifact_location": PLACE, "max_restarts": "{{ params.max_restarts }}"}


class PacedTraining(DistributedTrainOperator):
    """A boosting training on files, or on a frame that each try of the task makes."""

    def job_spec(self, context: Any) -> AnyJobSpec:
        settings = Settings(context["params"]["folder"], run_config=self.spec["run_config"])
        return remote_trainings.boosted(settings, self.task_id, self.data)

    @cached_property
    def data(self) -> Any:
        if self.task_id == "xgboost":
            return {"paths": ["s3://bucket/train"]}
        return remote_trainings.frame_connector().to_spec()


@dag(
    schedule=None,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    params={"folder": "", "max_restarts": 0},
    default_args={"retries": 9, "retry_delay": timedelta(seconds=5)},
)
def paced_trainings() -> None:
    @task.distributed(
        num_workers=2,
        pool_name="lab",
        spec={
            "tracking": None,
            "run_config": {
                **CONFIG,
                "secret_env": ["MY_PIN"],
                "packages": ["tidbit==1.0"],
                "env": {"UV_FIND_LINKS": os.environ["WHEELS"], "UV_OFFLINE": "1"},
            },
        },
    )
    def pytorch(folder: str) -> dict[str, Any]:
        import tidbit

        total = remote_trainings.stepwise(Settings(folder))()
        return {"total": total, "answer": tidbit.ANSWER, "reversed": os.environ["MY_PIN"][::-1]}

    with pool_for_run(size=2, pool_name=os.environ["POOL"]):
        for name in ("xgboost", "lightgbm"):
            PacedTraining(
                task_id=name,
                pool_name="lab",
                spec={"framework": name, "dataset": {"paths": ["s3://bucket/train"]}, "input_cols": ["a", "b"],
                      "label_col": "y", "n_estimators": ROUNDS, "run_config": CONFIG},
            )  # fmt: skip
        pytorch("{{ params.folder }}")


paced_trainings()
