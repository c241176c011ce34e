"""The page in a real Chromium: access, movement, hostile names, the keyboard, accessibility."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal import RunConfig
from shoal.data import DataConnector
from shoal.jobs import JobSpec, submit
from shoal.pool.api import ComputePool
from shoal.state import Store
from shoal.state.schema import Job, JobState, Node, NodeState
from shoal.ui.server import redirect_file
from tests.support import ui_systems
from tests.support.browser import serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server

AXE = "axe-core@4"


@pytest.fixture
def address(store: Store) -> Iterator[str]:
    """The link with the token to a server in this process."""
    with serving() as link:
        yield link


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, from the npm registry."""
    folder = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed, which gets axe-core")
    got = subprocess.run([npm, "pack", AXE, "--silent"], cwd=folder, capture_output=True, text=True, check=False)
    if got.returncode:
        pytest.skip(f"axe-core is not to be had from the npm registry: {got.stderr.strip()[:200]}")
    with tarfile.open(folder / got.stdout.split()[-1]) as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


def test_the_link_opens_the_page_and_other_tabs_need_it(address, opened):
    stranger = opened(address.partition("?")[0])
    assert "shoal ui" in stranger.inner_text("main")
    page = opened(address)
    page.wait_for_selector("#live.on")
    assert "token" not in page.url
    assert "shoal pool up" in page.inner_text("main")


def test_the_browser_is_sent_to_the_page_by_a_file_that_only_the_user_can_read(address, opened):
    file = redirect_file(address)

    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    opened(file.as_uri()).wait_for_selector("#live.on")


def test_a_pool_that_scales_and_a_job_that_trains_are_seen_to_move(address, opened, store):
    ui_systems.busy(store)
    page = opened(address)
    card = page.locator(".card[data-key=retrain]")
    card.get_by_text("3 of 5").wait_for()
    job = opened(address)
    job.goto(f"{address.partition('?')[0]}jobs/flights-2026-11-23")
    job.wait_for_selector("[data-plot][data-drawn]")

    with store.transaction() as session:
        session.get_one(Node, "retrain-3").state = NodeState.READY
        row = session.get_one(Job, ("flights-2026-11-23", 1))
        row.progress, row.heartbeat_at = ui_systems.progress(120), 1.0
        session.merge(ui_systems.metrics("flights-2026-11-23", [85, 119]))

    card.get_by_text("4 of 5").wait_for()
    job.get_by_text("round 120 of 200").first.wait_for()
    job.wait_for_selector(".plot .scatterlayer .js-line")  # two points make a line
    with store.transaction() as session:
        session.get_one(Job, ("flights-2026-11-23", 1)).state = JobState.FAILED
        session.get_one(Job, ("flights-2026-11-23", 1)).error = "the node was lost"
        session.get_one(Job, ("flights-2026-11-23", 1)).ended_at = 2e9
    job.locator(".alert").get_by_text("the node was lost").wait_for()


def test_the_plots_of_a_search_are_drawn_when_they_are_opened(address, opened, store):
    ui_systems.search(store)
    page = opened(address)
    page.goto(f"{address.partition('?')[0]}jobs/a-search")
    page.wait_for_selector("#live.on")
    assert page.evaluate("window.Plotly === undefined")
    for kind, mark in (("history", ".js-line"), ("slices", ".points path"), ("bars", ".bars path")):
        page.locator(f"#plot-of-{kind} summary").click()
        page.wait_for_selector(f"#plot-{kind}[data-drawn] {mark}")
    assert page.locator("#plot-slices .subplot").count() == 2
    assert page.locator("img").count() == 0


def test_hostile_names_are_text(address, opened, store):
    ui_systems.hostile(store)
    page = opened(address)
    for path in (
        "",
        "jobs",
        "jobs/job-1",
        "jobs/job-2",
        "pools/retrain",
        "models",
        "models/%3Cimg%20src=x%20onerror=alert(1)%3E",
    ):
        page.goto(address.partition("?")[0] + path)
        page.wait_for_selector("#live.on")
        page.wait_for_selector("[data-plot]:not([data-drawn])", state="detached")
        assert ui_systems.HOSTILE in page.inner_text("main"), path
        assert page.locator("img").count() == 0, path


def test_a_lease_is_released_with_the_keyboard_alone(address, opened, store):
    ui_systems.busy(store)
    page = opened(address)
    page.goto(f"{address.partition('?')[0]}pools/features")
    page.wait_for_selector("#live.on")
    release = page.get_by_role("button", name="Release the lease of python:anna@workbench/4711")
    for _ in range(60):
        page.keyboard.press("Tab")
        if release.evaluate("each => each === document.activeElement"):
            break
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Release this lease?")
    dialog.wait_for()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert len(ComputePool("features", store=store).describe().leases) == 1

    page.keyboard.press("Enter")
    dialog.wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")

    page.get_by_text("No run holds a lease.").wait_for()
    assert "was released" in page.inner_text("#notice")
    assert ComputePool("features", store=store).describe().leases == ()


