"""Merge the files of all ranks' model folders into one published folder.

On a local disk, the folder is replaced by renaming, so a reader never sees an incomplete folder.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.locations import Claim, copy_file, filesystem, is_local, make_folder
from shoal.training.reporting import say


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 digests of all files under a folder, as a dict with the relative paths as keys."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def shared_out(files: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Assign each model file to the lowest rank that has the file, so that each file is uploaded once."""
    owner: dict[str, int] = {}
    differ = set()
    for rank, found in enumerate(files):
        for path, digest in found.items():
            if digest != files[owner.setdefault(path, rank)][path]:
                differ.add(path)
    for path in sorted(differ):
        say(f"the file {path} in the model folder differs between the ranks: the file of rank {owner[path]} is kept")
    return [[path for path, first in owner.items() if first == rank] for rank in range(len(files))]


def upload(folder: Path, paths: Iterable[str], target: str) -> None:
    """Copy model files from a local folder to a directory or URI."""
    fs, root = filesystem(target)
    for path in paths:
        to = f"{root}/{path}"
        if is_local(fs):
            make_folder(root.rpartition("/")[0], to.rpartition("/")[0])
            copy_file(folder / path, to)
        else:
            fs.makedirs(to.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(folder / path), to)


class Destination:
    """Merged model folder of a run, with methods to create, publish and remove the folder.

    Args:
        location: Directory or URI for artifacts.
        claim: Job and attempt of the run. They determine the names of the folders, and which existing folders the run
            may replace.
        may_publish: Function that returns whether this run may still publish; called right before publishing.
    """

    def __init__(self, location: str, claim: Claim, may_publish: Callable[[], bool]) -> None:
        self._location = location
        self.path = f"{location.rstrip('/')}/model/{claim.job_id}"
        self._claim = claim
        self._may_publish = may_publish
        local = "://" not in location
        # Each attempt uploads to its own staging folder. Otherwise an older attempt whose driver was paused could
        # upload its files into the folder of a newer attempt.
        partial = f"{location.rstrip('/')}/model/.{claim.job_id}.{claim.attempt}.partial"
        self.staging = partial if local else self.path
        """Directory or URI to which the ranks upload their files. A local folder is renamed when it is published. An
        object store cannot rename folders, so the ranks upload directly to the published location."""

    def check(self) -> None:
        """Undo an interrupted replacement of the model folder, and check that this run may replace the folder.

        Raises:
            InvalidArgumentError: The folder does not belong to this job, or belongs to a newer attempt.
        """
        if self.staging != self.path:
            self._restore()
        self._claim.check(self.path, shared=self._location)
        self._claim.check(self.staging, shared=self._location)

    def prepare(self) -> None:
        """Create an empty folder for the ranks' uploads, and remove unfinished upload folders of earlier attempts.

        On an object store, this method also removes the model of an earlier attempt.

        Raises:
            TrainingError: A newer attempt has begun.
            InvalidArgumentError: This run must not replace the staging folder; see :meth:`check`.
        """
        self._require_permission()
        self._claim.take(self.staging, shared=self._location)
        if self.staging != self.path:
            self._remove_leftovers("partial", keep=Path(self.staging))

    def commit(self, files: Iterable[str]) -> str:
        """Publish the uploaded files and return the path or URI of the published folder.

        Raises:
            TrainingError: A newer attempt has begun, or a file is missing, because another node wrote it to a disk that
                this node cannot access.
        """
        fs, root = filesystem(self.staging)
        missing = [path for path in files if not fs.exists(f"{root}/{path}")]
        if missing:
            raise TrainingError(
                f"{len(missing)} model files, such as {missing[0]}, are missing in {self.staging} after the upload: "
                "set artifact_location to a directory or URI that all nodes can reach"
            )
        self._require_permission()
        try:
            self._claim.check(self.staging, shared=self._location)
            if self.staging != self.path:
                self._swap(Path(self.path), Path(self.staging))
        except InvalidArgumentError as error:
            raise TrainingError(str(error)) from error
        return self.path

    def discard(self) -> None:
        """Remove the folder with the uploaded files, unless the folder belongs to a newer attempt."""
        self._remove(self.staging)

    def _require_permission(self) -> None:
        if not self._may_publish():
            raise TrainingError(
                f'attempt {self._claim.attempt} of job "{self._claim.job_id}" has ended, or a newer attempt has begun: '
                f"the model of attempt {self._claim.attempt} is not published"
            )

    def _swap(self, final: Path, staging: Path) -> None:
        """Replace the published model folder with the staging folder, which contains the files that the ranks uploaded.

        The old folder is renamed before the check, so that no other process can replace it between the check and the
        replacement.
        """
        if not final.is_symlink() and not final.exists():
            staging.rename(final)
            return
        aside = staging.with_suffix(".replaced")
        self._claim.remove(str(aside))
        final.rename(aside)
        try:
            self._claim.check(str(aside))
            staging.rename(final)
        except BaseException:
            aside.rename(final)
            raise
        self._remove_leftovers("replaced")

    def _restore(self) -> None:
        """Rename the old model folder back if a process was killed between the two renames of :meth:`_swap`."""
        final = Path(self.path)
        for aside in self._beside("replaced"):
            if not final.is_symlink() and not final.exists():
                with contextlib.suppress(InvalidArgumentError, OSError):
                    if self._claim.check(str(aside)):
                        aside.rename(final)

    def _remove_leftovers(self, kind: str, keep: Path | None = None) -> None:
        for folder in self._beside(kind):
            if folder != keep:
                self._remove(str(folder))

    def _beside(self, kind: str) -> list[Path]:
        return sorted(Path(self.path).parent.glob(f".{self._claim.job_id}.*.{kind}"))

    def _remove(self, folder: str) -> None:
        """Remove a folder if it belongs to this job. If the removal fails, print the error, and continue."""
        try:
            # The pattern for the folders of job "a" also matches the folders of job "a.1" and of newer attempts, which
            # must be kept. For these folders, remove() raises InvalidArgumentError, and this error is ignored.
            with contextlib.suppress(InvalidArgumentError):
                self._claim.remove(folder)
        except OSError as error:
            say(f"the folder {folder} could not be removed: {error}")
