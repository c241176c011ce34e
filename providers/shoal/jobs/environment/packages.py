"""Install Python packages for the workers with uv, into a separate folder, so that the nodes' own packages do not
change."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.errors import JobError

_CHANGE = re.compile(r"^ [+~] (?P<requirement>(?P<name>[A-Za-z0-9._-]+).*)$", re.MULTILINE)
"""Pattern of the lines in which uv lists a package that it would install."""

_OF_THE_NODES = frozenset({"ray", "shoal"})
"""Packages that must be the same in the workers and in the driver."""


def install(packages: Sequence[str], folder: Path, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Install packages into a folder, together with the dependencies that the Python of this process lacks.

    uv takes its settings (indexes and their credentials) from its configuration on this node, and from `variables`.

    Raises:
        JobError: uv is not installed, does not find a package, or would replace Ray or shoal.
    """
    pip = [*_uv(), "pip", "install", "--python", sys.executable, "--color", "never", "--no-progress"]
    # This dry run of uv finds the packages that are missing. The installation below uses --no-deps. Without --no-deps,
    # `uv pip install --target` would install all dependencies again, even installed ones such as PyTorch.
    would = _run([*pip, "--dry-run", "--break-system-packages", *packages], variables, packages)
    missing = {change["name"].lower(): change["requirement"] for change in _CHANGE.finditer(would)}
    if replaced := sorted(_OF_THE_NODES & missing.keys()):
        raise JobError(
            f"run_config.packages would install {', '.join(missing[name] for name in replaced)} for the workers, but "
            "all processes of a pool must have the same versions of Ray and shoal: leave out the packages that need "
            "other versions of Ray or shoal"
        )
    if missing:
        _run([*pip, "--no-deps", "--target", str(folder), *missing.values()], variables, packages)
    return tuple(missing.values())


def _uv() -> list[str]:
    if importlib.util.find_spec("uv") is not None:
        return [sys.executable, "-m", "uv"]
    if found := shutil.which("uv"):
        return [found]
    raise JobError(
        f"run_config.packages needs uv on the pool's nodes, but {sys.executable} has no package uv and PATH has no "
        "command uv: run `pip install uv` on the nodes"
    )


def _run(command: Sequence[str], variables: Mapping[str, str], packages: Sequence[str]) -> str:
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split()).rstrip(".")
        raise JobError(
            f"run_config.packages ({', '.join(packages)}) cannot be installed: {reason}. Check the packages' names and "
            "versions, and that the nodes can reach the package index"
        )
    return done.stderr
