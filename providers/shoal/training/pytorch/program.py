"""What every worker runs: a function with its arguments, or a script with its own."""

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

SCRIPT_FOLDER = "shoal-script-"
"""How the name of a folder with a script begins; the process's id follows."""

MAX_BYTES = 64 * 2**20
"""How large a function may be with all that it closes over: it passes through the driver's memory, and is stored."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Python file, which travels as text.

    Args:
        name: Its file's name.
        folder: Where it lay; modules beside it are found on nodes that see the folder.
        text: What it says.
        arguments: Its command line.
    """

    name: str
    folder: str
    text: str
    arguments: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str], arguments: Sequence[Any] = ()) -> Script:
        """Reads a file.

        Raises:
            InvalidArgumentError: If there is none.
        """
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError: the path or the text is not what UTF-8 can hold
            raise InvalidArgumentError(f"the script {str(path)!r} cannot be read: {error}") from error
        return cls(file.name, str(file.absolute().parent), text, tuple(map(str, arguments)))

    def __call__(self) -> None:
        """Runs it as ``python FILE ARGUMENTS`` would, in this process."""
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
    """What to call, by value.

    Args:
        target: The function, or the script.
        args: Arguments of the function.
        kwargs: Its arguments by name.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, target: Callable[..., Any] | str | os.PathLike[str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Program:
        """The program of a function and its arguments, or of a script's path and its command line.

        Raises:
            InvalidArgumentError: If it is neither, if the script cannot be read, or the function does not take the
                arguments.
        """
        if isinstance(target, str | os.PathLike):
            if kwargs:
                raise InvalidArgumentError(f"a script takes a command line, and no arguments by name: {sorted(kwargs)}")
            return cls(Script.read(target, args))
        if not callable(target):
            raise InvalidArgumentError(f"what is to run must be a function or the path of a script, not {target!r}")
        try:
            inspect.signature(target).bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidArgumentError(f"{name_of(target)}: {error}") from None
        except ValueError:
            pass  # a builtin without a signature
        return cls(target, tuple(args), dict(kwargs))

    def dumps(self) -> bytes:
        """Pickles it with all that it closes over.

        Raises:
            InvalidArgumentError: If something cannot be pickled, or it is too large.
        """
        content = pickled(self, [self.target, *self.args, *self.kwargs.values()], name_of(self.target))
        if len(content) > MAX_BYTES:
            raise InvalidArgumentError(
                f"{name_of(self.target)} takes {len(content) / 2**20:.0f} MiB along in its arguments and in what it "
                f"closes over, and {MAX_BYTES / 2**20:.0f} MiB are the limit: hand data over in dataset_map, or have "
                "the function read it"
            )
        return content

    def __call__(self) -> Any:
        """Calls it.

        Raises:
            TrainingError: If it exits with another code than 0; it would end the worker, which would count as lost.
        """
        try:
            return self.target(*self.args, **self.kwargs)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise TrainingError(f"{name_of(self.target)} exited with {end.code!r}") from None
            return None


def name_of(target: Any) -> str:
    """What to call a function or script in a message."""
    while isinstance(target, partial):
        target = target.func
    return str(getattr(target, "__name__", None) or getattr(target, "name", None) or type(target).__name__)
