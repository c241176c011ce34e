"""Define the two DAGs that clean up regularly: ``pool_janitor`` and ``retention``."""

from __future__ import annotations

from shoal.airflow.janitor import pool_janitor, retention

pool_janitor()
retention()
