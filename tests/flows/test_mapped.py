"""Trainings that a flow maps over specs, on a real pool."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect import flow
from prefect.runtime import flow_run

from shoal.jobs import list_jobs
from shoal.prefect import distributed_train, pool_lease
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.server, pytest.mark.long]


def test_four_of_five_mapped_trainings_succeed_and_the_fifth_fails_alone(server, real_pool, tmp_path):
    data = tmp_path / "data.parquet"
    pq.write_table(pa.table({"x": [float(number) for number in range(100)], "y": [0.0, 1.0] * 50}), data)
    fields = {"dataset": {"paths": [str(data)]}, "input_cols": ["x"], "label_col": "y", "tracking": None}
    specs = [
        {**fields, "n_estimators": 2, "scaling_config": {"num_workers": 1}, "params": params}
        for params in ({}, {}, {"objective": "reg:nonsense"}, {}, {})
    ]
    real_pool.scale(1)

    @flow
    def retrain_many():
        with pool_lease(2, pool_name="tests"):
            trainings = distributed_train.map(specs, pool_name="tests")  # and nothing in the block waits for them
        assert real_pool.describe().leases == ()
        return str(flow_run.id), trainings.result(raise_on_failure=False)

    run_id, results = retrain_many()

    failed = results.pop(2)
    assert "reg:nonsense" in str(failed)
    assert [result["rows"] for result in results] == [100] * 4
    mine = [job for job in list_jobs("tests") if job.holder == f"prefect:{run_id}"]
    assert sorted(job.state.value for job in mine) == ["failed"] + ["succeeded"] * 4
    assert len({job.job_id for job in mine}) == 5
    wait_until(lambda: len(real_pool.get_nodes()) == 1, "the pool as it was")
