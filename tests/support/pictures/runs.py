"""Pictures of real runs: the terminal of `make run`, the run in Airflow's grid, and `make run-prefect` in Prefect."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, sync_playwright

from examples import prefect_run
from examples.airflow_run import DAG_ID, DAGS
from examples.local_airflow import USER, LocalAirflow
from shoal.state.home import subfolder
from tests.support import ROOT, browser
from tests.support.homes import new_home
from tests.support.pictures import FOLDER
from tests.support.pictures.files import compress, recording
from tests.support.waiting import wait_until

_SIZE = {"width": 1280, "height": 720}

_PATIENCE_MS = 180_000
"""Maximum time of a page to load. On 2 busy cores, Airflow's first page took 20 s."""


def make_airflow() -> None:
    """Record `make run` for a month after a run for the month before, and then show both runs in Airflow."""
    with new_home() as home:
        _run("airflow_run", home, month=11)
        (FOLDER / "make-run.svg").write_text(recording("make run", _run("airflow_run", home, month=12)))
        # The runs are in the database of the example's Airflow.
        with LocalAirflow(subfolder("airflow"), [DAGS]) as airflow, _page() as page:
            newest = airflow.call("GET", f"/dags/{DAG_ID}/dagRuns?order_by=-start_date")["dag_runs"][0]
            page.goto(f"{airflow.url}/dags/{DAG_ID}/runs/{newest['dag_run_id']}")
            page.fill("input[name=username]", USER)
            page.fill("input[name=password]", airflow.password)
            page.click("button[type=submit]")
            page.get_by_text("DistributedTrainOperator").wait_for()
            _save(page, FOLDER / "airflow-run.png")


def make_prefect() -> None:
    """Run `make run-prefect`, and show the flow run on a page of Prefect."""
    with new_home() as home, pytest.MonkeyPatch.context() as patch:
        _run("prefect_run", home, month=12)
        patch.setenv("PREFECT_UI_STATIC_DIRECTORY", str(home / "prefect-ui"))  # by default in the installed package
        # The flow run is in the database of the example's server.
        with prefect_run._server(subfolder("prefect"), ui=True) as environment, _page() as page:
            address = environment["PREFECT_API_URL"]
            flow_run = httpx.post(f"{address}/flow_runs/filter", json={"limit": 1}).json()[0]
            page.goto(f"{address.removesuffix('/api')}/runs/flow-run/{flow_run['id']}")
            page.get_by_text("Beginning flow run").wait_for()
            _save(page, FOLDER / "prefect-run.png")


def _run(example: str, home: Path, month: int) -> str:
    """Run an example as in a terminal, and return its output without paths of this machine."""
    ran = subprocess.run(
        [sys.executable, "-m", f"examples.{example}", "--month", str(month)],
        cwd=ROOT,
        env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise SystemExit(f"{example} failed:\n{ran.stdout}")
    tools = os.path.relpath(Path(sys.executable).parent, ROOT)
    output = _replaced(ran.stdout, {str(home): "/home/you/.shoal", f"`{tools}/": "`.venv/bin/"})
    for private in (str(ROOT), str(Path.home()), socket.gethostname()):
        if re.search(rf"(?<!\w){re.escape(private)}(?!\w)", output):
            raise SystemExit(f"the output of {example} contains {private}:\n{output}")
    return output


def _replaced(output: str, names: dict[str, str]) -> str:
    """Replace names, and fill the rows of tables with spaces to their old width."""
    lines = []
    for line in output.splitlines():
        width = len(line)
        for name, neutral in names.items():
            line = line.replace(name, neutral)
        lines.append(line[:-1].rstrip().ljust(width - 1) + line[-1] if line.endswith("│") else line)
    return "\n".join(lines)


@contextmanager
def _page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        chromium = browser.launched(playwright)
        page = chromium.new_page(viewport=_SIZE)
        page.set_default_timeout(_PATIENCE_MS)
        yield page
        chromium.close()


def _save(page: Page, path: Path) -> None:
    """Save a picture of a page when the page does not change any more."""
    wait_until(_unchanged(page), "a page that does not change", seconds=_PATIENCE_MS / 1000, every=2)
    page.screenshot(path=path)
    compress(path)


def _unchanged(page: Page) -> Callable[[], bool]:
    pictures = [b"", b""]

    def look() -> bool:
        pictures[:] = pictures[1], page.screenshot()
        return pictures[0] == pictures[1]

    return look
