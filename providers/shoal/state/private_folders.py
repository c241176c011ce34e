"""Folders that other users of the machine cannot enter or replace: check a folder or the store's file, remove folders
safely, and make runtime roots.

A runtime root is a folder in the temp folder. It contains one folder per node, for the node's sockets, logs and
temporary files. Its path is short, because the paths of sockets in it are limited to 107 bytes. Ray creates a node's
folder and its subfolders with mode 0777, so a user who could enter them could replace a socket and collect tokens. Only
the root keeps other users out: it has mode 0700 and a random name. So each root is checked before it is used. A root
that fails the check is not changed, and a new root is created.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from shoal.errors import StoreError
from shoal.new_files import create_folder
from shoal.os_processes import has_proc
from shoal.state.home import file_lock, home, lock_file, per_host, store_tag, write_file

home_log = logging.getLogger("shoal.home")

_BESIDE = ("", "-wal", "-shm", "-journal")
"""Suffixes of the names of the files of a SQLite database. SQLite trusts the files beside the database: a WAL that
another user has put there would change its content."""


def why_not_mine(folder: Path) -> str | None:
    """Return the reason why another user could change or replace a folder, or None if no other user can.

    Returns:
        The reason as words to put after the folder's name, such as "is a symlink". None if the path is a real folder
        that belongs to the calling user, and no other user can write to it or replace it.
    """
    try:
        found = folder.lstat()
    except OSError as error:
        return f"cannot be checked ({error.strerror})"
    if stat.S_ISLNK(found.st_mode):
        return "is a symlink"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    if found.st_mode & 0o022:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}: other users can write to it"
    return why_replaceable(folder.parent)


def why_not_private(folder: Path) -> str | None:
    """Return the reason why another user could enter, change or replace a folder, or None if no other user can.

    The reason is words to put after the folder's name, as for `why_not_mine`.
    """
    return why_not_mine(folder) or why_folder_is_open(folder)


def why_replaceable(folder: Path) -> str | None:
    """Return the reason why another user could rename or remove this user's files in a folder, or None if no other
    user can.

    Returns:
        The reason as words to put after the folder's name, such as "belongs to user 1001". None if no other user can
        rename or remove the files. A folder to which all users may write is safe if it has the sticky bit, like /tmp.
    """
    trusted = (0, os.geteuid())
    for link in (folder, *folder.parents):
        if link.is_symlink() and link.lstat().st_uid not in trusted:
            return f"is reached by the symlink {link} of user {link.lstat().st_uid}"
    for above in dict.fromkeys((folder, *folder.parents, folder.resolve(), *folder.resolve().parents)):
        try:
            found = above.stat()
        except OSError as error:
            return f"cannot be checked ({error.strerror}: {above})"
        named = "" if above == folder else f"lies in {above}, which "
        if found.st_uid not in trusted and not _is_unmapped(found.st_uid):
            return f"{named}belongs to user {found.st_uid}"
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            return f"{named}has mode {stat.S_IMODE(found.st_mode):04o}: other users can replace files in it"
    return None


def remove_folder(folder: Path) -> bool:
    """Remove a folder and its contents, without following symlinks."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return True
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        # rmtree never follows a symlink, so nothing outside the folder is removed.
        shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


