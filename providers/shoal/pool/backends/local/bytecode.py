"""Find out whether Python has compiled the installed packages. Without bytecode, a node takes many seconds longer to
start: installers such as uv do not compile packages, and a variable or a read-only folder may prevent that Python does.
"""

from __future__ import annotations

import os
from importlib.util import cache_from_source, find_spec
from pathlib import Path

ADVICE = "compile the packages once with `python -m compileall -q` and the folder of the packages"

_LARGE = ("ray", "sqlalchemy", "pydantic")
"""Packages that each node imports."""


def sources_without_bytecode() -> list[Path]:
    """Return the files of packages that Python has not compiled yet."""
    found = (find_spec(name) for name in _LARGE)
    files = [Path(spec.origin) for spec in found if spec is not None and spec.origin]
    return [file for file in files if not os.path.exists(cache_from_source(str(file)))]


def can_be_written(source: Path) -> bool:
    """Return whether Python can write the bytecode of a source file beside it."""
    folder = source.parent / "__pycache__"
    return os.access(folder if folder.exists() else source.parent, os.W_OK)
