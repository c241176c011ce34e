"""Save and load the checkpoints of a run (the two newest states of rank 0), and merge the model folders of all ranks.

Each checkpoint has a signature, the seal. Loading a pickle can run code, and other users may be able to write to the
artifact location. A checkpoint is therefore loaded only if its seal is correct. The seal is an HMAC of the checkpoint's
number and content, with a key that the driver creates for the run and sends to the workers. Rank 0 sends the seals to
the driver before a new checkpoint gets its final name, so that a resumed run accepts no older checkpoint. A checkpoint
is written under a temporary name first, so it is either complete or absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.locations import Claim, copy_file, filesystem, is_local, make_folder, names_in, open_file
from shoal.training.reporting import say

_NAME = re.compile(r"(\d{8,})-([0-9a-f]{64})\.pt")
_BLOCK_BYTES = 2**20

Seals = Mapping[int, str]
"""Seals of checkpoints: number of the checkpoint -> its seal (the HMAC of its number and content)."""


class Checkpoints:
    """The checkpoints of one run, with methods to save and load them; only the two newest checkpoints are kept.

    Args:
        folder: Directory or URI; does not need to exist.
        key: Secret key of the run.

    Attributes:
        known_seals: Seals (signatures) that the driver has received last. A resumed run accepts only the checkpoints
            with these seals, and newer checkpoints with a correct seal.
        send_seals: Function that sends the seals of the kept checkpoints to the driver; called before the newest
            checkpoint gets its final name.
    """

    def __init__(self, folder: str, key: bytes) -> None:
        self.folder = folder
        self.known_seals: Seals = {}
        self._key = key
        self.send_seals: Callable[[Seals], None] | None = None
        self._current: dict[int, str] = {}
        """Number and seal of the checkpoint that this process saved or loaded last."""

    def save(self, state: Any) -> None:
        """Save a state as the newest checkpoint, and remove all checkpoints except the two newest ones."""
        import torch

        fs, root = filesystem(self.folder)
        found = self._found()
        number = max([*self.known_seals, *(other for other, _ in found)], default=0) + 1
        before = self._current or dict(sorted(self.known_seals.items())[-1:])
        local = is_local(fs)
        if local:
            make_folder(root.rpartition("/")[0], root)
        else:
            fs.makedirs(root, exist_ok=True)
        # On a local disk, the temporary file is in the folder of the checkpoint, so that it can be renamed to its final
        # name. A reader therefore never sees an incomplete checkpoint.
        file = tempfile.NamedTemporaryFile(dir=root if local else None, delete=False)  # noqa: SIM115
        try:
            with file:
                signing = _SigningFile(file, self._mac(number))
                torch.save(state, signing)
                file.flush()
                os.fsync(file.fileno())
            self._current = {number: signing.mac.hexdigest()}
            self.known_seals = {**before, **self._current}
            if self.send_seals:
                self.send_seals(self.known_seals)
            name = f"{root}/{_name(number, self.known_seals[number])}"
            if local:
                Path(file.name).replace(name)
            else:
                fs.put_file(file.name, name)
        finally:
            Path(file.name).unlink(missing_ok=True)
        for other, seal in found:
            if self.known_seals.get(other) != seal:
                # `fs.rm` would treat "[1]" in a path as a pattern, so `fs.rm_file` is used.
                fs.rm_file(f"{root}/{_name(other, seal)}")

    def load(self) -> Any:
        """Return the newest state with a correct signature, or None if there is no checkpoint. Tensors are loaded to
        the CPU.

        Raises:
            TrainingError: The run has saved checkpoints, but all of them were changed or replaced.
        """
        fs, root = filesystem(self.folder)
        refused = []
        for number, seal in sorted(self._found(), reverse=True):
            # The checkpoint is copied to a temporary file, and only this copy is checked and loaded, because another
            # process could change the checkpoint itself between the check and the load.
            with tempfile.TemporaryFile() as copy:
                mac = self._mac(number)
                path = f"{root}/{_name(number, seal)}"
                with open_file(path) if is_local(fs) else fs.open(path, "rb") as file:
                    while block := file.read(_BLOCK_BYTES):
                        mac.update(block)
                        copy.write(block)
                if not hmac.compare_digest(mac.hexdigest(), seal):
                    say(f"checkpoint {number} in {self.folder} is ignored: it was changed, or belongs to another run")
                    refused.append(number)
                    continue
                self._current = {number: seal}
                return _unpickle(copy)
        if refused and self.known_seals:
            raise TrainingError(
                f"no checkpoint in {self.folder} is valid ({len(refused)} were changed or belong to another run), so "
                "the training cannot continue: find out which other program writes to this folder, then start the "
                "training again"
            )
        return None

    def latest(self) -> int | None:
        """Return the number of the newest checkpoint in the run's checkpoint folder, or None if there is none."""
        return max((number for number, _ in self._found()), default=None)

    def _found(self) -> list[tuple[int, str]]:
        """Return the number and the seal (signature) of each checkpoint that this run may load from a folder.

        A checkpoint is left out if it is older than all seals in `known_seals`, or if its seal differs from the known
        seal.
        """
        names = names_in(self.folder)
        found = [(int(match[1]), match[2]) for name in names if (match := _NAME.fullmatch(name))]
        oldest = min(self.known_seals, default=0)
        known = self.known_seals
        return [(number, seal) for number, seal in found if number >= oldest and known.get(number, seal) == seal]

    def _mac(self, number: int) -> hmac.HMAC:
        return hmac.new(self._key, f"{number}:".encode(), "sha256")


class _SigningFile:
    """File object for ``torch.save`` that also computes the signature (an HMAC) of the data that is written to it.

    Args:
        file: File to write to.
        mac: HMAC to update with the written data.
    """

    def __init__(self, file: IO[bytes], mac: hmac.HMAC) -> None:
        self._file = file
        self.mac = mac

    def write(self, data: Any) -> int:
        """Write the next bytes to the file, and add them to the signature. ``torch.save`` calls this method and never
        seeks."""
        self.mac.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Flush the checkpoint file; ``torch.save`` calls this method."""
        self._file.flush()


def _name(number: int, seal: str) -> str:
    return f"{number:08}-{seal}.pt"


def _unpickle(file: IO[bytes]) -> Any:
    import torch

    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # PyTorch's safe mode (weights_only) refuses a state that contains other objects than tensors and plain values.
        # Loading the state without the safe mode is safe here, because the signature proves that rank 0 of this run
        # wrote the file.
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=False)


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
            # If a process was killed between the two renames of `_swap`, rename the old model folder back.
            final = Path(self.path)
            for aside in self._beside("replaced"):
                if not final.is_symlink() and not final.exists():
                    with contextlib.suppress(InvalidArgumentError, OSError):
                        if self._claim.check(str(aside)):
                            aside.rename(final)
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
