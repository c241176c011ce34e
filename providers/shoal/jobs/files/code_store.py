"""What a job takes along by value, the user's own code: stored once under its digest, named in the spec."""

from __future__ import annotations

import hashlib

from shoal.errors import JobError
from shoal.jobs.files import storage
from shoal.training.boosting.user_code import UserCode
from shoal.training.pickling import pickled

_FOLDER = "_code"


def store(content: bytes, artifact_location: str | None) -> str:
    """Write pickled code where the pool's head reads it.

    Args:
        content: What to write.
        artifact_location: Directory or URI; None: the job's default.

    Returns:
        The path or URI.
    """
    path = f"{storage.root(artifact_location)}/{_FOLDER}/{hashlib.sha256(content).hexdigest()}"
    storage.write(path, content)
    return path


def read(path: str) -> bytes:
    """Read what was stored.

    Raises:
        JobError: It is gone, or is not what was stored.
    """
    try:
        content = storage.read(path)
    except OSError as error:
        raise JobError(f"the job's code cannot be read: {error}") from error
    if hashlib.sha256(content).hexdigest() != path.rpartition("/")[2]:
        raise JobError(f"the job's code at {path} was changed since it was stored")
    return content


def store_user_code(user_code: UserCode, artifact_location: str | None) -> str:
    """Write callbacks and functions; see :func:`store`.

    Raises:
        InvalidArgumentError: Something cannot be pickled.
    """
    return store(pickled(user_code, user_code.parts(), "callbacks, objective or metrics"), artifact_location)


def load_user_code(path: str) -> UserCode:
    """Read callbacks and functions; see :func:`read`."""
    import cloudpickle

    user_code: UserCode = cloudpickle.loads(read(path))
    return user_code
