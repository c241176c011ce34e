"""Links of a training task in Airflow's UI: the job's page, its MLflow run, the registered model, and the dashboard of
the Ray cluster.

Airflow shows the link to the job's page while the task runs, and the other links when the job has succeeded. A
service without an address that a browser can open, such as MLflow with an SQLite file, gets no link.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink, get_current_context

from shoal.airflow.settings import has_teams
from shoal.links import dashboard_link, job_page, mlflow_run_link, model_link

if TYPE_CHECKING:
    from shoal.jobs import AnyJobSpec, JobResult
    from shoal.pool.spec import PoolSpec


class _Link(BaseOperatorLink):
    """Link whose address the operator has stored in its attribute `links`."""

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the address of this link; an empty string if the link has no address. Airflow calls this method in the
        process of the task, when the task has ended."""
        address: str = getattr(operator, "links", {}).get(self.name, "")
        return address


class JobPageLink(_Link):
    """Link to the job on shoal's page, with its progress, log and error."""

    name = "Job"


class MlflowRunLink(_Link):
    """Link to the job's run in MLflow."""

    name = "MLflow run"


class ModelVersionLink(_Link):
    """Link to the version of the registered model in MLflow."""

    name = "Model version"


class RayDashboardLink(_Link):
    """Link to the dashboard of a ``ray://`` pool's cluster. Local pools have no such link, because their dashboard
    needs a token."""

    name = "Ray dashboard"


LINKS = (JobPageLink(), MlflowRunLink(), ModelVersionLink(), RayDashboardLink())


def page_links(job_id: str) -> dict[str, str]:
    """Return the address of a job's page in a dict, with the name of the link as the key. The dict is empty if there is
    no page.

    The address begins with ``$SHOAL_UI_URL`` if this variable is set, and otherwise leads to the page in Airflow, in an
    Airflow with several teams to that of the team. Call this function only in a task.

    :param job_id: Id of the job.
    """
    from shoal.airflow.plugin import page_path
    from shoal.airflow.plugin.lazy_app import has_extra

    if (given := job_page(job_id)) is not None:
        return {JobPageLink.name: given}
    team = getattr(get_current_context()["dag_run"], "team_name", None) if has_teams() else None
    path = f"{page_path()}teams/{quote(team, safe='')}/" if team else page_path()
    return {JobPageLink.name: f"{path}jobs/{quote(job_id, safe='')}"} if has_extra() else {}


def show_links(links: Mapping[str, str], ti: Any) -> None:
    """Show links of a task while the task runs. Airflow itself stores the links only when the task has ended.

    :param links: Addresses of the links by name.
    :param ti: The task instance.
    """
    # Airflow's UI reads the links from the database, past an XCom backend that the user has configured.
    with suppress(Exception):  # the links appear when the task has ended
        from airflow.sdk.bases.xcom import BaseXCom

        of = {"dag_id": ti.dag_id, "task_id": ti.task_id, "run_id": ti.run_id, "map_index": ti.map_index}
        for link in LINKS:
            if address := links.get(link.name):
                BaseXCom._set_xcom_in_db(link.xcom_key, address, **of)


def links_of(spec: AnyJobSpec, result: JobResult, pool: PoolSpec) -> dict[str, str]:
    """Return the addresses of a job's links by name.

    :param spec: Spec of the job, as it was submitted.
    :param result: Result of the job.
    :param pool: Definition of the pool on which the job ran.
    """
    uri = spec.tracking.uri if spec.tracking else None
    register, version = spec.register_as, result.model_version
    found = {
        MlflowRunLink.name: mlflow_run_link(uri, result.mlflow_run_id),
        ModelVersionLink.name: model_link(uri, register.model, version) if register and version else None,
        RayDashboardLink.name: dashboard_link(pool.address),
    }
    return page_links(result.job_id) | {name: link.address for name, link in found.items() if link is not None}
