"""The rules of the folders that import-linter does not know."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import shoal
from tests.support import ROOT

PACKAGE = Path(shoal.__file__).parent
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py") if "migrations" not in path.parts})


@pytest.mark.parametrize("folder", ["ui", "airflow/plugin", "airflow/listeners", "pool/api.py"])
def test_threads_of_servers_use_the_store_of_their_starter(folder: str):
    """A thread without the context of its starter would use the server's own store for the page of a team."""
    place = PACKAGE / folder
    for path in [place] if place.is_file() else place.rglob("*.py"):
        source = path.read_text()
        if re.search(r"threading\.Thread\(|ThreadPoolExecutor\(|run_in_executor\(", source):
            assert "copy_context().run" in source, f"{path}: start the thread with copy_context().run"


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
TREE = re.search(r"    providers/shoal/\n(.*?)\n\n", ARCHITECTURE, re.S).group(1).splitlines()
COLUMN = 14  # further to the right are descriptions, or their next lines
NAMES = r"[a-z_]+(?:/[a-z_]+)*"


def entries() -> Iterator[tuple[Path, str]]:
    """Each folder and module of the tree in docs/architecture.md, and its description."""
    folders = {4: PACKAGE}
    path, description = None, ""
    for line in TREE:
        indent = len(line) - len(line.lstrip())
        if indent >= COLUMN:
            description += " " + line.strip()
            continue
        if path:
            yield path, description
        name, description = line.split(maxsplit=1)
        parent = folders[indent - 2]
        path = parent / (name if name.endswith("/") else f"{name}.py")
        folders[indent] = path
    assert path
    yield path, description


def test_all_that_the_architecture_lists_exists():
    listed = dict(entries())
    assert [str(path) for path in listed if not path.exists()] == []
    for path, description in listed.items():
        folder = path if path.is_dir() else path.parent
        for named in re.findall(rf"(?:^|; )({NAMES}(?:, {NAMES})*): ", description):
            for name in set(named.split(", ")) - {"pure"}:
                found = any((start / f"{name}.py").exists() for start in (folder, PACKAGE))
                assert found, f"docs/architecture.md names {name} in {folder}, which has no such module"


def test_every_package_is_in_the_architecture():
    listed = {path for path, _ in entries() if path.is_dir()}
    missing = {folder for folder in FOLDERS if folder != PACKAGE} - listed
    assert not missing, f"add to the tree in docs/architecture.md: {sorted(map(str, missing))}"


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_paths_in_the_guides_for_developers_exist(page: str):
    paths = re.findall(r"`([\w./-]+/[\w.-]+\.py|[\w./-]+/)`", (ROOT / page).read_text())
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
