"""Every example in the README and the docs is run as a reader runs it: a file in a folder that has the flights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = re.compile(r"<!-- example: ([a-z-]+) -->\n```python\n(.*?)```", re.DOTALL)
FOUND = {
    f"{page.name}:{name}": code
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for name, code in EXAMPLE.findall(page.read_text())
}

DAG = "README.md:airflow"


def test_no_python_block_is_left_out():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        assert page.read_text().count("```python") == len(EXAMPLE.findall(page.read_text())), page.name


@pytest.fixture(scope="module")
def flights(tmp_path_factory):
    """The sample data, written as the README says; three months of them, which is all that the examples name."""
    folder = tmp_path_factory.mktemp("docs")
    subprocess.run([sys.executable, "-m", "shoal.examples.flights_data"], cwd=folder, check=True)
    for month in sorted((folder / "flights").iterdir())[3:]:
        month.unlink()
    return folder / "flights"


def run(folder, *command):
    # Airflow's tests set options for their whole session, of which the folder of its DAGs would hide the reader's.
    readers = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW__")}
    own = {
        "AIRFLOW_HOME": str(folder),
        "PREFECT_HOME": str(folder / "prefect"),
        # A flow's temporary server is given 20 s, which is little on a busy machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    }
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**readers, **own},
        capture_output=True,
        text=True,
        timeout=480,  # 200 s here on a machine with a load of 9
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.mark.ray
@pytest.mark.parametrize("name", sorted(FOUND.keys() - {DAG}))
def test_example(name, flights, empty_home, tmp_path):
    (tmp_path / "flights").symlink_to(flights)
    (tmp_path / "example.py").write_text(FOUND[name])
    run(tmp_path, "example.py")


@pytest.mark.ray
@pytest.mark.timeout(600)  # Airflow's own start, a database, a pool and a training
def test_the_readmes_dag_trains_on_the_month_before_its_run(flights, empty_home, tmp_path):
    (tmp_path / "flights").symlink_to(flights)
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "retrain.py").write_text(FOUND[DAG])
    run(tmp_path, "-m", "airflow", "db", "migrate")
    said = run(tmp_path, "dags/retrain.py")
    assert "state=success" in said, said  # a test run that fails ends with 0, too
    assert "model of 23611 rows" in said, said  # February's flights that arrived
