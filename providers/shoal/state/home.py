"""The paths of shoal's files on this host: the home folder (``$SHOAL_HOME``), its subfolders, and locks on files; and
the address of the store to which they belong.

A home folder that any user may write to is refused.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path

from shoal.errors import StoreError, shown
from shoal.new_files import create_folder
from shoal.os_processes import host_id
from shoal.state.databases import parsed, sqlite_file

log = logging.getLogger("shoal.home")

_other_store: ContextVar[str | None] = ContextVar("shoal_store", default=None)


def use_store(url: str | None) -> None:
    """Use another store than that of this process from now on, in this thread or asyncio task, as a server does that
    serves the stores of several teams.

    The users who can write to that store are not those of this process. So its rows must not lead to files, programs
    or credentials of this process: the home folder is another one, this machine is no host of the pools
    (`shoal.pool.bound_host.is_here`), and callers that read or remove files named in rows ask `is_own_store` first.

    Args:
        url: SQLAlchemy URL of the store. None: the store of this process.
    """
    _other_store.set(url)


def is_own_store() -> bool:
    """Return whether this thread or asyncio task uses the store of this process; see `use_store`."""
    return _other_store.get() is None


def default_url() -> str:
    """Return the URL of the store that `Store()` opens: that of `use_store`, else ``$SHOAL_STATE_URL``, else a SQLite
    file in ``$SHOAL_HOME``."""
    return _other_store.get() or os.environ.get("SHOAL_STATE_URL") or f"sqlite:///{home() / 'state.db'}"


def home() -> Path:
    """Return ``$SHOAL_HOME`` (default: ``~/.shoal``). Create the folder if needed, and set its mode to 0700."""
    path = Path(os.environ.get("SHOAL_HOME") or "~/.shoal").expanduser().absolute()
    if (url := _other_store.get()) is not None:
        path /= f"store-{sha256(str(parsed(url)).encode()).hexdigest()[:12]}"  # str() hides the password
    try:
        create_folder(path)
    except OSError as error:
        raise StoreError(
            f"SHOAL_HOME {path} cannot be created: {error}. Set SHOAL_HOME to a folder to which you can write"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StoreError(f"SHOAL_HOME {path} is not writable. Set SHOAL_HOME to a folder to which you can write")
    _keep_private(path)
    return path


def _keep_private(path: Path) -> None:
    """Set the mode of ``$SHOAL_HOME`` to 0700 if other users can enter the folder."""
    # If the path is a symlink, both the link and its target are checked, because the link's owner could later change
    # the link to another folder.
    for found in (path.lstat(), path.stat()):
        if found.st_uid != os.geteuid() and not (stat.S_ISLNK(found.st_mode) and found.st_uid == 0):
            raise StoreError(
                f"SHOAL_HOME {path} belongs to user {found.st_uid}, who can read and change files in it. "
                "Set SHOAL_HOME to a folder that belongs to you"
            )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o002:
        raise StoreError(
            f"SHOAL_HOME {path} has mode {mode:04o}: any user may have changed files in it. Check its contents and run "
            f"`chmod 700 {path}`, or set SHOAL_HOME to a new folder"
        )
    if mode & 0o077:
        try:
            path.chmod(0o700)
        except OSError as error:
            raise StoreError(
                f"SHOAL_HOME {path} has mode {mode:04o}, and changing it to 0700 failed: {error}. Set SHOAL_HOME to "
                "another folder"
            ) from error
        log.warning("SHOAL_HOME %s had mode %04o, so other users could enter it: its mode is now 0700", path, mode)


def file_name(text: str) -> str:
    """Check that a text, such as an id in a row, can be the name of a file or folder, and return the text."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", text):
        raise StoreError(
            f"the store has a row with the name or id {shown(text)}, which cannot be the name of a file: nothing is "
            "done with it; delete the row"
        )
    return text


def subfolder(*parts: str) -> Path:
    """Return the path of a folder in :func:`home`, and create the folder if needed.

    Args:
        parts: Names of the nested folders, such as ``"logs"``.
    """
    path = home().joinpath(*map(file_name, parts))
    with _explained(path, "created"):
        create_folder(path)
    return path


@contextmanager
def _explained(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path} cannot be {done}: {error}. Free some disk space, or set SHOAL_HOME to another folder"
        ) from error


def write_file(path: Path, text: str) -> None:
    """Write a file of mode 0600 atomically, so that readers never see half of it, and other users nothing."""
    with _explained(path, "written"):
        descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(partial, path)


def lock_file(name: str) -> Path:
    """Return the path of a lock file in the home folder. The processes of this host that use this store share the lock
    file."""
    return per_host(name, "lock")


def per_host(name: str, suffix: str) -> Path:
    """Return the path of a file in the home folder. Each host and each store has its own path.

    The path contains the host and the store, because several hosts (by NFS) and several stores may use one home folder.
    """
    return home() / f"{name}-{host_id()}{store_tag()}.{suffix}"


def store_tag() -> str:
    """Return a suffix for file names that is different for each store that uses this home folder.

    The suffix is empty for the default store, the SQLite file in the home folder. It does not depend on the user and
    password of the store's URL, so a new password does not change file names.
    """
    if sqlite_file(default_url()) == home() / "state.db":
        return ""
    parts = parsed(default_url())
    address = (
        parts.host,
        parts.port,
        parts.database,
        [parts.query.get(name) for name in ("host", "port", "dbname", "service")],
        *re.findall(r"search_path=\S+", str(parts.query.get("options"))),
    )
    return f"-{sha256(repr(address).encode()).hexdigest()[:6]}"


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock on a file, and hold the lock inside the ``with`` block.

    If the process dies inside the block, the kernel releases the lock.
    """
    with open_locked(path, wait=True) as _:
        yield


@contextmanager
def open_locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a file, and yield True. If `wait` is False and another process holds the lock, yield False instead.

    The lock is released when this process ends, at the latest. Programs that this process starts do not inherit the
    lock.
    """
    with _explained(path, "locked"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        with suppress(OSError):
            os.close(descriptor)
