"""Store, pack and install the code and the packages that a job brings to its driver and workers.

The user's pickled code, models to continue from and archives of code are files under `$SHOAL_HOME`, named by the digest
of their content. Ray applies the runtime environment of a job to its workers only. The driver runs with the node's own
Python. In its `sys.path`, the job's packages and code come after the node's own modules. Ray's own plugin for uv is not
used, because the plugin first copies the node's whole virtual environment (measured: 84 s and 2 GB per node).
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs import ids
from shoal.jobs.files import storage
from shoal.lazy_imports import cloudpickle
from shoal.new_files import create_folder
from shoal.os_processes import python_command
from shoal.state.home import file_lock, lock_file, subfolder
from shoal.training.boosting.params import UserCode
from shoal.training.host import imports
from shoal.training.pickling import pickled
from shoal.training.pytorch.program import MAX_BYTES
from shoal.training.reporting import say
from shoal.training.run_config import RunConfig

_FOLDER = "_code"


def store(content: bytes) -> str:
    """Write pickled code into a file under `$SHOAL_HOME`. The file's name is the SHA-256 of the code.

    The driver reads this file, or a copy of the file in a package that is sent to the pool
    (`shoal.jobs.remote_files`).
    """
    path = f"{storage.root(None)}/{_FOLDER}/{hashlib.sha256(content).hexdigest()}"
    storage.write(path, content)
    return path


def read(path: str) -> bytes:
    """Read pickled code that :func:`store` has written."""
    return storage.read_unchanged(path, path.rpartition("/")[2])


def store_user_code(user_code: UserCode) -> str:
    """Pickle the user's callbacks, objective and metrics, and write them into a file; see :func:`store`."""
    return store(pickled(user_code, "callbacks, objective or metrics"))


def load_user_code(path: str) -> UserCode:
    """Read and unpickle the file of the user's callbacks, objective and metrics; see :func:`read`."""
    user_code: UserCode = cloudpickle.loads(read(path))
    return user_code


_STORED = re.compile(r".*/_code/[0-9a-f]{64}")
_DATE = (1980, 1, 1, 0, 0, 0)
"""Earliest time in a zip archive. All files have it, so that the same code gives the same archive."""


def stored(paths: Sequence[str]) -> tuple[str, ...]:
    """Pack folders and files with code into one archive that the driver can read, and return the archive's path.

    The archive's name is the digest of its content. So the name is equal if the same job is submitted again.
    """
    if not paths or all(_STORED.fullmatch(path) for path in paths):
        return tuple(paths)
    content = io.BytesIO()
    names: set[str] = set()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted({Path(path).expanduser().absolute() for path in paths}):
            name = _module(path)
            if name in names:
                raise InvalidArgumentError(f'run_config.code has two modules called "{name}": rename one of them')
            names.add(name)
            for file in _files(path):
                add_to_zip(archive, str(file.relative_to(path.parent)), file.read_bytes(), mode=0o644)
    if (size := len(content.getvalue())) > MAX_BYTES:
        raise InvalidArgumentError(
            f"run_config.code is {size / 2**20:.0f} MiB large, but the limit is {MAX_BYTES / 2**20:.0f} MiB: "
            "name only folders with code, and pass data as datasets"
        )
    return (store(content.getvalue()),)


def unpack(paths: Sequence[str], folder: Path) -> None:
    """Unpack the archives from :func:`stored` into a folder, so that Python can import the code from this folder."""
    for path in paths:
        with zipfile.ZipFile(io.BytesIO(read(path))) as archive:
            archive.extractall(folder)


def add_to_zip(archive: zipfile.ZipFile, name: str, content: bytes, *, mode: int) -> None:
    """Add a file to an archive. A file without permissions would be unpacked as an unreadable one."""
    entry = zipfile.ZipInfo(name, _DATE)
    entry.external_attr = mode << 16
    archive.writestr(entry, content, zipfile.ZIP_DEFLATED)


def _module(path: Path) -> str:
    """Return the name under which a folder or a .py file can be imported; the file's name of other files."""
    if not path.exists():
        raise InvalidArgumentError(
            f'run_config.code: "{path}" does not exist: give the path of a package, such as ./mypkg, or of a .py file'
        )
    name = path.name if path.is_dir() else path.name.removesuffix(".py")
    if path.is_file() and path.suffix != ".py":
        return path.name
    if not name.isidentifier():
        raise InvalidArgumentError(
            f'run_config.code: "{path}" cannot be imported: give the folder of a package, such as ./mypkg, or a .py '
            "file. Its name may contain only letters, digits and _, and must not begin with a digit"
        )
    return name


def _files(path: Path) -> Iterator[Path]:
    """Yield the files of a package; hidden files, such as those of version control, and bytecode are left out."""
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        parts = file.relative_to(path).parts
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            yield file


def runtime_env(config: RunConfig, pool: str, gcs: str) -> dict[str, Any]:
    """Return Ray's runtime environment for a job with packages or code of its own; empty for any other job."""
    shipped: list[str] = []
    if config.packages:
        key = ["packages", sys.executable, sys.version, sorted(config.packages)]
        folder = _cached_folder(pool, gcs, key, imports.PACKAGES, lambda folder: _install(config, folder))
        shipped += [folder] if any(Path(folder).iterdir()) else []
    if config.code:
        key = ["code", sorted(path.rpartition("/")[2] for path in config.code)]
        folder = _cached_folder(pool, gcs, key, imports.CODE, lambda folder: unpack(config.code, folder))
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
            create_folder(mine)
            # The folder is filled under a temporary name, and renamed when it is complete. So a driver that is killed
            # meanwhile leaves no incomplete folder under the final name.
            unfinished = Path(tempfile.mkdtemp(dir=mine))
            try:
                create_folder(unfinished / name)
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
        return python_command("-m", "uv")
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
