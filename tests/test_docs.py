"""Every example in the README and the docs is run as a reader runs it: a file in a folder that has the flights.

A reader of the guides tries one after the other, in one Python session and with a pool that is up: imports are paid and
Ray is started once for them all.
"""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from shoal import ComputePool
from shoal.pool.api import list_pools
from tests.support.guides import EXAMPLE, GUIDES, MIGRATED, ROOT, examples, one_side, run
from tests.support.homes import new_home

PAGES = sorted({*ROOT.glob("*.md"), *GUIDES})
CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)
THEIRS = re.compile(r"```(py|diff)\n(.*?)```", re.DOTALL)
"""Code for another product, in the guides to migrating: a block of its own, or the first side of a diff."""

FOUND = examples()

DAGS = {"README.md:airflow": "dags/retrain.py", "tutorial-airflow.md:airflow-dag": "dags/delays.py"}
"""Examples that are DAGs which run when they are called as programs, and the files in which a reader saves them."""

SESSION = """
import runpy, sys
for file in sys.argv[1:]:
    print("---", file, flush=True)
    runpy.run_path(file, run_name="__main__")
"""
"""What runs files one after the other, each as a program of its own, in one process."""


ON_A_POOL = "on a pool that is up"

CONNECTED = [
    "training.md:estimator",
    "training.md:lightgbm",
    *(f"pytorch.md:{name}" for name in ("pytorch", "distributed", "ray-launch")),
]
"""Of the examples on this pool, those that run connected to its Ray cluster, without a job each."""

CONNECT = """
import os
from shoal import ComputePool
os.environ.update(ComputePool("guides").endpoint().driver_environment())
import ray
ray.init(log_to_driver=False)
"""
DISCONNECT = "import ray; ray.shutdown()"

ON_TINY_NODES = [
    "pools.md:scaling",
    *(f"leases.md:{name}" for name in ("leases", "exclusive-leases", "only-team")),
    "operations.md:history",
]
"""Examples of sizes and leases, which need no Ray: they run on tiny nodes, in the process of the tests."""

MIGRATING = sorted(page.name for page in (ROOT / "docs" / "migrating").iterdir())
"""Guides of which the first example brings up a pool, which all others use, and the last one takes it down."""

AFTER = {
    "prefect.md": "jobs.md",
    "tutorial-prefect.md": "jobs.md",
    "tutorial-migrating.md": "databricks.md",
    "prefect-deployments.md": "jobs.md",
    "airflow-messages.md": "airflow.md",
    "airflow-approvals.md": "airflow.md",
    "champion.md": "jobs.md",
    "specs.md": "jobs.md",
    "pytorch.md": "airflow.md",
    "ray.md": "databricks.md",
    "snowflake.md": "databricks.md",
    **dict.fromkeys(("pools.md", "leases.md", "ray-clusters.md"), "databricks.md"),
}
"""Pages whose examples run after those of another page, which imports the same: they name their pools wherever they use
one, or have the only one that is up, so that it does not matter which other pools the store has."""


def sessions() -> dict[str, list[str]]:
    """The examples that run in one process.

    The guides' trainings that name no pool share one, and the pool of `guides_pool`. The README's first example runs
    before any pool is there: what a first user does. Those of Prefect's guides share one temporary Prefect server. The
    others bring up their own pools.
    """
    found: dict[str, list[str]] = {}
    for name in FOUND.keys() - {*DAGS, *ON_TINY_NODES}:
        page = name.partition(":")[0]
        own = page in ("README.md", "prefect.md", "prefect-deployments.md", *MIGRATING) or "local://" in FOUND[name]
        found.setdefault(AFTER.get(page, page) if own else ON_A_POOL, []).append(name)
    return {session: sorted(names, key=list(FOUND).index) for session, names in sorted(found.items())}


def programs(session: str) -> dict[str, str]:
    """What a session runs, one after the other, by names of files."""
    names = sessions()[session]
    files = {name: {f"{name.replace(':', '-')}.py": FOUND[name]} for name in names}
    if session != ON_A_POOL:
        return {file: code for name in names for file, code in files[name].items()}
    connected = {file: code for name in CONNECTED for file, code in files.pop(name).items()}
    jobs = {file: code for each in files.values() for file, code in each.items()}
    return {"connect.py": CONNECT, **connected, "disconnect.py": DISCONNECT, **jobs}


