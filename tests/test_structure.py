"""The rules of the folders that import-linter does not know."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import shoal
from tests.support import ROOT, package_tree

PACKAGE = Path(shoal.__file__).parent


OF_SERVERS = ["ui", "airflow/plugin.py", "airflow/page.py", "airflow/listeners.py", "jobs", "models", "pool", "state"]
OF_OTHER_PROCESSES = ["jobs/driver", "pool/backends/local", "pool/reconciling.py"]
"""Each of these processes uses one store."""


@pytest.mark.parametrize("folder", OF_SERVERS)
def test_threads_of_servers_use_the_store_of_their_starter(folder: str):
    """A thread without the context of its starter would use the server's own store for the page of a team."""
    for path in [*(PACKAGE / folder).rglob("*.py")] or [PACKAGE / folder]:
        if any(path.is_relative_to(PACKAGE / each) for each in OF_OTHER_PROCESSES):
            continue
        source = path.read_text()
        starts = re.findall(r"\b(?:Thread|Timer|ThreadPoolExecutor|run_in_executor|start_new_thread)\(", source)
        copies = source.count("copy_context().run")
        assert len(starts) <= copies, f"{path}: start each thread with copy_context().run, or as a BackgroundThread"


def test_the_tree_in_the_architecture_is_that_of_the_package():
    assert package_tree.written() == package_tree.tree(), "run python -m tests.support.package_tree"


def test_every_module_says_what_it_is_for():
    paths = [path for path in PACKAGE.rglob("*.py") if "versions" not in path.parts and path.name != "__main__.py"]
    assert [path for path in paths if not ast.get_docstring(ast.parse(path.read_text()))] == []


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_paths_in_the_guides_for_developers_exist(page: str):
    paths = re.findall(r"`([\w./-]+/[\w.-]+\.py|[\w./-]+/)`", package_tree.TREE.sub("", (ROOT / page).read_text()))
    assert len(paths) > 10
    known = [path for path in paths if "NAME" not in path]
    missing = [path for path in known if not any((start / path).exists() for start in (PACKAGE, ROOT))]
    assert missing == [], f"{page} names files that do not exist"


def test_every_program_that_code_and_guides_start_exists():
    texts = {
        path: path.read_text()
        for folder in ("providers", "examples", "docs", "docker")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".md", ".yaml", ".yml", ".sh")
    }
    texts |= {path: path.read_text() for path in (ROOT / "Makefile", ROOT / "README.md", ROOT / "CONTRIBUTING.md")}
    programs = {
        (program.rstrip("."), path)
        for path, text in texts.items()
        for program in re.findall(r"""-m["']?,?\s+["']?((?:shoal|examples)\b[\w.]*)""", text)
    }

    assert len(programs) > 10
    missing = {program: path for program, path in programs if find_spec(program) is None}
    assert not missing


def test_the_paths_of_tests_in_the_makefile_exist():
    paths = re.findall(r"(?<![\w/.-])tests/[\w/.]*\w", (ROOT / "Makefile").read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []
