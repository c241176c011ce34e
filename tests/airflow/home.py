"""Airflow's settings for the tests: Airflow reads them once, when it is first imported, so this comes before it."""

from __future__ import annotations

import os

os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
os.environ["AIRFLOW__SHOAL__DEPLOYMENT"] = "tests"  # most tests have no Airflow with Variables
os.environ["AIRFLOW__CORE__DAGS_FOLDER"] = f"{os.environ['AIRFLOW_HOME']}/dags"
