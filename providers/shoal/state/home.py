"""Where shoal keeps its files on this host."""

from __future__ import annotations

import logging
import os
import stat
from hashlib import sha256
from pathlib import Path

from shoal.errors import StoreError
from shoal.state.engines import parsed, sqlite_file
from shoal.state.host import host_id

log = logging.getLogger("shoal.home")


def home() -> Path:
    """Return ``$SHOAL_HOME``, by default ``~/.shoal``: a folder of mode 0700, made or given that mode where it is not.

    Raises:
        StoreError: The folder cannot be made or written, or other users may have changed what lies in it.
    """
    path = Path(os.environ.get("SHOAL_HOME") or "~/.shoal").expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"SHOAL_HOME {path} cannot be made: {error}. Set SHOAL_HOME to a folder you can write"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StoreError(f"SHOAL_HOME {path} is not writable. Set SHOAL_HOME to a folder you can write")
    _keep_private(path)
    return path


def _keep_private(path: Path) -> None:
    for found in (path.lstat(), path.stat()):  # a symlink of another user may be turned elsewhere later
        if found.st_uid != os.geteuid() and not (stat.S_ISLNK(found.st_mode) and found.st_uid == 0):
            raise StoreError(
                f"SHOAL_HOME {path} belongs to user {found.st_uid}, who can read and change what lies in it. "
                "Set SHOAL_HOME to a folder of your own"
            )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o002:
        raise StoreError(
            f"SHOAL_HOME {path} has mode {mode:04o}: any user may have changed what lies in it. Look through it and "
            f"`chmod 700 {path}`, or set SHOAL_HOME to a new folder"
        )
    if mode & 0o077:
        try:
            path.chmod(0o700)
        except OSError as error:
            raise StoreError(f"SHOAL_HOME {path} has mode {mode:04o}, 0700 is needed: {error}") from error
        log.warning("SHOAL_HOME %s had mode %04o, which let other users in: it is 0700 now", path, mode)


def subfolder(*parts: str) -> Path:
    """A folder under :func:`home`, made where it does not exist."""
    path = home().joinpath(*parts)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path} cannot be made: {error}. Free some room, or set SHOAL_HOME elsewhere") from error
    return path


def lock_file(name: str) -> Path:
    """A file to lock for what there is one of for a host and store."""
    return per_host(name, "lock")


def per_host(name: str, suffix: str) -> Path:
    """Return the path of a file of this host and store alone: hosts (on NFS) and stores may share a home."""
    return home() / f"{name}-{host_id()}{store_tag()}.{suffix}"


def store_tag() -> str:
    """Tell the stores of one home apart; empty for its own. User and password are no part of which store it is."""
    url = os.environ.get("SHOAL_STATE_URL")
    if not url or sqlite_file(url) == home() / "state.db":
        return ""
    said = parsed(url)
    where = (
        said.host,
        said.port,
        said.database,
        [said.query.get(name) for name in ("host", "port", "dbname", "service")],
    )
    return f"-{sha256(repr(where).encode()).hexdigest()[:6]}"