def test_a_failure_is_dismissed(address, opened, store):
    ui_systems.broken(store)
    page = opened(address)
    page.wait_for_selector("#live.on")
    page.get_by_role("button", name="Dismiss the failure of flights-2026-11-23").click()
    page.get_by_role("dialog", name="Dismiss this failure?").get_by_role("button", name="Dismiss").click()
    page.get_by_text("the failure of job flights-2026-11-23 was dismissed").wait_for()
    page.locator(".attention [data-key=job-flights-2026-11-23-1]").wait_for(state="detached")
    assert page.locator(".attention [data-key=job-digits-cnn-1]").count() == 1


def test_a_field_that_is_edited_stays_when_the_page_changes(address, opened, store):
    ui_systems.busy(store)
    page = opened(address)
    page.goto(f"{address.partition('?')[0]}pools/retrain")
    page.wait_for_selector("#live.on")
    page.get_by_label("At most").fill("9")
    with store.transaction() as session:
        session.get_one(Node, "retrain-3").state = NodeState.READY
    page.get_by_text("4 of 5").wait_for()
    assert page.get_by_label("At most").input_value() == "9"


def test_the_page_works_in_a_sandboxed_frame_below_a_prefix(opened, store):
    ui_systems.busy(store)
    rights = "allow-scripts allow-same-origin allow-forms allow-downloads"  # those of Airflow's frame
    with serving(within=f'<iframe src="/shoal/pools/features" sandbox="{rights}"></iframe>') as link:
        page = opened(link)
        page.goto(link.replace("/shoal/", "/outer"))
        frame = page.frame_locator("iframe")
        frame.locator("#live.on").wait_for()
        frame.get_by_role("button", name="Release the lease").click()
        frame.get_by_role("button", name="Release", exact=True).click()
        frame.get_by_text("No run holds a lease.").wait_for()
        frame.get_by_role("link", name="Jobs", exact=True).click()
        frame.get_by_role("link", name="flights-2026-11-23").click()
        frame.get_by_role("link", name="MLflow run").click()
        frame.get_by_text("copy this address: http://mlflow.internal:5000/#/runs/").wait_for()
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(address, opened, store, axe, scheme):
    ui_systems.busy(store)
    with store.transaction() as session:
        session.get_one(Node, "features-0").state = NodeState.FAILED
        session.get_one(Node, "features-0").error = "no memory"
    page = opened(address, color_scheme=scheme, bypass_csp=True)
    for path in (
        "",
        "jobs",
        "jobs/flights-2026-11-23",
        "jobs/flights-1",
        "pools/retrain",
        "pools/features",
        "models",
        "models/flight-delays",
        "history",
    ):
        page.goto(address.partition("?")[0] + path)
        page.wait_for_selector("#live.on")
        page.wait_for_selector("[data-plot]:not([data-drawn])", state="detached")
        page.evaluate(axe)
        found = page.evaluate("() => axe.run()")
        serious = [
            (each["id"], [node["html"] for node in each["nodes"]])
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        assert serious == [], path


@pytest.fixture
def command(store: Store) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`shoal ui` as a process of its own, and the link that it prints."""
    started = subprocess.Popen(
        [sys.executable, "-c", "from shoal.cli import main; main()", "ui", "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert started.stdout is not None
    link = started.stdout.readline().removeprefix("shoal ui: ").strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/\?token=\S+", link)
    yield started, link
    started.kill()
    started.communicate()


def test_the_command_ends_cleanly_although_a_page_is_open(command, opened):
    started, link = command
    page = opened(link)
    page.wait_for_selector("#live.on")
    started.send_signal(signal.SIGTERM)
    wait_until(lambda: started.poll() is not None, "the end of the command")
    assert (started.returncode, started.stderr.read()) == (0, "")
    page.context.close()


@pytest.fixture
def watched(store: Store) -> Iterator[ComputePool]:
    """A real pool, which starts with its head."""
    pool = ComputePool("local://watched?max_nodes=2").up()
    yield pool
    pool.down()


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_real_pool_scales_and_a_real_training_moves_until_it_is_cancelled_on_the_page(
    command, opened, watched, tmp_path
):
    data = tmp_path / "data.parquet"
    pq.write_table(pa.table({"x": [float(number) for number in range(5_000)], "y": [0.0, 1.0] * 2_500}), data)
    _, link = command
    page = opened(link)
    card = page.locator(".card[data-key=watched]")
    card.get_by_text("1 of 1").wait_for()
    page.goto(f"{link.partition('?')[0]}pools/watched")
    watched.scale(2, is_async=True)
    page.get_by_text("1 of 2").wait_for()
    page.get_by_text("2 of 2").wait_for()

    job = submit(
        JobSpec(
            framework="xgboost",
            dataset=DataConnector.from_parquet(data),
            input_cols=("x",),
            label_col="y",
            n_estimators=10_000_000,
            scaling_config={"num_workers": 2},
            run_config=RunConfig(pool_name="watched", job_id="endless"),
            tracking=None,
        )
    )
    page.goto(f"{link.partition('?')[0]}jobs/endless")
    rounds = page.locator(".big")

    def shown() -> int:
        return int(rounds.inner_text().split()[1].replace(",", ""))

    rounds.wait_for()
    first = shown()
    wait_until(lambda: shown() > first, "another round on the page")
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel the job").click()
    page.locator(".badge").get_by_text("cancelled").first.wait_for()
    assert job.status().state is JobState.CANCELLED
