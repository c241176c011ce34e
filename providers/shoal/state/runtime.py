"""The runtime roots: where the folders of running nodes are, on short paths that no other user can enter or squat on.

Ray makes the folders below a node's folder, and that folder too, with mode 0777: a user who can enter them takes the
place of a socket and collects tokens. Only the root above, with mode 0700 and a name that nobody knows before, keeps
other users out. So every use begins with a check, and a root that does not pass is left alone and made anew.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from shoal.errors import StoreError
from shoal.state.home import home, lock_file, per_host, store_tag
from shoal.state.locks import file_lock
from shoal.state.private import remove_folder, why_not_mine, why_not_private, why_replaceable

ROOT_VARIABLE = "SHOAL_RUNTIME_ROOT"
"""Tells a node's processes, whose temp folder is the node's own, the root that the node's folder is in."""

_MARKER = "shoal.json"
"""File in a root that names its home and store."""

_NODE_ID = re.compile(r"[0-9a-f]{10}")

_SOCKET_LIMIT = 107
"""Bytes of an AF_UNIX path, its final zero left out."""

_LONGEST_SOCKET = "/shoal-12345678/0123456789/session_2026-01-01_00-00-00_000000_4194304/sockets/dash_MetricsHead"
"""The longest of a head's sockets, under the temp folder."""

log = logging.getLogger("shoal.runtime")


def runtime_root() -> Path:
    """Return the folder for the folders of new nodes; made in the temp folder where there is none.

    One per home, store, host and temp folder, recorded in the home. In a node's processes it is the root of that node.

    Raises:
        StoreError: Nothing safe can be made in the temp folder, or its path is too long for sockets.
    """
    if told := _told():
        return told
    temp = temp_folder()
    if root := _newest(temp):
        return root
    with file_lock(lock_file("runtime")):
        if root := _newest(temp):  # made by another process meanwhile
            return root
        kept = [root for root in _recorded() if os.path.lexists(root)]
        for root in kept:
            if root.parent == temp and (why := _why_unusable(root)):
                log.warning("runtime folder %s %s; it is left alone, and new nodes get another", root, why)
        made = _make(temp)
        _record([*kept, made])
        return made


def node_folders(node_id: str) -> list[Path]:
    """Return every path at which a node's folder may be: nodes keep theirs when the root is made anew."""
    return [root / node_id for root in _all_roots()]


def node_ids() -> list[str]:
    """Return the ids of all nodes with a folder in a root of this home and store; warn about anything else in one."""
    found = set()
    for root in _all_roots():
        if why := why_not_mine(root):
            log.warning("%s %s: it is left alone", root, why)
            continue
        if root != _earlier_root() and not _is_marked(root):
            log.warning("%s does not carry the marker of this home and store: it is left alone", root)
            continue
        for entry in _entries(root):
            if _NODE_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                found.add(entry.name)
            elif entry.name != _MARKER:
                log.warning("%s is not a node's folder: it is left alone", entry.path)
    return sorted(found)


def remove_node_folders(node_id: str) -> str | None:
    """Remove a node's folder from whichever root it is in, and roots that are no longer used.

    Returns:
        What could not be removed; None when nothing of the node is left.
    """
    for root in _all_roots():
        folder = root / node_id
        # In a root of another user is nothing of ours, and nobody must be able to keep a node from ending.
        if not os.path.lexists(folder) or why_not_mine(root) or (_marker_of(root) or _mark()) != _mark():
            continue
        if folder.is_symlink() or not folder.is_dir():
            log.warning("%s is not a node's folder: it is left alone", folder)
        elif not remove_folder(folder):
            return f"{folder} cannot be removed"
    _drop_unused()
    return None


def remove_own_folder(folder: Path) -> None:
    """Remove the folder of the calling supervisor's node; its root as well when the home that records it is gone."""
    root = folder.parent
    if why_not_mine(root) is None:
        remove_folder(folder)
        if not Path(os.environ["SHOAL_HOME"]).exists():
            _remove_empty(root)


def turn_lock(turn: int) -> Path:
    """Return the lock file of a turn to start a node: the user's own on this host, whatever the home."""
    folder = temp_folder() / f"shoal-turns-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return lock_file(f"start{turn}")
    if why_not_private(folder):  # another user was there first
        return lock_file(f"start{turn}")
    return folder / f"start{turn}.lock"


def _told() -> Path | None:
    """The root of the node that the calling process belongs to; None elsewhere, or where it is of another home."""
    told = os.environ.get(ROOT_VARIABLE)
    return Path(told) if told and _why_unusable(Path(told)) is None else None