def make_file(file: Path) -> None:
    """Create an empty file with mode 0600, if the file does not exist and can be created.

    SQLite gives the files beside its database the mode of the database. By default this would be 0644.
    """
    with contextlib.suppress(OSError):  # SQLite reports a file that cannot be created
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def keep_file_private(file: Path) -> None:
    """Check that only this user can change the file of a SQLite store, and set its mode to 0600."""
    is_in_private_folder = why_folder_is_open(file.parent) is None
    if not is_in_private_folder and (why := _why_store_is_unsafe(file)):
        raise StoreError(
            f"the state store {file} {why}. Set SHOAL_STATE_URL to a file in a folder that belongs to you and to which "
            "no other user can write, or unset it to use $SHOAL_HOME"
        )
    for name in _BESIDE:
        found = Path(f"{file}{name}")
        try:
            owner, mode = found.stat().st_uid, stat.S_IMODE(found.stat().st_mode)
        except OSError:
            continue
        if not _is_trusted(owner):
            raise StoreError(
                f"{found} belongs to user {owner}, who can change it: move the file away, or set SHOAL_STATE_URL to a "
                "file that belongs to you"
            )
        if mode & 0o002 and not is_in_private_folder:
            raise StoreError(
                f"{found} has mode {mode:04o}: any user may have changed it. Check its contents and run "
                f"`chmod 600 {found}`"
            )
        if mode & 0o077 and owner == os.geteuid():
            try:
                found.chmod(0o600)
            except FileNotFoundError:
                continue  # the last connection of another process was closed, and SQLite has removed the file
            except OSError as error:
                raise StoreError(
                    f"{found} has mode {mode:04o}, and changing it to 0600 failed: {error}. Set SHOAL_STATE_URL to "
                    "another file"
                ) from error
            if not is_in_private_folder:
                home_log.warning("%s had mode %04o, so other users could read it: its mode is now 0600", found, mode)


def why_folder_is_open(folder: Path) -> str | None:
    """Return the reason why another user could enter a folder (a link is followed), or None if no other user can."""
    try:
        found = folder.stat()
    except OSError as error:
        return f"cannot be checked ({error.strerror})"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    mode = stat.S_IMODE(found.st_mode)
    return f"has mode {mode:04o}: other users can enter it" if mode & 0o077 else None


def _why_store_is_unsafe(file: Path) -> str | None:
    """Return the reason why another user could replace a file or put files beside it, as words to put after its path.

    In a folder with the sticky bit, another user cannot replace the file, but can put a WAL beside it.
    """
    for link in (file, *file.parents):
        if link.is_symlink() and not _is_trusted(owner := link.lstat().st_uid):
            return f"is reached by the symlink {link} of user {owner}"
    for place in dict.fromkeys((file.parent, file.resolve().parent)):
        for folder in (place, *place.parents):
            try:
                found = folder.stat()
            except OSError:
                continue  # SQLite reports a folder that is missing
            mode = stat.S_IMODE(found.st_mode)
            if folder == place and not _is_trusted(found.st_uid):
                return f"lies in {folder}, which belongs to user {found.st_uid}"
            if mode & 0o002 and (folder == place or not mode & stat.S_ISVTX):
                return f"lies in {folder}, which has mode {mode:04o}: any user can put files there"
    return None


def _is_trusted(uid: int) -> bool:
    return uid in (0, os.geteuid()) or _is_unmapped(uid)


def _is_unmapped(uid: int) -> bool:
    """Return whether a user id belongs to no user of this user namespace (the set of users that a container can see).

    In a rootless container, files that belong to the host's root, such as /tmp, are shown with such an id.
    """
    if not has_proc():
        return False
    ranges = (line.split() for line in Path("/proc/self/uid_map").read_text().splitlines())
    return not any(int(first) <= uid < int(first) + int(count) for first, _, count in ranges)


ROOT_VARIABLE = "SHOAL_RUNTIME_ROOT"
"""Environment variable with the runtime root, for a node's processes. These
processes cannot find the root with TMPDIR, because their TMPDIR is the node's own folder."""

_MARKER = "shoal.json"
"""Name of the file in a runtime root that contains the home folder (``SHOAL_HOME``) and the store to which the root
belongs."""

_NODE_ID = re.compile(r"[0-9a-f]{10}")

_SOCKET_LIMIT = 107
"""Largest length in bytes of the path of a Unix socket, without the final zero byte."""

_LONGEST_SOCKET = "/shoal-12345678/0123456789/session_2026-01-01_00-00-00_000000_4194304/sockets/dash_MetricsHead"
"""Example of the longest socket path below the temp folder: a socket of Ray's dashboard. Its length is used to check
whether the path of a temp folder is too long."""

log = logging.getLogger("shoal.runtime")


