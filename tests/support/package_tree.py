"""The tree of the package in docs/architecture.md, made from the first sentence of each package and module.

``python -m tests.support.package_tree`` writes it into the page.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "providers" / "shoal"
TREE = re.compile(r"    providers/shoal/\n.*?\n\n", re.S)
_WIDTH, _COLUMN, _INDENT = 140, 25, 2  # the column is odd: lines indented by fours are commands


def tree() -> str:
    """Return the tree as a block of Markdown."""
    return "\n".join(["    providers/shoal/", *_lines(PACKAGE, 3 * _INDENT)]) + "\n\n"


def written() -> str:
    """Return the tree that the page has."""
    found = TREE.search(PAGE.read_text())
    return found[0] if found else ""


def _lines(folder: Path, indent: int) -> Iterator[str]:
    modules = sorted(path for path in folder.glob("*.py") if path.name not in ("__init__.py", "__main__.py"))
    packages = sorted(path.parent for path in folder.glob("*/__init__.py") if path.parent.name != "migrations")
    for path in modules:
        yield from _entry(path.stem, path, indent)
    for path in packages:
        yield from _entry(f"{path.name}/", path / "__init__.py", indent)
        yield from _lines(path, indent + _INDENT)


def _entry(name: str, path: Path, indent: int) -> list[str]:
    start = " " * indent + name + " "
    column = " " * (indent + _COLUMN)
    return textwrap.wrap(_sentence(path), _WIDTH, initial_indent=start.ljust(len(column)), subsequent_indent=column)


def _sentence(path: Path) -> str:
    """Return the first sentence of a module."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = " ".join(text.split("\n\n")[0].replace("`", "").split())
    return re.split(r"(?<=\.)\s", first, maxsplit=1)[0]


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(TREE.sub(lambda _: tree(), text, count=1))
