"""Define the scripts that workers run, with the files of their folders."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from shoal.errors import InvalidArgumentError

SCRIPT_FOLDER = "shoal-script-"
"""Prefix of the names of temporary folders for scripts. The process id of the worker follows the prefix, so that the
folders of killed workers can be found and removed."""

IGNORE_FILE = ".shoalignore"
"""File in a script's folder with the files and folders that do not travel with the script: a pattern in each line, as
in the shell (``data/``, ``*.parquet``)."""

MAX_FILES = 1_000
MAX_BYTES = 16 * 2**20
"""Maximum number and size of the files that travel with a script. They are stored with the job, and each worker writes
them."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Python script with its command line arguments; the text of the script is sent to the workers.

    Args:
        name: File name of the script.
        folder: Original folder of the script.
        text: Content of the file.
        arguments: Command line arguments.
        files: Content of the other files of the folder, by their paths in it.
        too_large: Description of the folder's files, if they are too many or too large to travel; else empty. The
            script then runs only on nodes that have its folder.
    """

    name: str
    folder: str
    text: str
    arguments: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    too_large: str = ""

    @classmethod
    def read(cls, path: str | os.PathLike[str], arguments: Sequence[Any] = ()) -> Script:
        """Read the text of a script from a file.

        Raises:
            InvalidArgumentError: The file cannot be read.
        """
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            # Python raises ValueError if the text is not valid UTF-8, or if the path contains invalid characters.
            raise InvalidArgumentError(f"the script {str(path)!r} cannot be read: {error}") from error
        return cls(file.name, str(file.absolute().parent), text, tuple(map(str, arguments)))

    def with_files(self) -> Script:
        """Return the script with the files of its folder.

        Hidden files, bytecode and what `IGNORE_FILE` names are left out.

        Raises:
            InvalidArgumentError: A file cannot be read.
        """
        files: dict[str, bytes] = {}
        size = 0
        for path in _files(Path(self.folder)):
            try:
                content = path.read_bytes()
            except FileNotFoundError:  # removed meanwhile, such as a lock file
                continue
            except OSError as error:
                raise InvalidArgumentError(
                    f"{path}, which lies beside the script {self.name}, cannot be read: {error}. Make it readable, or "
                    f"name it in {Path(self.folder, IGNORE_FILE)}"
                ) from error
            size += len(content)
            files[str(path.relative_to(self.folder))] = content
            if len(files) > MAX_FILES or size > MAX_BYTES:
                return replace(self, too_large=f"at least {len(files):,} files of {size / 2**20:,.1f} MiB")
        files.pop(self.name, None)
        return replace(self, files=files)

    def __call__(self) -> None:
        """Run the script in this process, like ``python FILE ARGUMENTS``.

        Raises:
            InvalidArgumentError: The files of the script's folder are too large to travel, and this node does not have
                the folder.
        """
        argv, path = sys.argv, list(sys.path)
        with tempfile.TemporaryDirectory(prefix=f"{SCRIPT_FOLDER}{os.getpid()}-") as folder:
            self._lay_out(Path(folder))
            file = Path(folder, self.name)
            file.write_text(self.text, encoding="utf-8")
            sys.argv = [str(file), *self.arguments]
            sys.path[:0] = [folder, self.folder]
            try:
                runpy.run_path(str(file), run_name="__main__")
            finally:
                sys.argv, sys.path[:] = argv, path

    def _lay_out(self, folder: Path) -> None:
        """Put the files of the script's folder into `folder`: copies, or links if they did not travel."""
        for name, content in self.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        if not self.too_large:
            return
        if not os.path.isdir(self.folder):
            raise InvalidArgumentError(
                f"the folder of the script {self.name}, {self.folder}, has {self.too_large}, but at most {MAX_FILES:,} "
                f"files of {MAX_BYTES / 2**20:.0f} MiB travel with a script, and this node does not have the folder: "
                f"name what the script does not need in {IGNORE_FILE} in this folder, or move the script into a folder "
                "of its own"
            )
        for entry in Path(self.folder).iterdir():
            if entry.name != self.name:
                (folder / entry.name).symlink_to(entry)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that travel, in the order of their paths."""
    ignored = _patterns(folder / IGNORE_FILE)
    for parent, folders, names in os.walk(folder):
        here = Path(parent).relative_to(folder)
        folders[:] = sorted(name for name in folders if not _is_left_out(here / name, ignored, is_folder=True))
        for name in sorted(names):
            if not _is_left_out(here / name, ignored) and (folder / here / name).is_file():
                yield folder / here / name


def _is_left_out(path: Path, ignored: Sequence[str], *, is_folder: bool = False) -> bool:
    if path.name.startswith(".") or path.name == "__pycache__":
        return True
    names = (pattern.rstrip("/") for pattern in ignored if is_folder or not pattern.endswith("/"))
    return any(fnmatch(path.name, name) or fnmatch(str(path), name.lstrip("/")) for name in names)


def _patterns(file: Path) -> list[str]:
    if not file.is_file():
        return []
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]