def temp_folder() -> Path:
    """Return the host's temp folder, in a node's processes too, which have one of their own."""
    if told := os.environ.get(ROOT_VARIABLE):
        folder = Path(told).parent
        if folder.name == f"shoal-{os.getuid()}":  # a root made by shoal before it recorded them
            folder = folder.parent
        if folder.is_dir():
            return folder
    return Path(tempfile.gettempdir())


def _newest(temp: Path) -> Path | None:
    return next((root for root in reversed(_recorded()) if root.parent == temp and not _why_unusable(root)), None)


def _why_unusable(root: Path) -> str | None:
    return why_not_private(root) or (None if _is_marked(root) else "does not carry the marker of this home and store")


def _make(temp: Path) -> Path:
    if why := why_replaceable(temp):
        raise StoreError(f"the temp folder {temp} {why}. Set TMPDIR to a folder that is safe, such as /tmp")
    length = len(os.fsencode(temp)) + len(_LONGEST_SOCKET)
    if length > _SOCKET_LIMIT:
        raise StoreError(
            f"the temp folder {temp} is too long a path: the nodes' sockets would have {length} bytes, {_SOCKET_LIMIT} "
            "are allowed. Set TMPDIR to a shorter path, such as /tmp"
        )
    try:
        root = Path(tempfile.mkdtemp(prefix="shoal-", dir=temp))
        _write(root / _MARKER, _mark())
    except OSError as error:
        raise StoreError(f"nothing can be made in the temp folder {temp}: {error}. Set TMPDIR elsewhere") from error
    return root


def _mark() -> dict[str, str]:
    return {"home": str(home().resolve()), "store": store_tag()}


def _marker_of(root: Path) -> object:
    """What a root's marker says; None where it has none."""
    try:
        return json.loads((root / _MARKER).read_text())
    except (OSError, ValueError):
        return None


def _is_marked(root: Path) -> bool:
    return _marker_of(root) == _mark()


def _record_file() -> Path:
    return per_host("runtime", "json")


def _recorded() -> list[Path]:
    """Every root made for this home, store and host that may still be there, the newest last."""
    try:
        return [Path(root) for root in json.loads(_record_file().read_text())]
    except (FileNotFoundError, ValueError):
        return []


def _record(roots: list[Path]) -> None:
    try:
        _write(_record_file(), [str(root) for root in roots])
    except OSError as error:
        raise StoreError(
            f"{_record_file()} cannot be written: {error}. Free some room, or set SHOAL_HOME elsewhere"
        ) from error


def _write(path: Path, content: object) -> None:
    """Write a JSON file whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content))
    partial.rename(path)


def _earlier_root() -> Path:
    """The root of nodes that were started by shoal before it recorded its roots."""
    digest = sha256(os.fsencode(home()) + store_tag().encode()).hexdigest()[:6]
    return temp_folder() / f"shoal-{os.getuid()}" / digest


def _close_earlier_root() -> None:
    """Keep other users out of it from now on: the umask of then gave it its mode, and nodes may still run there."""
    root = _earlier_root()
    for folder in (root.parent, root):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return
            os.fchmod(descriptor, 0o700)
        finally:
            os.close(descriptor)


def _all_roots() -> list[Path]:
    def candidates() -> Iterator[Path]:
        yield from filter(None, [_told()])
        yield from _recorded()
        yield _earlier_root()

    roots = [root for root in dict.fromkeys(candidates()) if os.path.lexists(root)]
    if _earlier_root() in roots:
        _close_earlier_root()
    return roots


def _drop_unused() -> None:
    """Remove empty roots that no new node will be put in, and forget those that are gone."""
    earlier = _earlier_root()
    if why_not_mine(earlier) is None:
        _remove_empty(earlier)
    if len(_recorded()) < 2:
        return
    with file_lock(lock_file("runtime")):
        recorded = _recorded()
        used = {_newest(root.parent) for root in recorded}
        for root in recorded:
            if root not in used and why_not_mine(root) is None and _is_marked(root):
                _remove_empty(root)
        if (left := [root for root in recorded if os.path.lexists(root)]) != recorded:
            _record(left)


def _entries(root: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(root) as entries:
            return list(entries)
    except FileNotFoundError:  # removed meanwhile
        return []


def _remove_empty(root: Path) -> None:
    try:
        if [entry.name for entry in _entries(root)] in ([], [_MARKER]):
            (root / _MARKER).unlink(missing_ok=True)
            root.rmdir()
    except OSError:  # used again, or gone, meanwhile
        return
