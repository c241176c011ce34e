"""Create folders whose mode does not depend on the umask alone."""

from __future__ import annotations

from pathlib import Path

SHARED_MODE = 0o775
"""Mode of a folder for results. With a umask of 0, too, not every user may write to it."""


def create_folder(folder: Path, mode: int = 0o700) -> None:
    """Create a folder and its missing parents with the same mode. `Path.mkdir` creates parents with mode 0777.

    Raises:
        OSError: A folder cannot be created.
    """
    if not folder.is_dir():
        create_folder(folder.parent, mode)
        folder.mkdir(mode, exist_ok=True)
