"""Build links to shoal's page and to the services around it: Airflow, Prefect, MLflow and Ray.

Only web addresses become links. The module needs no extra, because tasks link to a page that runs elsewhere.
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
    """Return the scheme, host, port and path of an address if a browser can open it; None for any other scheme, and if
    it is not an address.

    Credentials and the query are left out: a query may contain a token, and a user's browser has credentials of its
    own.
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


def run_link(holder: str) -> Link | None:
    """Return the link to the DAG run or flow run that a holder names.

    The addresses of the services are in ``AIRFLOW__API__BASE_URL`` and ``PREFECT_UI_URL``, as Airflow and Prefect
    themselves read them.
    """
    kind, _, name = holder.partition(":")
    if kind == "airflow" and (base := web_address(os.environ.get("AIRFLOW__API__BASE_URL"))):
        dag, _, run = name.partition("/")
        if dag and run:
            return Link("DAG run", f"{base}/dags/{_part(dag)}/runs/{_part(run)}")
    if kind == "prefect" and (base := web_address(os.environ.get("PREFECT_UI_URL"))) and name:
        return Link("Flow run", f"{base}/runs/flow-run/{_part(name)}")
    return None


def mlflow_run_link(tracking_uri: str | None, run_id: str | None) -> Link | None:
    """Return the link to an MLflow run, if the tracking server has a web address."""
    base = web_address(tracking_uri)
    return Link("MLflow run", f"{base}/#/runs/{_part(run_id)}") if base and run_id else None


def model_link(tracking_uri: str | None, model: str, version: str | None = None) -> Link | None:
    """Return the link to a registered model, or to a version of it, if the tracking server has a web address."""
    base = web_address(tracking_uri)
    if base is None:
        return None
    address = f"{base}/#/models/{_part(model)}"
    if not version:
        return Link("Model in MLflow", address)
    return Link("Model version", f"{address}/versions/{_part(version)}")


def dashboard_link(address: str | None) -> Link | None:
    """Return the link to the dashboard of a Ray cluster, if it has a web address."""
    base = web_address(address)
    return Link("Ray dashboard", base) if base else None


def job_page(job_id: str) -> str | None:
    """Return the address of a job's page, if ``SHOAL_UI_URL`` has the address below which `shoal ui` is served.

    Args:
        job_id: Id of the job.
    """
    base = web_address(os.environ.get("SHOAL_UI_URL"))
    return f"{base}/jobs/{_part(job_id)}" if base else None


def _part(text: str) -> str:
    return quote(text, safe="")
