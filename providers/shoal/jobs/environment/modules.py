"""Prepare a job's packages and code on the pool's head, so that Ray can distribute them to the workers.

Ray applies the runtime environment of a job to its workers only. The driver runs with the node's own Python. In its
`sys.path`, the job's packages and code come after the node's own modules. Ray's own plugin for uv is not used, because
the plugin first copies the node's whole virtual environment (measured: 84 s and 2 GB per node).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal import new_folders, own_python
from shoal.errors import JobError
from shoal.jobs import ids
from shoal.jobs.environment import code
from shoal.state.home import file_lock, lock_file, subfolder
from shoal.training.host import imports
from shoal.training.reporting import say
from shoal.training.run_config import RunConfig


def runtime_env(config: RunConfig, pool: str, gcs: str) -> dict[str, Any]:
    """Return Ray's runtime environment for a job with packages or code of its own; empty for any other job.

    Raises:
        JobError: A package cannot be installed, or the code cannot be read.
    """
    shipped: list[str] = []
    if config.packages:
        key = ["packages", sys.executable, sys.version, sorted(config.packages)]
        folder = _cached_folder(pool, gcs, key, imports.PACKAGES, lambda folder: _install(config, folder))
        shipped += [folder] if any(Path(folder).iterdir()) else []
    if config.code:
        key = ["code", sorted(path.rpartition("/")[2] for path in config.code)]
        folder = _cached_folder(pool, gcs, key, imports.CODE, lambda folder: code.unpack(config.code, folder))
        shipped.append(folder)
    # The driver unpickles callbacks of boosting trainings and return values of functions. So the driver also has to
    # import the packages and the code. The job's packages and code come last in `sys.path`, so that they cannot replace
    # the node's own packages. The code comes before the packages, as in the workers.
    sys.path.extend(reversed(shipped))
    return {"py_modules": shipped, "worker_process_setup_hook": imports.HOOK} if shipped else {}


def _install(config: RunConfig, folder: Path) -> None:
    began = time.monotonic()
    installed = install(config.packages, folder, config.env)
    what = ", ".join(installed) or "nothing, because the nodes have the packages already"
    say(f"packages for the workers: installed {what} ({time.monotonic() - began:.1f} s)")


def _cached_folder(pool: str, gcs: str, key: list[Any], name: str, fill: Callable[[Path], None]) -> str:
    """Return the pool's cached folder for a key; if there is none yet, create the folder and call `fill` to fill it."""
    all_heads = subfolder("pools", pool, "modules")
    mine = all_heads / ids.digest(gcs)[:16]
    folder = mine / ids.digest(key) / name
    with file_lock(lock_file(f"modules-{pool}")):
        for other in all_heads.iterdir():
            if other != mine:
                shutil.rmtree(other, ignore_errors=True)
        if not folder.exists():
            new_folders.make(mine)
            # The folder is filled under a temporary name, and renamed when it is complete. So a driver that is killed
            # meanwhile leaves no incomplete folder under the final name.
            unfinished = Path(tempfile.mkdtemp(dir=mine))
            try:
                new_folders.make(unfinished / name)
                fill(unfinished / name)
                unfinished.rename(folder.parent)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
    return str(folder)


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
        return own_python.command("-m", "uv")
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
