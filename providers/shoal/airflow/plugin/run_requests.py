"""Build the request to Airflow's API with which a user of the page trains again what failed in a DAG run."""

from __future__ import annotations

from urllib.parse import quote, urlsplit

from airflow.configuration import conf

from shoal.airflow.deployment import deployment_in_database
from shoal.airflow.train_again import instances_text, request_body
from shoal.errors import InvalidArgumentError
from shoal.pool.holder import DagRunHolder
from shoal.ui.app import EngineRequest


def train_again(holder: str) -> EngineRequest:
    """Return the request that clears the failed task instances of a DAG run, and what they need.

    Raises:
        InvalidArgumentError: The holder is no run of this Airflow, or none of the run's tasks has failed.
    """
    run = DagRunHolder.of(holder)
    if run is None or run.deployment not in (None, deployment_in_database()):
        raise InvalidArgumentError(f"{holder} is no run of this Airflow: use the page of its own Airflow")
    body = request_body(run.dag_id, run.run_id)
    base = urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/")
    return EngineRequest(
        f"{base}/api/v2/dags/{quote(run.dag_id, safe='')}/clearTaskInstances",
        body,
        f"Airflow clears {instances_text(body['task_ids'])} of run {run.run_id}. Trainings that have succeeded keep "
        "their results.",
    )
