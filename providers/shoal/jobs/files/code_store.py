"""Write the user's pickled code and models to continue from into files, and read these files. A file's name is the
digest of its content."""

from __future__ import annotations

import hashlib

from shoal.jobs.files import storage
from shoal.training.boosting.user_code import UserCode
from shoal.training.pickling import pickled

_FOLDER = "_code"


def store(content: bytes) -> str:
    """Write pickled code into a file under `$SHOAL_HOME`. The file's name is the SHA-256 of the code.

    The driver reads this file, or a copy of the file in a package that is sent to the pool
    (`shoal.jobs.remote.package`).
    """
    path = f"{storage.root(None)}/{_FOLDER}/{hashlib.sha256(content).hexdigest()}"
    storage.write(path, content)
    return path


def read(path: str) -> bytes:
    """Read pickled code that :func:`store` has written.

    Raises:
        JobError: The file cannot be read, or was changed.
    """
    return storage.read_unchanged(path, path.rpartition("/")[2])


def store_user_code(user_code: UserCode) -> str:
    """Pickle the user's callbacks, objective and metrics, and write them into a file; see :func:`store`.

    Raises:
        InvalidArgumentError: A callback, the objective or a metric cannot be pickled.
    """
    return store(pickled(user_code, "callbacks, objective or metrics"))


def load_user_code(path: str) -> UserCode:
    """Read and unpickle the file of the user's callbacks, objective and metrics; see :func:`read`."""
    import cloudpickle

    user_code: UserCode = cloudpickle.loads(read(path))
    return user_code
