"""Save and load the checkpoints of a run (the two newest states of rank 0). Each checkpoint has a signature, the seal.

Loading a pickle can run code, and other users may be able to write to the artifact location. A checkpoint is therefore
loaded only if its seal is correct. The seal is an HMAC of the checkpoint's number and content, with a key that the
driver creates for the run and sends to the workers. Rank 0 sends the seals to the driver before a new checkpoint gets
its final name, so that a resumed run accepts no older checkpoint. A checkpoint is written under a temporary name first,
so it is either complete or absent.
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
from shoal.training.locations import filesystem, is_local, make_folder, open_file
from shoal.training.reporting import say

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_NAME = re.compile(r"(\d{8,})-([0-9a-f]{64})\.pt")
_BLOCK_BYTES = 2**20

Seals = Mapping[int, str]
"""Seals of checkpoints: number of the checkpoint -> its seal (the HMAC of its number and content)."""


class Checkpoints:
    """The checkpoints of one run, with methods to save and load them; only the two newest checkpoints are kept.

    Args:
        folder: Directory or URI; does not need to exist.
        key: Secret key of the run.
        known_seals: Seals (signatures) that the driver received last. A resumed run accepts only the checkpoints with
            these seals, and newer checkpoints with a correct seal.
        send_seals: Function that sends the seals of the kept checkpoints to the driver; called before the newest
            checkpoint gets its final name.

    Attributes:
        known_seals: Seals that the driver has received last.
    """

    def __init__(
        self,
        folder: str,
        key: bytes,
        known_seals: Seals | None = None,
        send_seals: Callable[[Seals], None] | None = None,
    ) -> None:
        self.folder = folder
        self.known_seals: Seals = dict(known_seals or {})
        self._key = key
        self._send_seals = send_seals
        self._current: dict[int, str] = {}
        """Number and seal of the checkpoint that this process saved or loaded last."""

    def save(self, state: Any) -> None:
        """Save a state as the newest checkpoint, and remove all checkpoints except the two newest ones."""
        import torch

        fs, root = filesystem(self.folder)
        found = self._found(fs, root)
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
            if self._send_seals:
                self._send_seals(self.known_seals)
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
        for number, seal in sorted(self._found(fs, root), reverse=True):
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
        return max((number for number, _ in self._found(*filesystem(self.folder))), default=None)

    def _found(self, fs: AbstractFileSystem, root: str) -> list[tuple[int, str]]:
        """Return the number and the seal (signature) of each checkpoint that this run may load from a folder.

        A checkpoint is left out if it is older than all seals in `known_seals`, or if its seal differs from the known
        seal.
        """
        if not fs.exists(root):
            return []
        names = (str(path).rpartition("/")[2] for path in fs.ls(root, detail=False))
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
