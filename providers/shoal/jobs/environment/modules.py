"""Prepare a job's packages and code on the pool's head, so that Ray can distribute them to the workers.

Ray applies the runtime environment of a job to its workers only. The driver runs with the node's own Python. In its
`sys.path`, the job's packages and code come after the node's own modules. Ray's own plugin for uv is not used, because
the plugin first copies the node's whole virtual environment (measured: 84 s and 2 GB per node).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.jobs import ids
from shoal.jobs.environment import code, packages
from shoal.state.home import file_lock, lock_file, subfolder
from shoal.training.context import say
from shoal.training.host import imports
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
    installed = packages.install(config.packages, folder, config.env)
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
            mine.mkdir(mode=0o700, exist_ok=True)
            # The folder is filled under a temporary name, and renamed when it is complete. So a driver that is killed
            # meanwhile leaves no incomplete folder under the final name.
            unfinished = Path(tempfile.mkdtemp(dir=mine))
            try:
                (unfinished / name).mkdir()
                fill(unfinished / name)
                unfinished.rename(folder.parent)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
    return str(folder)
