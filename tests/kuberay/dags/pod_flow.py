"""A flow whose run is a pod of Prefect's Kubernetes work pool."""

from __future__ import annotations

from typing import Any

from prefect import flow

from shoal.jobs import JobSpec
from shoal.prefect import distributed_train, pool_lease


@flow
def trained_in_a_pod(folder: str, pool: str) -> dict[str, Any]:
    """Lease two nodes, and train."""
    spec = {
        "dataset": {"paths": [f"{folder}/rows.parquet"]},
        "input_cols": ["a", "b"],
        "label_col": "y",
        "params": {"objective": "reg:squarederror", "max_depth": 2},
        "n_estimators": 20,
        "run_config": {"artifact_location": f"{folder}/results"},
    }
    with pool_lease(2, pool_name=pool) as leased:
        return distributed_train(JobSpec.parse(spec), pool_name=leased.name)
