"""Build links to shoal's page, and to pages of Airflow, Prefect, MLflow and Ray.

Only addresses with http or https become links. This module needs no extra of shoal, because tasks build links to a page
that another process serves.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import quote, urlsplit


@dataclass(frozen=True)
class Link:
    """A link to another service."""

    label: str
    address: str


def web_address(address: str | None) -> str | None:
    """Return an http or https address without its credentials and query; None for any other text.

    Credentials are left out because the user's browser has credentials of its own. The query is left out because it may
    contain a token.
    """
    if not address:
        return None
    try:
        parts = urlsplit(address)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


def dag_run_link(base_url: str | None, dag_id: str, run_id: str) -> Link | None:
    """Return the link to a DAG run; None if the address of Airflow is not known.

    Args:
        base_url: Address of Airflow, as in its option ``[api] base_url``.
        dag_id: Id of the DAG.
        run_id: Id of the DAG run.
    """
    base = web_address(base_url)
    return Link("DAG run", f"{base}/dags/{_part(dag_id)}/runs/{_part(run_id)}") if base and dag_id and run_id else None


def task_link(base_url: str | None, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> Link | None:
    """Return the link to a task instance, with its log; None if the address of Airflow is not known.

    Args:
        base_url: Address of Airflow, as in its option ``[api] base_url``.
        dag_id: Id of the DAG.
        run_id: Id of the DAG run.
        task_id: Id of the task.
        map_index: Map index of the instance; -1 for a task that is not mapped.
    """
    run = dag_run_link(base_url, dag_id, run_id)
    mapped = f"/mapped/{map_index}" if map_index >= 0 else ""
    return Link("Task", f"{run.address}/tasks/{_part(task_id)}{mapped}") if run and task_id else None


def flow_run_link(flow_run_id: str) -> Link | None:
    """Return the link to a flow run of Prefect; None if ``PREFECT_UI_URL``, which Prefect reads, too, is not set."""
    base = web_address(os.environ.get("PREFECT_UI_URL"))
    return Link("Flow run", f"{base}/runs/flow-run/{_part(flow_run_id)}") if base and flow_run_id else None


def mlflow_run_link(tracking_uri: str | None, run_id: str | None) -> Link | None:
    """Return the link to an MLflow run; None if the tracking server has no web address."""
    base = web_address(tracking_uri)
    return Link("MLflow run", f"{base}/#/runs/{_part(run_id)}") if base and run_id else None


def model_link(tracking_uri: str | None, model: str, version: str | None = None) -> Link | None:
    """Return the link to a registered model or to a version of the model; None if the tracking server has no web
    address."""
    base = web_address(tracking_uri)
    if base is None:
        return None
    address = f"{base}/#/models/{_part(model)}"
    if not version:
        return Link("Model in MLflow", address)
    return Link("Model version", f"{address}/versions/{_part(version)}")


def dashboard_link(address: str | None) -> Link | None:
    """Return the link to the dashboard of a Ray cluster; None if the dashboard has no web address."""
    base = web_address(address)
    return Link("Ray dashboard", base) if base else None


def job_page(job_id: str) -> str | None:
    """Return the address of a job's page; None if ``SHOAL_UI_URL`` does not contain the web address of `shoal ui`."""
    base = web_address(os.environ.get("SHOAL_UI_URL"))
    return f"{base}/jobs/{_part(job_id)}" if base else None


def _part(text: str) -> str:
    return quote(text, safe="")
