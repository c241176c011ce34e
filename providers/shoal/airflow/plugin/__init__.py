"""Airflow plugin that shows the page with pools, jobs and models inside Airflow, at ``/shoal/``.

API servers, schedulers and workers all load plugins. So this package imports only modules that Airflow has loaded
already, and builds the page at the first request.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin

from shoal.airflow.plugin.lazy_app import LazyApp, has_extra

PREFIX = "/shoal"
"""Path of the page below the base URL of Airflow."""


def page_path() -> str:
    """Return the path of the page, including the path of Airflow's base URL, such as ``/airflow/shoal/``."""
    return f"{urlsplit(conf.get('api', 'base_url', fallback='') or '').path.rstrip('/')}{PREFIX}/"


def _views() -> list[dict[str, Any]]:
    """Return two entries for Airflow's menu: one shows the page in a frame, the other in a browser tab of its own.
    Return no entries if the extra ``ui`` is not installed.

    Airflow's frame allows no new windows, so links to other services work only in the tab.
    """
    if not has_extra():
        return []
    href = page_path()
    return [
        {"name": "Compute pools", "href": href, "destination": "nav", "category": "browse", "url_route": "shoal"},
        {"name": "Compute pools (own tab)", "href": href, "destination": "nav", "category": "browse"},
    ]


class ShoalPlugin(AirflowPlugin):
    """Plugin that Airflow finds through the entry point ``airflow.plugins``."""

    name = "shoal"
    fastapi_apps: list[Any] = [{"app": LazyApp(), "url_prefix": PREFIX, "name": "shoal"}]  # noqa: RUF012 - as Airflow declares it
    external_views: list[Any] = _views()