def test_no_python_block_is_left_out():
    for page in GUIDES:
        blocks = re.findall(r"```(?:python|diff)$", page.read_text(), re.MULTILINE)
        assert len(blocks) == len(EXAMPLE.findall(page.read_text())), page.name


@pytest.mark.parametrize("page", MIGRATING)
def test_the_code_for_other_products_is_python(page):
    blocks = THEIRS.findall((ROOT / "docs" / "migrating" / page).read_text())
    assert blocks
    for language, code in blocks:
        compile(one_side(language, code, "-"), page, "exec")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", CODE_BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_the_pages_resolve(page):
    links = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", CODE_BLOCK.sub("", page.read_text()))
    targets = [((page.parent / file).resolve() if file else page, anchor) for file, anchor in links]
    missing = [file for file, _ in targets if not file.exists()]
    missing += [(file.name, anchor) for file, anchor in targets if anchor and anchor not in anchors(file)]
    assert not missing


def test_the_text_of_the_package_has_no_relative_links():
    hooks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    hook = hooks["fancy-pypi-readme"]
    text = "".join((ROOT / fragment["path"]).read_text() for fragment in hook["fragments"])
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert [link for link in links if link.endswith("/docs/migrating/ray.html")]
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.parametrize("name", ON_TINY_NODES)
def test_examples_of_pools(name, tiny, tmp_path):
    file = tmp_path / "example.py"
    file.write_text(FOUND[name])
    runpy.run_path(str(file), run_name="__main__")
    assert {pool.state for pool in list_pools()} <= {"down"}  # each example ends its pools


@pytest.fixture(scope="module")
def home_of_a_reader():
    """One home for the readers of all guides: the first job makes MLflow's database, which takes seconds."""
    with new_home() as folder:
        yield folder


@pytest.fixture
def no_pool_is_up(home_of_a_reader):
    """The home of a reader without a pool, also after a test that failed."""
    for pool in list_pools():
        ComputePool(pool.name).down()
    return home_of_a_reader


@pytest.fixture
def guides_pool(no_pool_is_up):
    """The only pool there is, and so the one that every training is meant for."""
    pool = ComputePool("local://guides?max_nodes=1&cpus_per_node=2").up()
    yield
    pool.down()


@pytest.mark.ray
@pytest.mark.usefixtures("home_of_a_reader")  # asked for within the test, it would set a home that outlives the test
@pytest.mark.timeout(1200)  # the examples of three guides in one process
@pytest.mark.parametrize("session", sessions())
def test_examples(session, flights, tmp_path, request):
    own = {"README.md": "empty_home", ON_A_POOL: "guides_pool"}
    request.getfixturevalue(own.get(session, "no_pool_is_up"))
    (tmp_path / "flights").symlink_to(flights)
    files = programs(session)
    for file, code in files.items():
        (tmp_path / file).write_text(code)
    said = run(tmp_path, "-c", SESSION, *files, timeout=1100)
    assert [line.removeprefix("--- ") for line in said.splitlines() if line.startswith("--- ")] == [*files]


@pytest.mark.ray
@pytest.mark.timeout(600)  # Airflow's own start, a database, a pool and a training
def test_the_dags_of_the_readme_and_of_the_guide_run(flights, no_pool_is_up, tmp_path):
    (tmp_path / "flights").symlink_to(flights)
    (tmp_path / "dags").mkdir()
    for name, file in DAGS.items():
        (tmp_path / file).write_text(FOUND[name])
    said = run(tmp_path, "-c", MIGRATED, *DAGS.values())
    # A test run that fails ends with 0, too.
    ended = re.findall(r"DagRun Finished: dag_id=(\w+),.* state=(\w+)", said)
    assert ended == [("retrain", "success"), ("delays", "success")], said
    # The DAG of the README trains on February, and the guide's on January.
    for month in ("2013-02", "2013-01"):
        rows = pq.read_metadata(flights / f"{month}.parquet").num_rows
        assert f"model trained on {rows} rows" in said, said
