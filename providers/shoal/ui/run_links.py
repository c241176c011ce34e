"""Links of the page from the holders of jobs and leases to their runs in Airflow and Prefect."""

from __future__ import annotations

import os

from shoal.links import Link, dag_run_link, flow_run_link, task_link
from shoal.pool.holder import DagRunHolder, run_of
from shoal.state import Store, deployments


class RunLinks:
    """The addresses of all Airflow deployments, read from the store once."""

    def __init__(self, store: Store) -> None:
        self._base_urls = deployments.base_urls(store)

    def link(self, holder: str, task_key: str | None = None) -> Link | None:
        """Return the link to the run whose name is `holder`, or to the run's task instance. None if the holder is no
        run, or if the address of Airflow or Prefect is not known."""
        if (run := DagRunHolder.of(holder)) is not None:
            # A name without a deployment is from an older shoal. Only the Airflow of this process is known then.
            base_url = (
                os.environ.get("AIRFLOW__API__BASE_URL")
                if run.deployment is None
                else self._base_urls.get(run.deployment)
            )
            task_id, _, index = (task_key or "").rpartition("/")
            task = task_link(base_url, run.dag_id, run.run_id, task_id, int(index)) if task_id else None
            return task or dag_run_link(base_url, run.dag_id, run.run_id)
        kind, _, name = run_of(holder).partition(":")
        return flow_run_link(name) if kind == "prefect" else None
