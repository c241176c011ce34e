"""Checkpoints of a function's run: the two newest states of rank 0, each complete or absent, and each sealed.

Others may be able to write where artifacts go, and reading a pickle runs code. So a checkpoint is read only where its
seal is right: an HMAC of its number and content under a key that the driver makes for the run and hands to its workers.
Rank 0 tells the driver the seals before a checkpoint gets its name, so that a resumed gang accepts no older one.
"""

from __future__ import annotations

import hmac
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shoal.errors import TrainingError
from shoal.training.context import say

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_NAME = re.compile(r"(\d{8,})-([0-9a-f]{64})\.pt")
_BLOCK_BYTES = 2**20

Seals = Mapping[int, str]
"""Number of a checkpoint -> its seal."""


class Checkpoints:
    """One run's checkpoints, of which the two newest are kept.

    Args:
        folder: Directory or URI; it need not exist yet.
        key: The run's key.
        told: What the driver was told last; a run that resumes accepts these and newer ones.
        tell: Called with the seals of the checkpoints that are kept, before the newest gets its name.

    Attributes:
        told: As given, then the seals of what this process has saved last.
    """

    def __init__(
        self, folder: str, key: bytes, told: Seals | None = None, tell: Callable[[Seals], None] | None = None
    ) -> None:
        self.folder = folder
        self.told: Seals = dict(told or {})
        self._key = key
        self._tell = tell
        self._current: dict[int, str] = {}
        """The checkpoint that this process saved or loaded last."""

    def save(self, state: Any) -> None:
        """Write a state, then remove all but this and the one before it.

        Args:
            state: Whatever ``torch.save`` takes.
        """
        import torch

        fs, root = self._filesystem()
        found = self._found(fs, root)
        number = max([*self.told, *(other for other, _ in found)], default=0) + 1
        before = self._current or dict(sorted(self.told.items())[-1:])
        fs.makedirs(root, exist_ok=True)
        local = _is_local(fs)
        # In the same folder, so that it becomes the checkpoint in one step.
        file = tempfile.NamedTemporaryFile(dir=root if local else None, delete=False)  # noqa: SIM115
        try:
            with file:
                sealing = _Sealing(file, self._mac(number))
                torch.save(state, sealing)
                file.flush()
                os.fsync(file.fileno())
            self._current = {number: sealing.mac.hexdigest()}
            self.told = {**before, **self._current}
            if self._tell:
                self._tell(self.told)
            name = f"{root}/{_name(number, self.told[number])}"
            if local:
                Path(file.name).replace(name)
            else:
                fs.put_file(file.name, name)
        finally:
            Path(file.name).unlink(missing_ok=True)
        for other, seal in found:
            if self.told.get(other) != seal:
                fs.rm_file(f"{root}/{_name(other, seal)}")  # `fs.rm` takes "[1]" in a path for a pattern

    def load(self) -> Any:
        """The newest state whose seal is right, its tensors on the CPU; None if there is none.

        Raises:
            TrainingError: If there was one, and what is there now is not what was saved.
        """
        fs, root = self._filesystem()
        refused = []
        for number, seal in sorted(self._found(fs, root), reverse=True):
            # A copy of this process's own: the file could change between the look at its seal and its use.
            with tempfile.TemporaryFile() as copy:
                mac = self._mac(number)
                with fs.open(f"{root}/{_name(number, seal)}", "rb") as file:
                    while block := file.read(_BLOCK_BYTES):
                        mac.update(block)
                        copy.write(block)
                if not hmac.compare_digest(mac.hexdigest(), seal):
                    say(f"checkpoint {number} in {self.folder} is not as it was saved: it is not read")
                    refused.append(number)
                    continue
                self._current = {number: seal}
                return _unpickle(copy)
        if refused and self.told:
            raise TrainingError(
                f"no checkpoint in {self.folder} is as it was saved ({len(refused)} were changed or are of another "
                "run), so there is nothing to go on from: see who else writes there, then start the training anew"
            )
        return None

    def latest(self) -> int | None:
        """Number of the newest; None if there is none."""
        return max((number for number, _ in self._found(*self._filesystem())), default=None)

    def _found(self, fs: AbstractFileSystem, root: str) -> list[tuple[int, str]]:
        """Number and seal of each that is there, without those that are older than, or other than, what was told."""
        if not fs.exists(root):
            return []
        names = (str(path).rpartition("/")[2] for path in fs.ls(root, detail=False))
        found = [(int(match[1]), match[2]) for name in names if (match := _NAME.fullmatch(name))]
        oldest = min(self.told, default=0)
        return [(number, seal) for number, seal in found if number >= oldest and self.told.get(number, seal) == seal]

    def _mac(self, number: int) -> hmac.HMAC:
        return hmac.new(self._key, f"{number}:".encode(), "sha256")

    def _filesystem(self) -> tuple[AbstractFileSystem, str]:
        import fsspec

        fs, root = fsspec.core.url_to_fs(self.folder, use_listings_cache=False)
        return fs, str(root).rstrip("/")


class _Sealing:
    """A file for ``torch.save`` that reckons the seal of what is written.

    Args:
        file: Where to write.
        mac: The seal so far.
    """

    def __init__(self, file: IO[bytes], mac: hmac.HMAC) -> None:
        self._file = file
        self.mac = mac

    def write(self, data: Any) -> int:
        """Write bytes; ``torch.save`` writes one block after the other, and never seeks."""
        self.mac.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()


def _name(number: int, seal: str) -> str:
    return f"{number:08}-{seal}.pt"


def _unpickle(file: IO[bytes]) -> Any:
    import torch

    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # A state that holds more than tensors and plain values; the seal says that rank 0 of this run has written it.
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=False)


def _is_local(fs: AbstractFileSystem) -> bool:
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))
