"""A flow leases as many nodes as its training needs. The plan needs the training's library, which the environment of
the newest Prefect does not have."""

from __future__ import annotations

import pandas as pd
import pytest
from prefect import flow
from prefect.runtime import flow_run

from shoal.jobs import list_jobs
from shoal.pool.api import ComputePool
from shoal.prefect import pool_lease, scale_cluster
from tests.support.pool_processes import nothing_left

pytestmark = pytest.mark.server


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_size_is_planned_in_the_name_of_the_flow_run(server, fresh_home, tmp_path):
    pd.DataFrame({"x": range(100), "y": range(100)}).to_parquet(tmp_path / "rows.parquet")
    spec = {"dataset": {"paths": [str(tmp_path)]}, "input_cols": ["x"], "label_col": "y"}
    two = {**spec, "scaling_config": {"num_workers": 2, "num_cpu_per_worker": 1}}

    @flow
    def planned():
        with pool_lease("auto", plan_for=two, pool_name="local://planned?max_nodes=3&ray=false") as pool:
            scale_cluster("auto", plan_for=spec, pool_name="planned")
            return len(pool.get_nodes()), pool.describe().target, str(flow_run.id)

    nodes, target, run_id = planned()
    assert (nodes, target) == (2, 2), "the lease has two nodes, and the base demand is one"
    assert [job.holder for job in list_jobs()] == [f"prefect:{run_id}", f"prefect:{run_id}/1"]
    ComputePool("planned").down()
    nothing_left()
