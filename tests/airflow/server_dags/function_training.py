"""Functions that run on every rank: as decorated tasks, and by value in an operator, which waits deferred."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from airflow.sdk import dag, task

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

POOL = "{{ var.value.shoal_retrain_pool }}"
FACTOR = 3


def total_of(number: float) -> float:
    """The sum over the ranks; it is of this file, which the nodes do not have."""
    import torch

    torch.distributed.init_process_group("gloo")
    total = torch.tensor([number])
    torch.distributed.all_reduce(total)
    return float(total) * FACTOR


@dag(schedule=None, start_date=datetime(2013, 1, 1, tzinfo=UTC), default_args={"owner": "tests"}, tags=["tests"])
def function_training() -> None:
    @task
    def number() -> float:
        return 0.5

    @task.distributed(num_workers=2, pool_name=POOL, spec={"hyper_params": {"run": "{{ run_id }}"}})
    def decorated(number: float, dag_id: str, ds_nodash: str | None = None) -> dict[str, Any]:
        from shoal.distributors.pytorch import get_context

        context = get_context()
        return {"rank": context.get_rank(), "total": total_of(number), "dag": dag_id, **context.get_hyper_params()}

    @task
    def compare(results: list[dict[str, Any]]) -> bool:
        return results[0]["total"] == results[1]["total"]

    with pool_for_run(size=2, pool_name=POOL):
        operator = DistributedTrainOperator(
            task_id="operator",
            framework="pytorch",
            train_func=total_of,
            op_args=[1.0],
            spec={"scaling_config": {"num_nodes": 2}, "tracking": None},
            pool_name=POOL,
            deferrable=True,
        )
        results = decorated(number(), "{{ dag.dag_id }}")
        operator >> results
        compare(results)


function_training()
