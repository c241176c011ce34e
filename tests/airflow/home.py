"""An `$AIRFLOW_HOME` for the tests: Airflow reads its own once, when it is first imported, so this comes before it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

AIRFLOW_HOME = Path(tempfile.mkdtemp(prefix="shoal-airflow-"))
atexit.register(shutil.rmtree, AIRFLOW_HOME, ignore_errors=True)
os.environ["AIRFLOW_HOME"] = str(AIRFLOW_HOME)
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
os.environ["AIRFLOW__SHOAL__DEPLOYMENT"] = "tests"  # most tests have no Airflow with Variables
os.environ["AIRFLOW__CORE__DAGS_FOLDER"] = str(AIRFLOW_HOME / "dags")
