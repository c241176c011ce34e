"""The links of a training task in Airflow's UI."""

from __future__ import annotations

import pytest

from shoal.airflow.links import links_of
from shoal.jobs import JobSpec
from shoal.pool.spec import PoolSpec
from tests.support.job_results import result_of

LOCAL, CLUSTER = PoolSpec.parse("local://p"), PoolSpec.parse("ray://lab?address=http://10.0.0.5:8265")
SPEC = {"dataset": {"paths": ["/x"]}, "input_cols": ["x"], "label_col": "y"}
REGISTER = {"model": "flight delays", "metric": "rmse", "holdout": {"paths": ["/holdout"]}}


@pytest.mark.parametrize(
    ("uri", "result", "pool", "links"),
    [
        ("sqlite:////m.db", {"mlflow_run_id": "r"}, LOCAL, {}),
        ("http://mlflow:5000/", {}, LOCAL, {}),
        (
            "http://me:secret@mlflow:5000/",
            {"mlflow_run_id": "r", "model_version": "7"},
            CLUSTER,
            {
                "MLflow run": "http://mlflow:5000/#/runs/r",
                "Model version": "http://mlflow:5000/#/models/flight%20delays/versions/7",
                "Ray dashboard": "http://10.0.0.5:8265",
            },
        ),
    ],
)
def test_a_link_is_what_a_browser_can_open(uri, result, pool, links):
    spec = JobSpec.parse({**SPEC, "tracking": {"uri": uri}, "register": REGISTER})
    assert links_of(spec, result_of(**result), pool) == links
