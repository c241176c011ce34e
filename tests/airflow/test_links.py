"""The links of a training task in Airflow's UI."""

from __future__ import annotations

import pytest
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization

from shoal.airflow.links import LINKS, links_of
from shoal.jobs import JobSpec
from shoal.pool.spec import PoolSpec
from shoal.state.schema import JobState
from tests.airflow.test_operators import RESULT, ended, meanwhile, on_fake_head, train  # noqa: F401 - a fixture
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


def test_the_task_has_the_links_of_its_job_and_airflow_knows_their_names(on_fake_head, spec, context, monkeypatch):  # noqa: F811
    monkeypatch.setitem(RESULT, "mlflow_run_id", "r")
    with DAG("a_dag", schedule=None) as dag:
        task = train({**spec.document(), "tracking": {"uri": "http://mlflow:5000"}})
    driver = meanwhile(ended, JobState.SUCCEEDED)
    task.execute(context)
    driver.join()
    assert [link.get_link(task, ti_key=None) for link in LINKS] == ["http://mlflow:5000/#/runs/r", "", ""]
    read = DagSerialization.from_dict(DagSerialization.to_dict(dag)).get_task("train")
    assert set(read.extra_links) == {link.name for link in LINKS}
