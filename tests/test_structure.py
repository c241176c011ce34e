"""The rules of the folders that import-linter does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal

PACKAGE = Path(shoal.__file__).parent
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py") if "migrations" not in path.parts})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PACKAGE.parent)))
def test_a_package_has_no_more_than_fifteen_modules(folder: Path):
    modules = [path.name for path in folder.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]

    assert len(modules) <= 15, f"{folder}: group its modules by role into packages: {sorted(modules)}"
