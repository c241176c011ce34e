"""The examples in the README and the guides, and how a reader runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLE = re.compile(r"<!-- example( that needs a GPU)?: ([a-z-]+) -->\n```(python|diff)\n(.*?)```", re.DOTALL)
"""An example: a program, or a diff from a program for another product to one for shoal."""


MIGRATED = """
import runpy, sys
from airflow.__main__ import main
files, sys.argv = sys.argv[1:], ["airflow", "db", "migrate"]
main()
for file in files:
    runpy.run_path(file, run_name="__main__")
"""
"""What runs files after `airflow db migrate`, in one process: Airflow takes seconds to import."""


def one_side(language: str, code: str, sign: str) -> str:
    """Of a diff, the program whose own lines have this sign; any other code as it is."""
    if language != "diff":
        return code
    return "".join(line[1:] or line for line in code.splitlines(keepends=True) if line[0] in (sign, " ", "\n"))


def examples(*, of_gpus: bool = False) -> dict[str, str]:
    """The programs that readers run, by page and name: those that need a GPU, or all others."""
    return {
        f"{page.name}:{name}": one_side(language, code, "+")
        for page in GUIDES
        for needs_gpu, name, language, code in EXAMPLE.findall(page.read_text())
        if bool(needs_gpu) is of_gpus
    }


@pytest.fixture(scope="session")
def flights(tmp_path_factory):
    """The sample data, written as the README says, but fewer: an eighth of the rows, in as many row groups, of the
    three months that the examples name, and of two airports, so that a model for each is two models."""
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("docs")
    subprocess.run([sys.executable, "-m", "shoal.examples.flights"], cwd=folder, check=True)
    months = sorted((folder / "flights").iterdir())
    for month in months[3:]:
        month.unlink()
    for month in months[:3]:
        groups = pq.read_metadata(month).num_row_groups
        rows = pq.read_table(month, filters=[("origin_code", "<", 2)])
        few = rows.take([*range(0, rows.num_rows, 8)])
        pq.write_table(few, month, row_group_size=-(-few.num_rows // groups))
    return folder / "flights"


def run(folder, *command, timeout=480):
    """Run Python in a folder as a reader does, for so many seconds at most, and return what it printed."""
    # Airflow's tests set options for their whole session, of which the folder of its DAGs would hide the reader's.
    readers = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW__")}
    own = {
        "AIRFLOW_HOME": str(folder),
        "PREFECT_HOME": str(folder / "prefect"),
        # A flow's temporary server is given 20 s, which is little on a busy machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        # With SQLite, this service and a request that creates an automation wait for each other if both come at once.
        # No example needs an automation to fire.
        "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    }
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**readers, **own},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr
