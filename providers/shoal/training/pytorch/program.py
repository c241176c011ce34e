"""Define the programs that workers run: functions with their arguments, and scripts with their command lines and the
files that travel with them."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import pickletools
import re
import runpy
import sys
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.host import own_process
from shoal.training.pickling import is_installed, pickled

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
        stored = {
            name: content if content is None or name.endswith(".py") else zlib.compress(content, 1).hex()
            for name, content in self.items()
        }
        return Files.restored, (stored,)

    @classmethod
    def restored(cls, stored: Mapping[str, bytes | str | None]) -> Files:
        """Return the files from what pickle has stored."""
        return cls(
            {
                name: zlib.decompress(bytes.fromhex(content)) if isinstance(content, str) else content
                for name, content in stored.items()
            }
        )


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
    file, base = root / IGNORE_FILE, os.path.realpath(root)
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    ignored = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    for parent, names_of_folders, names in os.walk(root):
        here = Path(parent).relative_to(root)
        names_of_folders[:] = sorted(
            name for name in names_of_folders if not _is_left_out(here / name, ignored, is_folder=True)
        )
        for name in names_of_folders:
            if not (root / here / name).is_symlink():
                folders.append(str(here / name))
            else:
                # A link into the folder, which travels, is relative.
                target = os.path.realpath(root / here / name)
                is_inside = Path(target).is_relative_to(base)
                links[str(here / name)] = os.path.relpath(target, Path(base, here)) if is_inside else target
        for name in sorted(names):
            if not _is_left_out(here / name, ignored) and (root / here / name).is_file():
                yield root / here / name


def _is_left_out(path: Path, ignored: Sequence[str], *, is_folder: bool = False) -> bool:
    if path.name != _PROJECT_ROOT and (path.name.startswith(".") or path.name == "__pycache__"):
        return True
    names = (pattern.rstrip("/") for pattern in ignored if is_folder or not pattern.endswith("/"))
    return any(fnmatch(path.name, name) or fnmatch(str(path), name.lstrip("/")) for name in names)


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


MAX_PROGRAM_BYTES = 64 * 2**20
"""Maximum size in bytes of a pickled function with its arguments and closure. The size is limited, because the pickled
function is stored with the job and kept in memory."""


@dataclass(frozen=True, slots=True)
class Program:
    """A function or script with its arguments, which can be pickled and called in a worker."""

    target: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, target: Callable[..., Any] | str | os.PathLike[str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Program:
        """Create a program from a function and its arguments, or from a script's path and its command line.

        Raises:
            InvalidArgumentError: `target` is neither a function nor a path, the script cannot be read, or the function
                does not accept the arguments.
        """
        if isinstance(target, str | os.PathLike):
            check_script_arguments(kwargs)
            return cls(Script.read(target, args))
        check_runnable(target, "the target")
        try:
            inspect.signature(target).bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidArgumentError(
                f"{name_of(target)} cannot be called with the given arguments: {error}"
            ) from None
        except ValueError:
            pass  # The function is a builtin without a signature, so its arguments cannot be checked.
        return cls(target, tuple(args), dict(kwargs))

    def dumps(self, pool_without_folder: Callable[[str], str | None] = lambda folder: None) -> bytes:
        """Pickle the program, including the variables of the function's closure, or the files beside the script.

        Args:
            pool_without_folder: Function that returns the name of the program's pool if its nodes may not have a
                folder of this machine. A script whose folder is too large to travel is then refused.

        Raises:
            InvalidArgumentError: The program contains an object that cannot be pickled, or is too large.
        """
        whole = self
        if isinstance(self.target, Script):
            script = self.target.with_files()
            if script.beside and script.beside.too_large and (pool := pool_without_folder(script.beside.path)):
                script.beside.refuse(script.name, f'the nodes of the pool "{pool}" may be on other machines')
            whole = replace(self, target=script)
        content = pickled(whole, name_of(self.target))
        if len(content) > MAX_PROGRAM_BYTES:
            raise InvalidArgumentError(
                f"{name_of(self.target)} is {len(content) / 2**20:.0f} MiB large with its arguments and the variables "
                f"of its closure, but the limit is {MAX_PROGRAM_BYTES / 2**20:.0f} MiB: pass data in dataset_map, or "
                "let the function read the data itself"
            )
        return content

    def __call__(self) -> Any:
        """Call the function with its arguments, or run the script, in this process."""
        try:
            return self.target(*self.args, **self.kwargs)
        except SystemExit as end:
            if end.code not in (None, 0):
                # A library such as Hydra prints the error of the script, and exits.
                error = end.__context__
                cause = "" if error is None else f" after {type(error).__name__}: {error}"
                raise TrainingError(
                    f"{name_of(self.target)} exited with {end.code!r}{cause}: only exit code 0 counts as success"
                ) from None
            return None


def name_of(target: Any) -> str:
    """Return the name of a function or script, for messages to the user."""
    while isinstance(target, partial):
        target = target.func
    return str(getattr(target, "__name__", None) or getattr(target, "name", None) or type(target).__name__)


def may_call_ray(program: bytes) -> bool:
    """Return whether the code of a pickled program, or of the user's modules that it names, mentions Ray, or those
    distributors of shoal that use the Ray cluster of a function that calls them.

    A function of a library that calls Ray elsewhere is not found: ``ray.init`` then raises an error on a pool without
    Ray.
    """
    if _RAY.search(program):
        return True
    named = {argument for _, argument, _ in pickletools.genops(program) if isinstance(argument, str)}
    # Functions of ``__main__`` are pickled with their code.
    modules = [sys.modules.get(name) for name in named - {"__main__"}]
    files = {Path(each.__file__ or "") for each in modules if isinstance(each, ModuleType) and not is_installed(each)}
    # A module may have no file, such as one in a zip archive, or its file may have been removed.
    return any(_RAY.search(file.read_bytes()) for file in files if file.suffix == ".py" and file.is_file())


TrainFunc = Callable[..., Any] | str | os.PathLike[str]
"""Type of `train_func`: a function, the name of a function (``pkg.module:name``), or the path of a script."""

FRAMEWORK = "pytorch"
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_RAY = re.compile(rb"(?<![\w.])ray(?!\w)|shoal\.distributors(?!\.pytorch)")
_OF_THE_FUNCTION = ("train_func", "args", "kwargs", "program")


def is_name(train_func: Any) -> bool:
    """Return whether `train_func` is the name of a function in the form ``pkg.module:name``, and not a path."""
    return isinstance(train_func, str) and _NAME.fullmatch(train_func) is not None


def imported(name: str) -> Callable[..., Any]:
    """Import a function by its name ``pkg.module:name``.

    Raises:
        InvalidArgumentError: The function cannot be imported.
    """
    module, _, path = name.partition(":")
    try:
        found: Callable[..., Any] = attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(
            f"train_func {name} cannot be imported: {error}. Check the names of the module and the function"
        ) from error
    return found


def call_imported(name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Import a function by its name ``pkg.module:name``, call it, and return its value."""
    return imported(name)(*args, **kwargs)


