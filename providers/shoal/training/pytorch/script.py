"""Define the scripts that workers run, and the files that travel with a script: those of its folder, and those that its
command line names."""

from __future__ import annotations

import math
import os
import runpy
import sys
import tempfile
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

from shoal.errors import InvalidArgumentError
from shoal.training.host import own_process

IGNORE_FILE = ".shoalignore"
"""File in a script's folder with the files and folders that do not travel with the script: a pattern in each line, as
in the shell (``data/``, ``*.parquet``)."""

MAX_FILES = 1_000
MAX_BYTES = 16 * 2**20
"""Maximum number and size of the files that travel with a script. They are stored with the job, and each worker writes
them."""


_PROJECT_ROOT = ".project-root"
_PROJECT_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt", _PROJECT_ROOT)
"""Files and folders that the folder of a project has. `_PROJECT_ROOT`, by which the package rootutils finds it, is the
one hidden file that travels."""


class Files(dict[str, bytes | None]):
    """Content of files by their paths.

    Pickled, files that are no Python code are compressed and written in hexadecimal digits: `may_call_ray` searches
    pickled programs for words, and a word in a README calls nothing.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle stores."""
        return Files.restored, ({name: _stored(name, content) for name, content in self.items()},)

    @classmethod
    def restored(cls, stored: Mapping[str, bytes | str | None]) -> Files:
        """Return the files from what pickle has stored."""
        return cls(
            {
                name: zlib.decompress(bytes.fromhex(content)) if isinstance(content, str) else content
                for name, content in stored.items()
            }
        )


def _stored(name: str, content: bytes | None) -> bytes | str | None:
    return content if content is None or name.endswith(".py") else zlib.compress(content, 1).hex()


def is_project(folder: str, inside: str) -> bool:
    """Return whether `folder` is that of a project, which has the folder `inside` in it."""
    is_in = Path(inside) != Path(folder) and Path(inside).is_relative_to(folder)
    return is_in and any(Path(folder, mark).exists() for mark in _PROJECT_MARKS)


@dataclass(slots=True)
class ScriptFolder:
    """Content of a script's folder, or of its project's folder.

    Args:
        path: The folder.
        files: Content of the files, by their paths in the folder.
        executables: Paths of the files that can be executed.
        folders: Paths of the folders in the folder.
        links: Targets of symbolic links to folders, and to files that are too large, by the paths of the links.
        too_large: Description of the folder's files, if they are too many or too large to travel; else empty. The
            script then runs only on nodes that have the folder.
    """

    path: str
    files: Files = field(default_factory=Files)
    executables: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    too_large: str = ""

    @classmethod
    def read(cls, path: str) -> ScriptFolder:
        """Read the files of a folder. Hidden files, bytecode and what `IGNORE_FILE` names are left out.

        Raises:
            InvalidArgumentError: A file cannot be read.
        """
        found, size = cls(path), 0
        for entry in _entries(Path(path), found.folders, found.links):
            name = str(entry.relative_to(path))
            with suppress(FileNotFoundError):  # removed meanwhile, such as a lock file
                bytes_of_it = entry.stat().st_size
                if entry.is_symlink() and size + bytes_of_it > MAX_BYTES:
                    found.links[name] = os.path.realpath(entry)
                    continue
                size += bytes_of_it
                if len(found.files) >= MAX_FILES or size > MAX_BYTES:
                    # Rounded up, so that the size is above the limit in the message, too.
                    seen = f"at least {len(found.files) + 1:,} files of {math.ceil(size / 2**20 * 10) / 10:,.1f} MiB"
                    return cls(path, too_large=seen)
                found.files[name] = read_file(entry, path)
                if os.access(entry, os.X_OK):
                    found.executables.append(name)
        return found

    def size(self) -> int:
        """Return the size of the files that travel, in bytes."""
        return sum(len(content or b"") for content in self.files.values())

    def refuse(self, script: str, why: str) -> NoReturn:
        """Raise the error that the files are too large to travel.

        Args:
            script: Name of the script.
            why: Why the script needs them.
        """
        raise InvalidArgumentError(
            f"the folder of the script {script}, {self.path}, has {self.too_large}, but at most {MAX_FILES:,} files of "
            f"{MAX_BYTES / 2**20:.0f} MiB travel with a script, and {why}: name what the script does not need in "
            f"{IGNORE_FILE} in this folder, or move the script into a folder of its own"
        )

    def lay_out(self, target: Path, script: str) -> None:
        """Put the files into the folder `target`: copies, or links if they do not travel. What is there stays as it is.

        Raises:
            InvalidArgumentError: The files are too large to travel, and this node does not have the folder.
        """
        for name in self.folders:
            (target / name).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_new(target / name, content or b"", 0o755 if name in self.executables else 0o644)
        for name, to in self.links.items():
            link_new(target / name, to)
        if not self.too_large:
            return
        if not os.path.isdir(self.path):
            self.refuse(script, "this node does not have the folder")
        for entry in Path(self.path).iterdir():
            if entry.name != script:
                link_new(target / entry.name, str(entry))


