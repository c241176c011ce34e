"""Define the programs that workers run: functions with their arguments, and scripts with their command line
arguments."""

from __future__ import annotations

import inspect
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.pickling import pickled
from shoal.training.pytorch.train_func import check_runnable, check_script_arguments

SCRIPT_FOLDER = "shoal-script-"
"""Prefix of the names of temporary folders for scripts. The process id of the worker follows the prefix, so that the
folders of killed workers can be found and removed."""

MAX_BYTES = 64 * 2**20
"""Maximum size in bytes of a pickled function with its arguments and closure. The size is limited, because the pickled
function is stored with the job and kept in memory."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Python script with its command line arguments; the text of the script is sent to the workers.

    Args:
        name: File name of the script.
        folder: Original folder of the script. If a node has this folder, the script can import modules from it.
        text: Content of the file.
        arguments: Command line arguments.
    """

    name: str
    folder: str
    text: str
    arguments: tuple[str, ...] = ()

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

    def __call__(self) -> None:
        """Run the script in this process, like ``python FILE ARGUMENTS``."""
        argv, path = sys.argv, list(sys.path)
        with tempfile.TemporaryDirectory(prefix=f"{SCRIPT_FOLDER}{os.getpid()}-") as folder:
            file = Path(folder, self.name)
            file.write_text(self.text, encoding="utf-8")
            sys.argv = [str(file), *self.arguments]
            sys.path.insert(0, self.folder)
            try:
                runpy.run_path(str(file), run_name="__main__")
            finally:
                sys.argv, sys.path[:] = argv, path


@dataclass(frozen=True, slots=True)
class Program:
    """A function or script with its arguments, which can be pickled and called in a worker.

    Args:
        target: Function or script.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
    """

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

    def dumps(self) -> bytes:
        """Pickle the program, including the variables of the function's closure.

        Raises:
            InvalidArgumentError: The program contains an object that cannot be pickled, or is too large.
        """
        content = pickled(self, name_of(self.target))
        if len(content) > MAX_BYTES:
            raise InvalidArgumentError(
                f"{name_of(self.target)} is {len(content) / 2**20:.0f} MiB large with its arguments and the variables "
                f"of its closure, but the limit is {MAX_BYTES / 2**20:.0f} MiB: pass data in dataset_map, or let the "
                "function read the data itself"
            )
        return content

    def __call__(self) -> Any:
        """Call the function with its arguments, or run the script, in this process."""
        try:
            return self.target(*self.args, **self.kwargs)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise TrainingError(
                    f"{name_of(self.target)} exited with {end.code!r}: only exit code 0 counts as success"
                ) from None
            return None


def name_of(target: Any) -> str:
    """Return the name of a function or script, for messages to the user."""
    while isinstance(target, partial):
        target = target.func
    return str(getattr(target, "__name__", None) or getattr(target, "name", None) or type(target).__name__)
