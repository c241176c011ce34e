"""Links of a training task in Airflow's UI: the MLflow run, the registered model, and the dashboard of the Ray cluster.

A link is known when the job has succeeded. If a service has no address that a browser can open, such as an SQLite file
of MLflow, there is no link.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from shoal.jobs import AnyJobSpec, JobResult
    from shoal.pool.spec import PoolSpec

_WEB = ("http://", "https://")


class _Link(BaseOperatorLink):
    """Link whose address the operator has stored in its attribute `links`."""

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the address; empty if there is none. Airflow calls this when the task has ended, in its process."""
        address: str = getattr(operator, "links", {}).get(self.name, "")
        return address


class MlflowRunLink(_Link):
    """Link to the job's run in MLflow."""

    name = "MLflow run"


class ModelVersionLink(_Link):
    """Link to the version of the registered model in MLflow."""

    name = "Model version"


class RayDashboardLink(_Link):
    """Link to the dashboard of a ``ray://`` pool's cluster. The dashboard of a local pool needs a token, so it has no
    link."""

    name = "Ray dashboard"


LINKS = (MlflowRunLink(), ModelVersionLink(), RayDashboardLink())


def links_of(spec: AnyJobSpec, result: JobResult, pool: PoolSpec) -> dict[str, str]:
    """Return the addresses of a job's links by name.

    :param spec: Spec of the job, as it was submitted.
    :param result: Result of the job.
    :param pool: Definition of the pool on which the job ran.
    """
    found: dict[str, str] = {}
    # A user's browser has credentials of its own.
    mlflow = re.sub("//[^/@]*@", "//", (spec.tracking and spec.tracking.uri) or "", count=1)
    if mlflow.startswith(_WEB):
        ui = f"{mlflow.rstrip('/')}/#"
        if result.mlflow_run_id:
            found[MlflowRunLink.name] = f"{ui}/runs/{result.mlflow_run_id}"
        if spec.register_as is not None and result.model_version:
            model = quote(spec.register_as.model, safe="")
            found[ModelVersionLink.name] = f"{ui}/models/{model}/versions/{result.model_version}"
    if pool.address:
        found[RayDashboardLink.name] = pool.address
    return found
