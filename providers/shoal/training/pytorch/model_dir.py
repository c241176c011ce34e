"""The files that ranks leave in their model folders, merged into one folder that is complete or absent."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shoal.errors import TrainingError
from shoal.training.context import say

_BLOCK_BYTES = 2**20


def digests(folder: Path) -> dict[str, str]:
    """The files under a folder: path from there -> SHA-256."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
            found[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return found


def shared_out(files: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Which rank uploads which files: of those that several have, the lowest of them.

    Args:
        files: By rank, what :func:`digests` found.

    Returns:
        Paths by rank.
    """
    owner: dict[str, int] = {}
    differ = set()
    for rank, found in enumerate(files):
        for path, digest in found.items():
            if digest != files[owner.setdefault(path, rank)][path]:
                differ.add(path)
    for path in sorted(differ):
        say(f"{path} in the model folder is not the same on all ranks: that of rank {owner[path]} is kept")
    return [[path for path, first in owner.items() if first == rank] for rank in range(len(files))]


def upload(folder: Path, paths: Iterable[str], target: str) -> None:
    """Copies files.

    Args:
        folder: Where they are.
        paths: Which, from there.
        target: Directory or URI.
    """
    import fsspec

    fs, root = fsspec.core.url_to_fs(target)
    for path in paths:
        to = f"{str(root).rstrip('/')}/{path}"
        fs.makedirs(to.rpartition("/")[0], exist_ok=True)
        fs.put_file(str(folder / path), to)


class Destination:
    """Where a run's merged model folder goes.

    Args:
        location: Directory or URI for artifacts.
        job_id: What it is called there.
    """

    def __init__(self, location: str, job_id: str) -> None:
        self.path = f"{location.rstrip('/')}/model/{job_id}"
        local = "://" not in location
        self.staging = f"{location.rstrip('/')}/model/.{job_id}.partial" if local else self.path
        """Where ranks upload to. An object store has no folders to rename: there it is the place itself."""

    def prepare(self) -> None:
        """Removes what an earlier run has left unfinished; where nothing can be renamed, all that it has left."""
        self.discard()
        if self.staging != self.path:
            Path(self.staging).mkdir(parents=True)

    def commit(self, files: Iterable[str]) -> str:
        """Puts the uploaded files in their place; returns it.

        Args:
            files: What was uploaded, as paths in the folder.

        Raises:
            TrainingError: If one is not there: its rank's node wrote it elsewhere.
        """
        import fsspec

        fs, root = fsspec.core.url_to_fs(self.staging, use_listings_cache=False)
        missing = [path for path in files if not fs.exists(f"{str(root).rstrip('/')}/{path}")]
        if missing:
            raise TrainingError(
                f"{len(missing)} files of the model, {missing[0]} among them, did not arrive in {self.staging}: set "
                "artifact_location to a directory or URI that all nodes reach"
            )
        if self.staging != self.path:
            final = Path(self.path)
            if final.exists():
                shutil.rmtree(final)
            Path(self.staging).rename(final)
        return self.path

    def discard(self) -> None:
        """Removes what was uploaded."""
        import fsspec

        fs, root = fsspec.core.url_to_fs(self.staging)
        if fs.exists(root):
            fs.rm(root, recursive=True)
