"""The plugin that Airflow finds by the entry point `airflow.plugins`."""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

from shoal.airflow import listeners
from shoal.airflow.deployment import apply_settings


class ShoalListeners(AirflowPlugin):
    """Plugin that listens to failed runs and to the start of components. Airflow loads the plugin at the start of each
    of its processes: scheduler, API server, triggerer, DAG processor, and the process of each task."""

    name = "shoal_listeners"
    listeners = [listeners]  # noqa: RUF012 - Airflow's own shape

    @classmethod
    def on_load(cls, *args: Any, **kwargs: Any) -> None:
        """Set the environment variables of the options in section ``[shoal]``, for this process and the processes that
        it starts."""
        apply_settings()
