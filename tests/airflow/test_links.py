"""The links of a training task in Airflow's UI."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shoal.airflow.operators.job_operator import links_of, page_links
from shoal.jobs import JobSpec
from shoal.pool.spec import PoolSpec
from tests.support.job_results import result_of

LOCAL, CLUSTER = PoolSpec.parse("local://p"), PoolSpec.parse("ray://lab?address=http://10.0.0.5:8265")
SPEC = {"dataset": {"paths": ["/x"]}, "input_cols": ["x"], "label_col": "y"}
JOB = {"Job": "/shoal/jobs/job"}
REGISTER = {"model": "flight delays", "metric": "rmse", "holdout": {"paths": ["/holdout"]}}


@pytest.mark.parametrize(
    ("uri", "result", "pool", "links"),
    [
        ("sqlite:////m.db", {"mlflow_run_id": "r"}, LOCAL, JOB),
        ("http://mlflow:5000/", {}, LOCAL, JOB),
        (
            "http://me:sec@ret@mlflow:5000/?token=secret",
            {"mlflow_run_id": "r", "model_version": "7"},
            CLUSTER,
            {
                **JOB,
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


def test_the_page_of_the_setting_comes_before_the_page_in_airflow(monkeypatch):
    monkeypatch.setenv("SHOAL_UI_URL", "https://me:secret@shoal.example/ui/")
    assert page_links("a job") == {"Job": "https://shoal.example/ui/jobs/a%20job"}

    monkeypatch.delenv("SHOAL_UI_URL")
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example/team/")
    assert page_links("a job") == {"Job": "/team/shoal/jobs/a%20job"}
    monkeypatch.setattr("shoal.airflow.plugin.has_extra", lambda: False)
    assert page_links("a job") == {}


@pytest.mark.parametrize(("team", "path"), [("fraud", "teams/fraud/jobs/job"), (None, "jobs/job")])
def test_a_task_of_a_team_links_to_the_page_of_the_team(monkeypatch, team, path):
    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", "True")
    context = {"dag_run": SimpleNamespace(team_name=team)}
    monkeypatch.setattr("shoal.airflow.operators.job_operator.get_current_context", lambda: context)
    assert page_links("job") == {"Job": f"/shoal/{path}"}
