"""Change a worker's working directory to the job's folder, or to a temporary folder on hosts without the job's folder.

The temporary folder is removed after the workers have ended.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from shoal.new_files import create_folder

_PREFIX = "shoal-work-"


_entered: str | None = None


def entered() -> str | None:
    """Return the folder that this process has entered with :func:`enter`; None if it has entered none."""
    return _entered


def enter(folder: str, gang: str) -> str | None:
    """Change the working directory of this process to the job's folder.

    The folder may be missing on another host. On such a host, all workers of the gang (group of workers) use one
    temporary folder instead.

    Returns:
        The temporary folder, which has to be removed with :func:`remove_from_nodes`; None if `folder` is used.
    """
    global _entered
    try:
        os.chdir(folder)
        _entered = folder
        return None
    except OSError:
        own = Path(tempfile.gettempdir(), _PREFIX + sha256(gang.encode()).hexdigest()[:16])
        create_folder(own)
        os.chdir(own)
        os.environ["PWD"] = _entered = str(own)
        return str(own)


def written(known: Mapping[str, int | None]) -> dict[str, int]:
    """Return the sizes of the files in the entered folder, by their relative paths.

    Args:
        known: Files that were there before, with their sizes; they are left out if their sizes are the same, or None.
    """
    found = {}
    for parent, folders, names in os.walk(_entered or os.devnull):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for path in map(Path(parent).joinpath, names):
            name = path.relative_to(str(_entered)).as_posix()
            with suppress(OSError):
                size = path.lstat().st_size
                if not path.is_symlink() and known.get(name, -1) not in (None, size):
                    found[name] = size
    return found


def remove_from_nodes(folders: Mapping[str, str], timeout: float) -> None:
    """Remove the temporary folders of a gang that has ended. Folders on a lost node are not removed."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remove = ray.remote(num_cpus=0)(_remove)
    on_nodes = [
        remove.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(folder)
        for node, folder in folders.items()
    ]
    if on_nodes:
        with suppress(ray.exceptions.RayError):
            ray.wait(on_nodes, num_returns=len(on_nodes), timeout=timeout)


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
