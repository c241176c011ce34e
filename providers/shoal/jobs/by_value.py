"""What a job takes along by value, the user's own code: stored once under its digest, named in the spec."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs import files
from shoal.training.user_code import UserCode

_FOLDER = "_code"


def store(user_code: UserCode, artifact_location: str | None) -> str:
    """Write callbacks and functions where the pool's head reads them.

    They travel with what they close over; whatever is not installed in the environment, such as a script, a DAG file or
    a notebook, travels along, because the nodes cannot import it.

    Args:
        user_code: What to write.
        artifact_location: Directory or URI; None: the job's default.

    Returns:
        The path or URI.

    Raises:
        InvalidArgumentError: Something cannot be pickled.
    """
    import cloudpickle

    try:
        with _by_value(_modules_of(user_code.parts())):
            content = cloudpickle.dumps(user_code)
    except Exception as error:
        raise InvalidArgumentError(f"callbacks, objective or metrics cannot be sent to the pool: {error}") from error
    path = f"{files.root(artifact_location)}/{_FOLDER}/{hashlib.sha256(content).hexdigest()}"
    files.write(path, content)
    return path


def load(path: str) -> UserCode:
    """Read what was stored.

    Raises:
        JobError: It is gone, or is not what was stored.
    """
    import cloudpickle

    try:
        content = files.read(path)
    except OSError as error:
        raise JobError(f"the job's callbacks and functions cannot be read: {error}") from error
    if hashlib.sha256(content).hexdigest() != path.rpartition("/")[2]:
        raise JobError(f"the job's callbacks and functions at {path} were changed since they were stored")
    user_code: UserCode = cloudpickle.loads(content)
    return user_code


def _modules_of(objects: Iterable[Any]) -> Iterator[ModuleType]:
    for found in objects:
        while isinstance(found, partial):
            found = found.func
        name = found.__module__ if hasattr(found, "__qualname__") else type(found).__module__
        if (module := sys.modules.get(name)) is not None and not _is_installed(module):
            yield module


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    installed = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platlib", "purelib")]
    # Without a file it is built in, or what is typed in, which travels by value anyhow.
    return file is None or any(Path(file).is_relative_to(folder) for folder in installed)


@contextmanager
def _by_value(modules: Iterable[ModuleType]) -> Iterator[None]:
    import cloudpickle

    mine = {module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()}
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)
