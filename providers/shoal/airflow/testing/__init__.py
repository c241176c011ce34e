"""Check DAG files before they are deployed, with pytest fixtures, the command ``shoal check-dags`` or `check_dags`.

The pytest plugin is loaded in every test session of an environment with shoal. So importing this package loads neither
Airflow nor anything else that takes long.
"""

from __future__ import annotations

from shoal.airflow.testing.check import DagReport, Finding, Rule, check_dags

__all__ = ["DagReport", "Finding", "Rule", "check_dags"]
