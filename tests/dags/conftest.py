from __future__ import annotations

from tests.airflow import home  # noqa: F401 - before anything imports Airflow
