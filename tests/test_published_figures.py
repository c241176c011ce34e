"""Published figures: the README has those of the tables, and a release refuses tables that are older than the code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import BENCHMARKS, PAGE, stale_tables
from tests.support import ROOT
from tests.support.first_command import FIGURES


def _git(folder: Path, *command: str) -> str:
    options = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    ran = subprocess.run(["git", *options, *command], cwd=folder, check=True, capture_output=True, text=True)
    return ran.stdout.strip()


def _commit(folder: Path, file: str, text: str) -> str:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text)
    _git(folder, "add", "--all")
    _git(folder, "commit", "--quiet", "--message", file)
    return _git(folder, "rev-parse", "--short", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the tables `pool_scaling` and `sql_rows`, which measure its first commit."""
    _git(tmp_path, "init", "--quiet")
    measured = _commit(tmp_path, "providers/shoal/pool/api.py", "")
    page = "".join(
        f"<!-- bench: {name} -->\n2026-12-01, commit {measured}, 2 CPUs\n\n| a |\n<!-- end -->\n"
        for name in ("pool_scaling", "sql_rows")
    )
    _commit(tmp_path, str(PAGE), page)
    return tmp_path


def test_a_table_is_stale_after_a_change_of_the_code_that_it_measures(repository: Path):
    assert stale_tables(repository) == []
    _commit(repository, "providers/shoal/pool/api.py", "changed = True")
    assert stale_tables(repository) == ["pool_scaling"]
    _commit(repository, "tests/benchmarks/sql_rows.py", "changed = True")
    assert stale_tables(repository) == ["pool_scaling", "sql_rows"]


@pytest.mark.parametrize("commit", ["", "commit 0123456789, "])
def test_a_table_is_stale_without_a_known_commit(repository: Path, commit: str):
    _commit(repository, str(PAGE), f"<!-- bench: sql_rows -->\n2026-12-01, {commit}2 CPUs\n<!-- end -->\n")
    assert stale_tables(repository) == ["sql_rows"]


def test_benchmarks_measure_folders_that_exist():
    paths = {f"providers/shoal/{folder}" for folders in BENCHMARKS.values() for folder in folders}
    paths |= {f"tests/benchmarks/{name}.py" for name in BENCHMARKS}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


README = " ".join((ROOT / "README.md").read_text().split())


def _column(benchmark: str, title: str, heading: str) -> dict[str, str]:
    """A column of the table whose first heading begins with the title, by the first cells of its rows."""
    section = (ROOT / PAGE).read_text().partition(f"<!-- bench: {benchmark} -->")[2].partition("<!-- end -->")[0]
    [table] = [part for part in section.split("\n\n") if part.startswith(f"| {title}")]
    head, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.strip().splitlines()]
    return {row[0]: row[head.index(heading)] for row in rows}


def test_the_readme_has_the_seconds_of_the_tables():
    large = _column("gradient_boosting", "xgboost, 2 M x 28", "seconds")
    small = _column("small_models", "xgboost, 12 models", "seconds")
    first = _column("first_seconds", "first fit in a script", "s")
    sentences = [
        f"took {large['shoal']} s with shoal, {large['Dask']} s with Dask and {large['Ray Train']} s with Ray Train",
        f"One plain XGBoost process with two threads took {large['plain']} s",
        f"in a loop took {small['shoal, a loop of fit']} s with shoal, {small['Dask, a loop']} s with Dask and "
        f"{small['plain, a loop']} s with plain XGBoost",
        f"took {first['shoal']} s with shoal and {first['plain']} s with plain XGBoost",
    ]
    assert [sentence for sentence in sentences if sentence not in README] == []


def test_the_readme_has_the_seconds_and_megabytes_of_the_first_command():
    figures = json.loads(FIGURES.read_text())
    run, install = figures["make run"], figures["make install"]
    sentences = [
        f"`make run` needs {run['downloaded_mb']} MB of packages, {run['on_disk_mb'] / 1000:.1f} GB on disk",
        f"took {run['seconds']} s from the clone to the champion",
        f"a load of {figures['load_before']:.0f} from other programs ({figures['date']}",
        f"({install['downloaded_mb'] / 1000:.1f} GB of packages, {install['on_disk_mb'] / 1000:.1f} GB on disk in all)",
    ]
    assert [sentence for sentence in sentences if sentence not in README] == []
