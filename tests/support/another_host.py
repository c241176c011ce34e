"""Another host on the same store: a process in a pid namespace of its own, as in a container of the same image."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]

_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]

_SHOAL = "from shoal.cli import main; main()"


def required() -> None:
    """Skip the test where no pid namespace can be made."""
    if why := refusal():
        pytest.skip(why)


def refusal() -> str | None:
    """Why no process can be put into a pid namespace of its own here."""
    try:
        done = subprocess.run([*_NAMESPACE, "true"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"unshare cannot be run: {error}"
    return f"a pid namespace is refused: {done.stderr.strip()}" if done.returncode else None


def shoal(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command there."""
    return _run(["-c", _SHOAL, *arguments])


def python(script: str) -> Any:
    """Run a script there that prints one JSON document on its last line."""
    done = _run(["-c", script])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_NAMESPACE, sys.executable, *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=240, check=False
    )
