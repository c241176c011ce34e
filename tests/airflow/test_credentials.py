"""Credentials for a job from Airflow's connections and Variables."""

from __future__ import annotations

import json

import pytest
from airflow.sdk import Variable

from shoal.airflow.hooks import environment_of
from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.operators import job_operator as operators
from shoal.errors import InvalidArgumentError
from shoal.jobs import credentials
from tests.support.job_store import POOL

NO_MLFLOW = {"MLFLOW_TRACKING_USERNAME": "", "MLFLOW_TRACKING_PASSWORD": "", "MLFLOW_TRACKING_TOKEN": ""}


@pytest.mark.parametrize(
    ("connection", "expected"),
    [
        (
            {"conn_type": "aws", "login": "AKIA", "password": "s3cret", "extra": {"region_name": "eu-west-1"}},
            {
                "AWS_ACCESS_KEY_ID": "AKIA",
                "AWS_SECRET_ACCESS_KEY": "s3cret",
                "AWS_SESSION_TOKEN": "",  # that of the worker's own keys
                "AWS_PROFILE": "",
                "AWS_DEFAULT_REGION": "eu-west-1",
            },
        ),
        (
            {"conn_type": "aws", "extra": {"endpoint_url": "http://minio:9000"}},
            {"AWS_ENDPOINT_URL": "http://minio:9000", "MLFLOW_S3_ENDPOINT_URL": "http://minio:9000"},
        ),
        (
            {"conn_type": "http", "login": "me", "password": "s3cret"},
            {**NO_MLFLOW, "MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "s3cret"},
        ),
        ({"conn_type": "mlflow", "password": "s3cret"}, {**NO_MLFLOW, "MLFLOW_TRACKING_TOKEN": "s3cret"}),
        (
            {"conn_type": "databricks", "host": "x.example", "password": "s3cret"},
            {"DATABRICKS_HOST": "https://x.example", "DATABRICKS_TOKEN": "s3cret"},
        ),
        (
            {"conn_type": "google_cloud_platform", "extra": {"key_path": "/keys/x.json"}},
            {"GOOGLE_APPLICATION_CREDENTIALS": "/keys/x.json"},
        ),
    ],
)
def test_a_connection_becomes_the_variables_of_its_library(monkeypatch, connection, expected):
    monkeypatch.setenv("AIRFLOW_CONN_STORAGE", json.dumps(connection))
    assert environment_of(["storage"]) == expected
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of the worker")
    assert credentials.from_environment(expected) == {name: value for name, value in expected.items() if value}


@pytest.mark.parametrize(
    ("connection", "says"),
    [
        (
            {"conn_type": "ftp"},
            'connection "storage" of type .ftp. has no credentials for a job: .*type aws, databricks',
        ),
        ({"conn_type": "google_cloud_platform"}, "has no key_path"),
        ({"conn_type": "aws", "extra": {"role_arn": "arn"}}, "install apache-airflow-providers-amazon"),
    ],
)
def test_what_no_variable_can_carry_is_refused(monkeypatch, connection, says):
    monkeypatch.setenv("AIRFLOW_CONN_STORAGE", json.dumps(connection))
    with pytest.raises(InvalidArgumentError, match=says):
        environment_of(["storage"])


def test_the_job_gets_them_and_no_field_of_the_task_has_them(monkeypatch, context, spec, store):
    monkeypatch.setenv("AIRFLOW_CONN_STORAGE", json.dumps({"conn_type": "mlflow", "password": "t0ken"}))
    monkeypatch.setenv("AIRFLOW_VAR_HF_TOKEN", "hf-s3cret")
    monkeypatch.setattr(Variable, "get", lambda name, default: {"HF_TOKEN": "hf-s3cret"}.get(name, default))
    given = {}

    def submit(spec, **arguments):
        given.update(arguments)
        raise InvalidArgumentError("enough")

    monkeypatch.setattr("shoal.jobs.submit", submit)
    monkeypatch.setattr(operators, "show_links", lambda links, ti: None)
    task = DistributedTrainOperator(
        task_id="train", pool_name=POOL, spec=spec, credential_conn_ids=["storage"], owner="flights"
    )
    with pytest.raises(InvalidArgumentError, match="enough"):
        task.submit_job(spec, context)

    assert given["team"] == "flights"
    assert given["environment"]["MLFLOW_TRACKING_TOKEN"] == "t0ken"
    assert credentials.secrets_of(["HF_TOKEN"], {}, given["secret_of"]) == {"HF_TOKEN": "hf-s3cret"}
    with pytest.raises(InvalidArgumentError, match="secret_env names NOT_THERE"):
        credentials.secrets_of(["NOT_THERE"], {}, given["secret_of"])
    assert "t0ken" not in str({name: getattr(task, name) for name in task.template_fields})
