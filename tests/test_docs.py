"""Every example in the README and the docs is run as a reader runs it: a file in a folder that has the flights.

A reader of the guides tries one after the other, in one Python session and with a pool that is up: imports are paid and
Ray is started once for them all.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from shoal import ComputePool
from tests.support.guides import EXAMPLE, GUIDES, MIGRATED, ROOT, examples, one_side, run

PAGES = sorted({*ROOT.glob("*.md"), *GUIDES})
CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)
THEIRS = re.compile(r"```(py|diff)\n(.*?)```", re.DOTALL)
"""Code for another product, in the guides to migrating: a block of its own, or the first side of a diff."""

FOUND = examples()

DAG = "README.md:airflow"

SESSION = """
import runpy, sys
for file in sys.argv[1:]:
    print("---", file, flush=True)
    runpy.run_path(file, run_name="__main__")
"""
"""What runs files one after the other, each as a program of its own, in one process."""


ON_A_POOL = "on a pool that is up"

MIGRATING = sorted(page.name for page in (ROOT / "docs" / "migrating").iterdir())
"""Guides of which the first example brings up a pool, which all others use, and the last one takes it down."""

AFTER = {"prefect.md": "jobs.md", "pytorch.md": "airflow.md", "ray.md": "databricks.md"}
"""Pages whose examples run after those of another page, which imports the same: they name their pools wherever they use
one, or have the only one that is up, so that it does not matter which other pools the store has."""


def sessions() -> dict[str, list[str]]:
    """The examples that run in one process.

    The guides' trainings that name no pool share one, and the pool of `guides_pool`. The README's first example runs
    before any pool is there: what a first user does. Those of prefect.md share one temporary Prefect server. The others
    bring up their own pools.
    """
    found: dict[str, list[str]] = {}
    for name in FOUND.keys() - {DAG}:
        page = name.partition(":")[0]
        own = page in ("README.md", "prefect.md", *MIGRATING) or "local://" in FOUND[name]
        found.setdefault(AFTER.get(page, page) if own else ON_A_POOL, []).append(name)
    return {session: sorted(names, key=list(FOUND).index) for session, names in sorted(found.items())}


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


def test_the_readme_of_the_package_has_no_relative_links():
    hooks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    text = (ROOT / "README.md").read_text()
    for change in hooks["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert "https://shoal.readthedocs.io/en/latest/migrating/ray/" in links
    assert "https://shoal.readthedocs.io/en/latest/CONTRIBUTING/" in links
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.fixture
def guides_pool(empty_home):
    """The only pool there is, and so the one that every training is meant for."""
    pool = ComputePool("local://guides?max_nodes=1&cpus_per_node=2").up()
    yield
    pool.down()


@pytest.mark.ray
@pytest.mark.timeout(600)  # eight examples in one process
@pytest.mark.parametrize("session", sessions())
def test_examples(session, flights, empty_home, tmp_path, request):
    if session == ON_A_POOL:
        request.getfixturevalue("guides_pool")
    (tmp_path / "flights").symlink_to(flights)
    files = {f"{name.replace(':', '-')}.py": FOUND[name] for name in sessions()[session]}
    for file, code in files.items():
        (tmp_path / file).write_text(code)
    said = run(tmp_path, "-c", SESSION, *files)
    assert [line.removeprefix("--- ") for line in said.splitlines() if line.startswith("--- ")] == [*files]


@pytest.mark.ray
@pytest.mark.timeout(600)  # Airflow's own start, a database, a pool and a training
def test_the_readmes_dag_trains_on_the_month_before_its_run(flights, empty_home, tmp_path):
    (tmp_path / "flights").symlink_to(flights)
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "retrain.py").write_text(FOUND[DAG])
    said = run(tmp_path, "-c", MIGRATED, "dags/retrain.py")
    assert "state=success" in said, said  # a test run that fails ends with 0, too
    assert "model trained on 23611 rows" in said, said  # February's flights that arrived
