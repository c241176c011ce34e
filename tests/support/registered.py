"""A test function in a process that knows a further kind of job or library, as do the processes of its pools."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support import ROOT


def run(use: Callable[[], None], registration: str, folder: Path, home: Path) -> None:
    """Call a function in another process, in a folder in which each Python process runs the lines of a registration
    when it starts, as if they stood in the registry."""
    (folder / "sitecustomize.py").write_text(registration)
    environment = {
        "SHOAL_HOME": str(home),
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        # scikit-learn's OpenMP threads would wait for each other on a machine with few free CPUs.
        "OMP_NUM_THREADS": "1",
    }
    code = f"from {use.__module__} import {use.__name__} as use; use()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280, env={**os.environ, **environment}, cwd=folder)
