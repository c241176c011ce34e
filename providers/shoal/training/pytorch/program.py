"""Define the programs that workers run: functions with their arguments, and scripts with their command line
arguments."""

from __future__ import annotations

import importlib
import inspect
import os
import pickletools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.pickling import pickled
from shoal.training.pytorch.script import Script

MAX_BYTES = 64 * 2**20
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
    names = (argument for _, argument, _ in pickletools.genops(program) if isinstance(argument, str))
    files = {Path(str(getattr(sys.modules[name], "__file__", None))) for name in names if _is_users(name)}
    # A module may have no file, such as one in a zip archive, or its file may have been removed.
    return any(_RAY.search(file.read_bytes()) for file in files if file.suffix == ".py" and file.is_file())


def _is_users(name: str) -> bool:
    """Return whether this is the name of an imported module of the user, whose functions are pickled as names. Those of
    ``__main__`` are pickled with their code."""
    if name not in sys.modules or name == "__main__" or name.partition(".")[0] in {"shoal", *sys.stdlib_module_names}:
        return False
    return "site-packages" not in str(getattr(sys.modules[name], "__file__", None))


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
        function: Any = importlib.import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(
            f"train_func {name} cannot be imported: {error}. Check the names of the module and the function"
        ) from error
    found: Callable[..., Any] = function
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
