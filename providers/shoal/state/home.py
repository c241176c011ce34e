"""Where shoal keeps its files on this host."""

from __future__ import annotations

import os
import tempfile
from hashlib import sha256
from pathlib import Path

from shoal.errors import StoreError
from shoal.state.engines import parsed, sqlite_file
from shoal.state.host import host_id

ROOT_VARIABLE = "SHOAL_RUNTIME_ROOT"


def home() -> Path:
    """``$SHOAL_HOME``, by default ``~/.shoal``; made with mode 0700 where it does not exist.

    Raises:
        StoreError: The folder cannot be made or written.
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
    return path


def subfolder(*parts: str) -> Path:
    """A folder under :func:`home`, made where it does not exist."""
    path = home().joinpath(*parts)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path} cannot be made: {error}. Free some room, or set SHOAL_HOME elsewhere") from error
    return path


def lock_file(name: str) -> Path:
    """A file to lock for what there is one of for a host and store: hosts (on NFS) and stores may share a home."""
    return home() / f"{name}-{host_id()}{store_tag()}.lock"


def runtime_root() -> Path:
    """The folder of the node folders of this home: short, because Ray puts AF_UNIX sockets (108 bytes at most) there.

    One per home and store, so that on one host neither two homes nor a shell that has another ``$SHOAL_STATE_URL`` take
    each other's nodes for leftovers. Processes of a node, whose temp dir is another, are told by
    ``$SHOAL_RUNTIME_ROOT``.
    """
    if told := os.environ.get(ROOT_VARIABLE):
        return Path(told)
    digest = sha256(os.fsencode(home()) + store_tag().encode()).hexdigest()[:6]
    return Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}" / digest


def store_tag() -> str:
    """Tells the stores of one home apart; empty for its own. User and password are no part of which store it is."""
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