def runtime_root() -> Path:
    """Return the runtime root for new nodes. Create it in the temp folder if
    needed.

    There is one root for each combination of home folder, store, host and temp folder. A file in the home folder lists
    all roots. If the calling process belongs to a node, the result is the root that contains this node's folder.
    """
    if root := _root_of_this_node():
        return root
    temp = temp_folder()
    if root := _newest(temp):
        return root
    with file_lock(lock_file("runtime")):
        # Another process may have created a runtime root while this process waited for the lock, so check again.
        if root := _newest(temp):
            return root
        kept = [root for root in _recorded() if os.path.lexists(root)]
        for root in kept:
            if root.parent == temp and (why := _why_unusable(root)):
                log.warning("runtime folder %s %s; it is not used any more, and new nodes get a new one", root, why)
        made = _make(temp)
        _record([*kept, made])
        return made


def node_folders(node_id: str) -> list[Path]:
    """Return all paths at which a node's folder may be: one in each runtime root.

    A node's folder may be in an older root, because nodes keep their folder when a new root is created.
    """
    return [root / node_id for root in _all_roots()]


def node_ids() -> list[str]:
    """Return the ids of all nodes that have a folder on this host and belong to this process's `$SHOAL_HOME` and store.

    Files that are not folders of nodes are ignored, with a warning in the log.
    """
    found = set()
    for root in _all_roots():
        if why := _why_not_ours(root):
            log.warning("%s %s: it is ignored", root, why)
            continue
        for entry in _entries(root):
            if _NODE_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                found.add(entry.name)
            elif entry.name != _MARKER:
                log.warning("%s is not a node's folder: it is ignored", entry.path)
    return sorted(found)


def remove_node_folders(node_id: str) -> str | None:
    """Remove a node's folder from each runtime root that has one. Then remove all
    empty runtime roots but the current one, in which new nodes get their folders.

    Returns:
        A message about a folder that could not be removed; None if all folders of the node were removed.
    """
    for root in _all_roots():
        folder = root / node_id
        # Skip a runtime root of another user or of another home folder, because it contains no folder of this node. An
        # error here would prevent the caller from recording the end of the node.
        if not os.path.lexists(folder) or _why_not_ours(root):
            continue
        if folder.is_symlink() or not folder.is_dir():
            log.warning("%s is not a node's folder: it is ignored", folder)
        elif not remove_folder(folder):
            return f"{folder} cannot be removed"
    _drop_unused()
    return None


def remove_own_folder(folder: Path) -> None:
    """Remove a node's folder of sockets, logs and temporary files. Only the node's own supervisor process calls this
    function.

    If ``SHOAL_HOME`` was removed, also remove the root if it is empty, because no other process would find it.
    """
    root = folder.parent
    if why_not_mine(root) is None:
        remove_folder(folder)
        if not Path(os.environ["SHOAL_HOME"]).exists():
            _remove_empty(root)


def turn_lock(turn: int) -> Path:
    """Return the path of one of the lock files that limit how many nodes start at the same time.

    A supervisor has to lock one of these files (a turn) while it starts its node. All home folders of a user on this
    host use the same files, because the nodes share the host's CPUs.
    """
    return _lock_of_user("turns", f"start{turn}")


def gpu_lock(gpu: str) -> Path:
    """Return the path of the lock file that a node locks while it uses a GPU. All nodes of a user on this host share
    this file, even if they belong to different ``$SHOAL_HOME`` folders.
    """
    return _lock_of_user("gpus", gpu)


def _lock_of_user(kind: str, name: str) -> Path:
    folder = temp_folder() / f"shoal-{kind}-{os.geteuid()}"
    with suppress(OSError):
        create_folder(folder)
    # If other users can enter or replace the folder, they could lock the files in it, and so delay nodes. In this case,
    # use a lock file in `$SHOAL_HOME`.
    return lock_file(name) if why_not_private(folder) else folder / f"{name}.lock"


