"""Write docs/reference/: everything public, from the docstrings, the descriptions of fields and the commands.

Run ``python -m tests.support.reference`` after a change of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support import ROOT
from tests.support.reference import airflow, commands, python, specs

FOLDER = ROOT / "docs" / "reference"

PAGES: dict[str, Callable[[], str]] = {
    "python": python.page,
    "specs": specs.page,
    "pools": specs.pools_page,
    "airflow": airflow.page,
    "prefect": python.prefect_page,
    "commands": commands.page,
    "errors": python.errors_page,
}
"""What writes each page."""


def write() -> None:
    """Write all pages."""
    for name, page in PAGES.items():
        path_of(name).write_text(page())


def path_of(name: str) -> Path:
    """Return the file of a page."""
    return FOLDER / f"{name}.md"
