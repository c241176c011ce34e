"""Every example in the README and the docs is run as it stands there, in a folder that has the flights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.examples.flights_data import month_files

ROOT = Path(__file__).parents[1]
EXAMPLE = re.compile(r"<!-- example: ([a-z-]+) -->\n```python\n(.*?)```", re.DOTALL)
FOUND = {
    f"{page.name}:{name}": code
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for name, code in EXAMPLE.findall(page.read_text())
}


def test_no_python_block_is_left_out():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        assert page.read_text().count("```python") == len(EXAMPLE.findall(page.read_text())), page.name


@pytest.fixture(scope="module")
def flights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    month_files([1], folder / "flights")
    return folder


@pytest.mark.ray
@pytest.mark.parametrize("name", sorted(FOUND))
def test_example(name, flights, fresh_home):
    own = {
        "AIRFLOW_HOME": str(fresh_home / "airflow"),
        "PREFECT_HOME": str(fresh_home / "prefect"),
        # A flow's temporary server is given 20 s, which is little on a busy machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    }
    ran = subprocess.run(
        [sys.executable, "-c", FOUND[name]],
        cwd=flights,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