def check_train_func(
    train_func: Any, args: Any, kwargs: Any, *, framework: str | None = None, fields: Any = None
) -> None:
    """Raise InvalidArgumentError if `train_func` cannot be run with the given arguments.

    The check reads no files.

    Raises:
        InvalidArgumentError: The arguments are not allowed together; the message contains the reason.
    """
    if isinstance(args, str | bytes):
        raise InvalidArgumentError(f"arguments must be a list, such as [{args!r}], not {args!r}")
    in_spec = fields.get("framework") if isinstance(fields, Mapping) else getattr(fields, "framework", None)
    if framework and in_spec and framework != in_spec:
        raise InvalidArgumentError(
            f'framework="{framework}" contradicts framework="{in_spec}" in the spec: remove one of the two'
        )
    if train_func is None:
        if args or kwargs:
            raise InvalidArgumentError(
                "arguments are set, but train_func is not: set train_func, or remove the arguments"
            )
        return
    check_runnable(train_func, "train_func", "a function, the name of a function (pkg.module:name)")
    if (framework or in_spec or FRAMEWORK) != FRAMEWORK:
        raise InvalidArgumentError(
            f'train_func requires framework="{FRAMEWORK}", not framework="{framework or in_spec}"'
        )
    if fields is not None and not isinstance(fields, Mapping):
        raise InvalidArgumentError(
            "if train_func is given, spec must be a dict with the other fields of the job, such as hyper_params"
        )
    if twice := sorted(set(_OF_THE_FUNCTION) & set(fields or ())):
        raise InvalidArgumentError(
            f"if train_func is given, spec must not contain {', '.join(twice)}: remove these fields from the spec"
        )
    if not callable(train_func) and not is_name(train_func):
        check_script_arguments(kwargs)


def check_runnable(target: Any, argument: str, function: str = "a function") -> None:
    """Raise InvalidArgumentError if `target` is neither a function nor a string nor a path object, or is an async
    function or a generator function."""
    if not callable(target) and not isinstance(target, str | os.PathLike):
        raise InvalidArgumentError(f"{argument} must be {function} or the path of a script, not {target!r}")
    if kind := _not_called_to_its_end(target):
        raise InvalidArgumentError(
            f"{argument} is {kind}, whose call returns before its code has run: pass a plain function, which may call "
            "asyncio.run(...) or loop over the generator"
        )


def _not_called_to_its_end(target: Any) -> str | None:
    while isinstance(target, partial):
        target = target.func
    for function in (target, vars(type(target)).get("__call__")):
        if inspect.iscoroutinefunction(function):
            return "an async function"
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            return "a generator function"
    return None


def check_script_arguments(kwargs: Mapping[str, Any] | None) -> None:
    """Raise InvalidArgumentError if there are keyword arguments for a script, which accepts only a list."""
    if kwargs:
        raise InvalidArgumentError(
            f"a script accepts only command line arguments, no keyword arguments: {sorted(kwargs)}. "
            "Pass these values in the list of arguments"
        )
