"""Start Python processes of shoal itself. They import nothing from the folder in which they are started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def python_command(*arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a Python interpreter with the given arguments.

    A file of the current folder that has the name of a module of the standard library would otherwise be run instead of
    this module. The option holds for this process only, so a user's script can import the modules in its own folder.
    """
    return [python, "-P", *arguments]


def start_python(
    arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a Python process that can import this process's shoal.

    Args:
        arguments: Arguments of the interpreter.
        environment: Variables of the process. None: those of this process.
        options: Further arguments of `subprocess.Popen`.
    """
    variables = dict(os.environ if environment is None else environment)
    folders = import_folders(variables.get("PYTHONPATH", ""))
    variables["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *folders])
    return subprocess.Popen(python_command(*arguments), env=variables, **options)


def import_folders(path: str) -> list[str]:
    """Return the folders in a value of PYTHONPATH, without empty names. For Python, an empty name, as in ``:/folder``,
    is the current folder."""
    return [folder for folder in path.split(os.pathsep) if folder]
