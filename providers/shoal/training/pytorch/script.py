"""Define the scripts that workers run."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.training.host import change_directory
from shoal.training.pytorch.script_folder import (
    MAX_BYTES,
    Files,
    ScriptFolder,
    is_project,
    link_new,
    named_files,
    write_new,
)

SCRIPT_FOLDER = "shoal-script-"
"""Prefix of the names of temporary folders for scripts. The process id of the worker follows the prefix, so that the
folders of killed workers can be found and removed."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Python script with its command line arguments; the text of the script is sent to the workers.

    Args:
        name: File name of the script.
        folder: Original folder of the script.
        text: Content of the file.
        arguments: Command line arguments.
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
        work = change_directory.entered()
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