def named_files(arguments: Sequence[str], folder: str, room: int) -> Files:
    """Return the files that a command line names (``conf/a.yaml``, ``--config=conf/a.yaml``), if they are in the
    working folder of this process, but not in the folder of the script.

    Args:
        arguments: The command line.
        folder: The folder of the script.
        room: Maximum number of bytes that may travel.

    Returns:
        Content of the files by their paths in the working folder; None if a file is too large to travel.

    Raises:
        InvalidArgumentError: A file cannot be read.
    """
    found = Files()
    for argument in arguments:
        for text in {argument, argument.partition("=")[2]} - {""}:
            path = os.path.normpath(text)
            is_outside = os.path.relpath(path, folder).startswith(os.pardir)
            if path in found or os.path.isabs(path) or path.startswith(os.pardir) or not is_outside:
                continue
            if os.path.isfile(path):
                fits = os.path.getsize(path) <= room
                found[path] = read_file(Path(path), folder) if fits else None
                room -= len(found[path] or b"")
    return Files(sorted(found.items()))


def read_file(path: Path, folder: str) -> bytes:
    """Read a file that travels with the script in `folder`.

    Raises:
        InvalidArgumentError: The file cannot be read.
        FileNotFoundError: There is no such file.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidArgumentError(
            f"{path}, which travels with the script in {folder}, cannot be read: {error}. Make it readable, or name it "
            f"in {Path(folder, IGNORE_FILE)}"
        ) from error


def write_new(target: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file unless it exists. Another process never sees a part of it."""
    if os.path.lexists(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".shoal-{uuid.uuid4().hex}")
    partial.write_bytes(content)
    partial.chmod(mode)
    with suppress(FileExistsError):
        os.link(partial, target)
    partial.unlink()


