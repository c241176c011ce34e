from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.airflow import home  # noqa: F401 - before anything imports Airflow
from tests.support.job_store import head, spec, store  # noqa: F401

RUN = "airflow:tests:a_dag/a_run"


@pytest.fixture
def context():
    """As much of a task's context as the operators use."""
    return {
        "dag_run": SimpleNamespace(dag_id="a_dag", run_id="a_run"),
        "ti": SimpleNamespace(task_id="train", map_index=-1, try_number=1, max_tries=0),
    }


@pytest.fixture
def record(record_testsuite_property):
    """A function that writes a measured figure, by its name, into the report of `--junitxml`."""
    return record_testsuite_property