def _root_of_this_node() -> Path | None:
    """Return the runtime root of the node to which the calling process belongs.

    The result is None if the process belongs to no node, or to a node of another home folder or store.
    """
    root = os.environ.get(ROOT_VARIABLE)
    return Path(root) if root and _why_unusable(Path(root)) is None else None


def temp_folder() -> Path:
    """Return the host's temp folder, such as /tmp. Runtime roots (parent folders of nodes' folders) are created in it.

    In a node's processes, the result is not TMPDIR, because their TMPDIR is the node's folder.
    """
    if root := os.environ.get(ROOT_VARIABLE):
        folder = Path(root).parent
        if folder.is_dir():
            return folder
    return Path(tempfile.gettempdir())


def _newest(temp: Path) -> Path | None:
    return next((root for root in reversed(_recorded()) if root.parent == temp and not _why_unusable(root)), None)


def _why_unusable(root: Path) -> str | None:
    return why_not_private(root) or _why_not_ours(root)


def _why_not_ours(root: Path) -> str | None:
    """Return the reason why a folder is no runtime root of this user, home folder and store; None if it is one."""
    if why := why_not_mine(root):
        return why
    with suppress(OSError, ValueError):
        if json.loads((root / _MARKER).read_text()) == _mark():
            return None
    return "lacks the marker file of this home and store"


def _make(temp: Path) -> Path:
    if why := why_replaceable(temp):
        raise StoreError(f"the temp folder {temp} {why}. Set TMPDIR to a safe folder, such as /tmp")
    length = len(os.fsencode(temp)) + len(_LONGEST_SOCKET)
    if length > _SOCKET_LIMIT:
        raise StoreError(
            f"the path of the temp folder {temp} is too long: the paths of the nodes' sockets would have {length} "
            f"bytes, {_SOCKET_LIMIT} are allowed. Set TMPDIR to a shorter path, such as /tmp"
        )
    try:
        root = Path(tempfile.mkdtemp(prefix="shoal-", dir=temp))
        write_file(root / _MARKER, json.dumps(_mark()))
    except OSError as error:
        raise StoreError(
            f"no folder can be created in the temp folder {temp}: {error}. Set TMPDIR to another folder"
        ) from error
    return root


def _mark() -> dict[str, str]:
    return {"home": str(home().resolve()), "store": store_tag()}


def _record_file() -> Path:
    return per_host("runtime", "json")


def _recorded() -> list[Path]:
    """Read the file that lists the runtime roots (parent folders of nodes' folders) of this host and store. Return
    their paths, the newest last. Some of them may no longer exist."""
    try:
        return [Path(root) for root in json.loads(_record_file().read_text())]
    except (FileNotFoundError, ValueError):
        return []


def _record(roots: list[Path]) -> None:
    write_file(_record_file(), json.dumps([str(root) for root in roots]))


def _all_roots() -> list[Path]:
    candidates = [*filter(None, [_root_of_this_node()]), *_recorded()]
    return [root for root in dict.fromkeys(candidates) if os.path.lexists(root)]


def _drop_unused() -> None:
    """Delete empty runtime roots (parent folders of nodes' folders) that will get no new nodes, and remove deleted
    roots from the list in the home folder."""
    if len(_recorded()) < 2:
        return
    with file_lock(lock_file("runtime")):
        recorded = _recorded()
        used = {_newest(root.parent) for root in recorded}
        for root in recorded:
            if root not in used and _why_not_ours(root) is None:
                _remove_empty(root)
        if (left := [root for root in recorded if os.path.lexists(root)]) != recorded:
            _record(left)


def _entries(root: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(root) as entries:
            return list(entries)
    except FileNotFoundError:
        # Another process has removed the runtime root in the meantime, so there are no entries to return.
        return []


def _remove_empty(root: Path) -> None:
    # OSError: another process has removed the runtime root in the meantime, or has created a folder in it. So the root
    # is not removed here.
    with suppress(OSError):
        if [entry.name for entry in _entries(root)] in ([], [_MARKER]):
            (root / _MARKER).unlink(missing_ok=True)
            root.rmdir()
