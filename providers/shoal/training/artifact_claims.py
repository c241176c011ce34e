"""Mark artifact folders with the job and attempt that created them, so that no other job replaces these folders."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError
from shoal.training.locations import filesystem, is_local
from shoal.training.safe_files import check_folder, make_folder, new_file, open_file

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MARKER = ".shoal-job"
"""Name of the marker file, which contains the fields of a :class:`Claim` as JSON."""

_MAX_MARKER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Claim:
    """Identity of one attempt of a job. The attempt writes its claim into the marker file of each artifact folder.

    Args:
        job_id: Id of the job.
        owner: Text that distinguishes jobs with the same id, for example of two stores or two users.
        attempt: Number of the attempt, from 1.
    """

    job_id: str
    owner: str
    attempt: int = 1

    def check(self, folder: str, *, shared: str | None = None, beside: Collection[str] = ()) -> bool:
        """Check that this attempt may create or replace an artifact folder, and return whether the folder exists.

        An attempt may replace an empty folder and a folder of the same job, unless a newer attempt created the folder.

        Raises:
            InvalidArgumentError: The location is a file, a link, or a folder that this attempt must not replace, or
                another user can change the folder.
        """
        fs, root = filesystem(folder)
        if is_local(fs):
            check_folder(_shared(root, shared), root)
        linked = _is_link(fs, root)
        if not linked and not fs.exists(root):
            return False
        if linked or not fs.isdir(root):
            raise InvalidArgumentError(f"{folder} is a file or a link, but has to be a folder: {self._remedy}")
        found = _read(fs, root)
        names = {_name(path) for path in fs.ls(root, detail=False)} - set(beside)
        if found is None and all(name == MARKER or name.startswith(f"{MARKER}.") for name in names):
            # The folder is empty, or contains only an incomplete marker file, so this attempt may replace the folder.
            return True
        if found is None or (found.job_id, found.owner) != (self.job_id, self.owner):
            raise InvalidArgumentError(
                f'{folder} is not empty, and job "{self.job_id}" did not create this folder (the file {MARKER} in it '
                f"is missing or belongs to another job): {self._remedy}"
            )
        if found.attempt > self.attempt:
            raise InvalidArgumentError(
                f'{folder} belongs to attempt {found.attempt} of job "{self.job_id}", so the older attempt '
                f"{self.attempt} must not replace the folder: use the result of the newest attempt"
            )
        return True

    def has_marked(self, folder: str) -> bool:
        """Return whether an artifact folder exists and was marked by this attempt of the job."""
        return read(folder) == self

    def take(self, folder: str, *, shared: str | None = None) -> None:
        """Replace an artifact folder by a folder that contains only the marker file of this attempt.

        Raises:
            InvalidArgumentError: This attempt must not replace the folder; see :meth:`check`.
        """
        self.check(folder, shared=shared)
        self.remove(folder)
        self.mark(folder, shared=shared)

    def mark(self, folder: str, *, shared: str | None = None) -> None:
        """Create an artifact folder if it does not exist, and write this attempt's marker file into it.

        Raises:
            InvalidArgumentError: Another user can change the folder.
        """
        fs, root = filesystem(folder)
        content = json.dumps(asdict(self)).encode()
        if is_local(fs):
            make_folder(_shared(root, shared), root)
            with new_file(f"{root}/{MARKER}") as file:
                file.write(content)
        else:
            fs.makedirs(root, exist_ok=True)
            fs.pipe_file(f"{root}/{MARKER}", content)

    def remove(self, folder: str) -> None:
        """Remove an artifact folder with all its files, if it exists.

        Raises:
            InvalidArgumentError: This attempt must not replace the folder; see :meth:`check`.
        """
        if not self.check(folder):
            return
        # The marker file is removed last. If this process is killed before the end, the marker file still shows that
        # the folder belongs to this job, so the next attempt can remove the rest.
        fs, root = filesystem(folder)
        if is_local(fs):
            for path in Path(root).iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != MARKER:
                    path.unlink()
            shutil.rmtree(root)
            return
        _remove_at_uri(fs, root)

    @property
    def _remedy(self) -> str:
        return "move it away, or choose another artifact_location or job_id"


def read(folder: str) -> Claim | None:
    """Read from an artifact folder's marker file which job and attempt created the folder.

    Returns:
        The job and attempt; None if the folder has no valid marker file, or if the folder is a link.
    """
    fs, root = filesystem(folder)
    return None if _is_link(fs, root) else _read(fs, root)


def _remove_at_uri(fs: AbstractFileSystem, root: str) -> None:
    # The files are removed one by one with `rm_file`, because `fs.rm` treats a name with "*", "?" or "[" as a pattern
    # and removes all files that match the pattern.
    found: dict[str, Any] = fs.find(root, withdirs=True, detail=True)
    marker = f"{root}/{MARKER}"
    for path, info in found.items():
        if info["type"] != "directory" and path != marker:
            fs.rm_file(path)
    with contextlib.suppress(FileNotFoundError):
        fs.rm_file(marker)
    folders = {path for path, info in found.items() if info["type"] == "directory"} | {root}
    for path in sorted(folders, reverse=True):
        # rmdir() fails if the folder does not exist any more, or if another process has written a file into it. Such an
        # error is ignored, so a folder that is not empty stays.
        with contextlib.suppress(OSError):
            fs.rmdir(path)


def _is_link(fs: AbstractFileSystem, root: str) -> bool:
    return is_local(fs) and Path(root).is_symlink()


def _shared(root: str, shared: str | None) -> str:
    return filesystem(shared)[1] or "/" if shared else str(Path(root).parent)


def _name(path: str) -> str:
    return str(path).rstrip("/").rpartition("/")[2]


def _read(fs: AbstractFileSystem, root: str) -> Claim | None:
    path = f"{root}/{MARKER}"
    try:
        if is_local(fs):
            with open_file(path) as file:
                fields = json.loads(file.read(_MAX_MARKER_BYTES))
        else:
            fields = json.loads(fs.cat_file(path, end=_MAX_MARKER_BYTES))
        return Claim(str(fields["job_id"]), str(fields["owner"]), int(fields["attempt"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
