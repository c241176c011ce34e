"""Folders that shoal may replace: a marker in each names the job, and the attempt of it, that has made it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MARKER = ".shoal-job"
"""Name of the marker: JSON with the fields of a :class:`Claim`."""

_MAX_MARKER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Claim:
    """One attempt's right to folders for artifacts.

    Args:
        job_id: The job.
        owner: Tells apart jobs of one id, such as those of two stores or of two users.
        attempt: Number of the attempt, from 1.
    """

    job_id: str
    owner: str
    attempt: int = 1

    def check(self, folder: str, *, beside: Collection[str] = ()) -> bool:
        """Whether there is a folder that this attempt may replace: an empty one, or one of its job.

        Args:
            folder: Absolute path or URI.
            beside: Names of files that say nothing about whose the folder is.

        Returns:
            False if nothing is there.

        Raises:
            InvalidArgumentError: If something is there that this attempt must not touch.
        """
        fs, root = _filesystem(folder)
        linked = _is_link(folder)
        if not linked and not fs.exists(root):
            return False
        if linked or not fs.isdir(root):
            raise InvalidArgumentError(f"{folder} is no folder: {self._remedy}")
        found = _read(fs, root)
        names = {_name(path) for path in fs.ls(root, detail=False)} - set(beside)
        if found is None and names <= {MARKER}:  # empty, or its maker was killed while it wrote the marker
            return True
        if found is None or (found.job_id, found.owner) != (self.job_id, self.owner):
            raise InvalidArgumentError(
                f'{folder} is not empty, and no marker ({MARKER}) says that this job "{self.job_id}" has made it: '
                f"{self._remedy}"
            )
        if found.attempt > self.attempt:
            raise InvalidArgumentError(
                f'{folder} belongs to attempt {found.attempt} of job "{self.job_id}", and attempt {self.attempt} is '
                "older: it publishes nothing"
            )
        return True

    def has_marked(self, folder: str) -> bool:
        """Whether there is a folder with the marker of this very attempt."""
        fs, root = _filesystem(folder)
        return not _is_link(folder) and _read(fs, root) == self

    def take(self, folder: str) -> None:
        """Make a folder anew, with the marker of this attempt.

        Args:
            folder: Absolute path or URI.

        Raises:
            InvalidArgumentError: As :meth:`check`.
        """
        self.remove(folder)
        self.mark(folder)

    def mark(self, folder: str) -> None:
        """Make a folder where there is none, and write the marker of this attempt into it."""
        fs, root = _filesystem(folder)
        fs.makedirs(root, exist_ok=True)
        fs.pipe_file(f"{root}/{MARKER}", json.dumps(asdict(self)).encode())

    def remove(self, folder: str) -> None:
        """Remove a folder, if there is one.

        Args:
            folder: Absolute path or URI.

        Raises:
            InvalidArgumentError: As :meth:`check`.
        """
        if not self.check(folder):
            return
        # The marker last: killed half-way, what is left can be removed by the next attempt.
        if "://" not in folder:
            for path in Path(folder).iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != MARKER:
                    path.unlink()
            shutil.rmtree(folder)
            return
        _remove_at_uri(*_filesystem(folder))

    @property
    def _remedy(self) -> str:
        return "move it away, or choose another artifact_location or job_id"


def _filesystem(folder: str) -> tuple[AbstractFileSystem, str]:
    import fsspec

    fs, root = fsspec.core.url_to_fs(folder, use_listings_cache=False)
    return fs, str(root).rstrip("/")


def _remove_at_uri(fs: AbstractFileSystem, root: str) -> None:
    # One by one: `fs.rm` takes a name with "*", "?" or "[" for a pattern, and removes all that match.
    found: dict[str, Any] = fs.find(root, withdirs=True, detail=True)
    marker = f"{root}/{MARKER}"
    for path, info in found.items():
        if info["type"] != "directory" and path != marker:
            fs.rm_file(path)
    with contextlib.suppress(FileNotFoundError):
        fs.rm_file(marker)
    folders = {path for path, info in found.items() if info["type"] == "directory"} | {root}
    for path in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):  # gone, or not empty: somebody has written there meanwhile
            fs.rmdir(path)


def _is_link(folder: str) -> bool:
    return "://" not in folder and Path(folder).is_symlink()


def _name(path: str) -> str:
    return str(path).rstrip("/").rpartition("/")[2]


def _read(fs: AbstractFileSystem, root: str) -> Claim | None:
    try:
        fields = json.loads(fs.cat_file(f"{root}/{MARKER}", end=_MAX_MARKER_BYTES))
        return Claim(str(fields["job_id"]), str(fields["owner"]), int(fields["attempt"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
