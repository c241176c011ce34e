"""Checkpoints of a function's run: the newest state of rank 0, complete or absent, in the job's place for artifacts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_SUFFIX = ".pt"


class Checkpoints:
    """One run's checkpoints, of which the newest is kept.

    Args:
        folder: Directory or URI; it need not exist yet.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def save(self, state: Any) -> None:
        """Writes a state, then removes those before it.

        Args:
            state: Whatever ``torch.save`` takes.
        """
        import torch

        fs, root = self._filesystem()
        before = self._numbers(fs, root)
        name = f"{root}/{max(before, default=0) + 1:08}{_SUFFIX}"
        fs.makedirs(root, exist_ok=True)
        if _is_local(fs):
            # In the same folder, so that it becomes the checkpoint in one step.
            with tempfile.NamedTemporaryFile(dir=root, delete=False) as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            Path(file.name).replace(name)
        else:
            with fs.open(name, "wb") as file:  # an object is there when it is complete, and not before
                torch.save(state, file)
        for number in before:
            fs.rm(f"{root}/{number:08}{_SUFFIX}")

    def load(self) -> Any:
        """The newest state, its tensors on the CPU; None if there is none."""
        import torch

        fs, root = self._filesystem()
        number = max(self._numbers(fs, root), default=None)
        if number is None:
            return None
        with fs.open(f"{root}/{number:08}{_SUFFIX}", "rb") as file:
            # What it reads is its own: the location is no more public than the functions that are run from it.
            return torch.load(file, map_location="cpu", weights_only=False)

    def latest(self) -> int | None:
        """How many there have been; None if there is none."""
        return max(self._numbers(*self._filesystem()), default=None)

    def remove(self) -> None:
        """Removes them all; those that are gone already are left in peace."""
        fs, root = self._filesystem()
        if fs.exists(root):
            fs.rm(root, recursive=True)

    def _filesystem(self) -> tuple[AbstractFileSystem, str]:
        import fsspec

        fs, root = fsspec.core.url_to_fs(self.folder, use_listings_cache=False)
        return fs, str(root).rstrip("/")

    @staticmethod
    def _numbers(fs: AbstractFileSystem, root: str) -> list[int]:
        if not fs.exists(root):
            return []
        names = [str(path).rpartition("/")[2] for path in fs.ls(root, detail=False)]
        return [int(name.removesuffix(_SUFFIX)) for name in names if name.endswith(_SUFFIX)]


def _is_local(fs: AbstractFileSystem) -> bool:
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))