def link_new(target: Path, to: str) -> None:
    """Make a symbolic link unless there is something with its name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        target.symlink_to(to)


def _entries(root: Path, folders: list[str], links: dict[str, str]) -> Iterator[Path]:
    """Yield the files of a folder that travel, in the order of their paths; add its folders, and the links to folders,
    to `folders` and `links`."""
    ignored = _patterns(root / IGNORE_FILE)
    for parent, names_of_folders, names in os.walk(root):
        here = Path(parent).relative_to(root)
        names_of_folders[:] = sorted(
            name for name in names_of_folders if not _is_left_out(here / name, ignored, is_folder=True)
        )
        for name in names_of_folders:
            if not (root / here / name).is_symlink():
                folders.append(str(here / name))
            else:
                links[str(here / name)] = _target(root, here / name)
        for name in sorted(names):
            if not _is_left_out(here / name, ignored) and (root / here / name).is_file():
                yield root / here / name


def _target(root: Path, link: Path) -> str:
    """Return the target of a link: relative if it is in the folder `root`, which travels, else absolute."""
    real, base = os.path.realpath(root / link), os.path.realpath(root)
    return os.path.relpath(real, Path(base, link.parent)) if Path(real).is_relative_to(base) else real


def _is_left_out(path: Path, ignored: Sequence[str], *, is_folder: bool = False) -> bool:
    if path.name != _PROJECT_ROOT and (path.name.startswith(".") or path.name == "__pycache__"):
        return True
    names = (pattern.rstrip("/") for pattern in ignored if is_folder or not pattern.endswith("/"))
    return any(fnmatch(path.name, name) or fnmatch(str(path), name.lstrip("/")) for name in names)


def _patterns(file: Path) -> list[str]:
    if not file.is_file():
        return []
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


SCRIPT_FOLDER = "shoal-script-"
"""Prefix of the names of temporary folders for scripts. The process id of the worker follows the prefix, so that the
folders of killed workers can be found and removed."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Python script with its command line arguments; the text of the script is sent to the workers.

    Args:
        folder: Original folder of the script.
        is_relative: Whether the path of the script was given relative to the caller's working folder.
        beside: The files that travel: those of the script's folder, or of its project.
        inside: Path of the script's folder in the folder that travels.
        caller: Working folder of the process that submits the script.
        place: Path of the folder that travels in the working folder of the job, so that relative paths lead to its
            files.
        named: Content of files outside of the script's folder that the command line names, by their paths in `caller`;
            None if a file is too large to travel.
    """

    name: str
    folder: str
    text: str
    arguments: tuple[str, ...] = ()
    is_relative: bool = False
    beside: ScriptFolder | None = None
    inside: str = ""
    caller: str = ""
    place: str = ""
    named: Files = field(default_factory=Files)

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
        is_relative = not file.is_absolute()
        return cls(file.name, str(file.absolute().parent), text, tuple(map(str, arguments)), is_relative)

    def with_files(self, place: str | None = None) -> Script:
        """Return the script with the files of its folder, and with those that its command line names.

        If this process runs in the folder of a project, and the path of the script is relative, all files of the
        project travel. If these are too many or too large, only those of the script's folder do.

        Args:
            place: Path of the script's folder in the working folder of the job. By default, relative paths are those
                from the working folder of this process, if the script is in this folder; else from the script's folder.

        Raises:
            InvalidArgumentError: A file cannot be read.
        """
        if self.beside is not None:
            return self
        caller = os.getcwd()
        beside = None
        if place is None and self.is_relative and is_project(caller, self.folder):
            beside = ScriptFolder.read(caller)
        if beside is None or beside.too_large:
            beside = ScriptFolder.read(self.folder)
        inside = os.path.relpath(self.folder, beside.path)
        beside.files.pop(os.path.normpath(os.path.join(inside, self.name)), None)
        named = named_files(self.arguments, beside.path, MAX_BYTES - beside.size())
        if place is None:
            place = os.path.relpath(beside.path, caller)
        place = "" if place.startswith(os.pardir) else place
        return replace(self, beside=beside, inside=inside, caller=caller, place=place, named=named)

    def __call__(self) -> None:
        """Run the script in this process, like ``python FILE ARGUMENTS``.

        Raises:
            InvalidArgumentError: The files of the script's folder are too large to travel, and this node does not have
                the folder.
        """
        argv, path, working_folder = sys.argv, list(sys.path), os.getcwd()
        with tempfile.TemporaryDirectory(prefix=f"{SCRIPT_FOLDER}{os.getpid()}-") as top:
            if self.beside is not None:
                self.beside.lay_out(Path(top), self.name)
                self._lay_out_for_relative_paths(self.beside)
            file = Path(top, self.inside, self.name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.text, encoding="utf-8")
            sys.argv = [str(file), *self.arguments]
            sys.path[:0] = [str(file.parent), self.folder]
            try:
                runpy.run_path(str(file), run_name="__main__")
            finally:
                sys.argv, sys.path[:] = argv, path
                os.chdir(working_folder)  # scripts may change into their own folder, which is removed now

    def placed(self) -> dict[str, int | None]:
        """Return the files that are put where relative paths lead to them, with their sizes; None if not known."""
        files = {} if self.beside is None else {**self.beside.files, os.path.join(self.inside, self.name): None}
        paths = {os.path.join(self.place, name): content for name, content in files.items()} | self.named
        return {os.path.normpath(path): None if content is None else len(content) for path, content in paths.items()}

    def _lay_out_for_relative_paths(self, beside: ScriptFolder) -> None:
        """Put the files where relative paths lead to them from the job's working folder, as from that of the caller.
        The workers of a host share the job's folder."""
        work = own_process.entered_folder()
        if work is None or work == self.caller:  # not a folder of the job
            return
        target = Path(work, self.place)
        beside.lay_out(target, self.name)
        write_new(target / self.inside / self.name, self.text.encode())
        for name, content in self.named.items():
            if content is not None:
                write_new(Path(work, name), content)
            elif (source := Path(self.caller, name)).exists():
                link_new(Path(work, name), str(source))
